"""Spells in which an engine stepped and scheduled nothing, although it had requests."""

import polars as pl

from schedtrace.model.causes import NOT_A_REFUSAL, Cause
from schedtrace.timeline.timeline import Timeline


def empty_steps(timeline: Timeline) -> pl.DataFrame:
    """One row per unbroken series of steps that scheduled nothing while somebody waited or ran.

    Columns: ``step`` (the first one), ``trial``, ``steps`` (how many), ``since_us`` (its start, or when the
    last output from before it was back, if that was later: until then the device had work), ``stalled_us``
    (from there to the start of the next step that scheduled anything; to its own last step's end if there is
    none in the trial), ``unended`` (there is none), ``cause``, ``via``, ``request_id`` and ``location`` of
    the exit that most of its steps were left at, ``num_waiting`` and ``num_running`` after its last step.
    """
    there = (pl.col("num_waiting_after") > 0) | (pl.col("num_running_after") > 0)
    steps = timeline.steps.join(
        _running_exits(timeline), on="step", how="left", maintain_order="left"
    ).with_columns(
        empty=(pl.col("total_requests") == 0) & there,
        last_us=pl.max_horizontal("end_us", "output_us"),
        back_us=pl.col("output_us").cum_max().shift(1).over("trial").fill_null(0),
        next_us=pl.col("start_us").shift(-1).over("trial"),
    )
    of_waiting = (pl.col("num_waiting_after") > 0) & ~pl.col("waiting_cause").is_in(NOT_A_REFUSAL)
    told = {
        name: pl.when(of_waiting).then(f"waiting_{name}").otherwise(f"running_{name}")
        for name in ("cause", "via", "request_id", "location")
    }
    changed = (pl.col("empty") != pl.col("empty").shift(1)) | pl.col("trial").ne_missing(
        pl.col("trial").shift(1)
    )
    empty = (
        steps.rename({"waiting_request": "waiting_request_id"})
        .with_columns(spell=changed.fill_null(value=True).cum_sum(), **told)
        .filter("empty")
        .with_columns(pl.col("cause").fill_null(str(Cause.OTHER)), pl.col("via").fill_null("inferred"))
        .with_columns(often=pl.len().over("spell", "cause"))
    )
    main = (
        empty.sort("spell", "often", "step", descending=[False, True, False])
        .unique("spell", keep="first", maintain_order=True)
        .select("spell", *told)
    )
    since = pl.max_horizontal(pl.col("start_us").first(), pl.col("back_us").first())
    return (
        empty.group_by("spell", maintain_order=True)
        .agg(
            pl.col("step").first(),
            pl.col("trial").first(),
            pl.len().alias("steps"),
            since.alias("since_us"),
            pl.coalesce(pl.col("next_us").last(), pl.col("last_us").last()).alias("until_us"),
            pl.col("next_us").last().is_null().alias("unended"),
            pl.col("num_waiting_after").last().alias("num_waiting"),
            pl.col("num_running_after").last().alias("num_running"),
        )
        .join(main, on="spell", maintain_order="left")
        .with_columns(stalled_us=(pl.col("until_us") - pl.col("since_us")).clip(0))
        .drop("spell", "until_us")
    )


def _running_exits(timeline: Timeline) -> pl.DataFrame:
    """For every step the most frequent cause for which a running request got nothing."""
    return (
        timeline.exits.filter((pl.col("loop") == "running") & pl.col("refusal"))
        .with_columns(often=pl.col("count").sum().over("step", "cause"))
        .sort("step", "often", descending=[False, True], maintain_order=True)
        .unique("step", keep="first", maintain_order=True)
        .select("step", pl.col("cause", "via", "request_id", "location").name.prefix("running_"))
    )
