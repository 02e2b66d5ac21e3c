"""What requests were refused for while they got nothing, as runs of steps with the same cause."""

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.pieces import place_of

OTHER = pl.lit(str(Cause.OTHER))


def cause_runs(
    spans: pl.DataFrame, usual: pl.Series, named: pl.DataFrame, steps: pl.DataFrame
) -> pl.DataFrame:
    """One row per span and run of steps with the same cause, in their order.

    Args:
        spans: ``request_id``, and ``first`` and ``left``: the places of the first step of the span and of the
            first after it. Other columns are kept.
        usual: The cause of each step, for whoever it does not name.
        named: ``step``, ``request_id``, ``cause``: those whom a step names.
        steps: ``placed(timeline.steps)``.

    Returns:
        The columns of ``spans`` with ``at`` and ``last``, the places of the run's steps, and ``cause``.
    """
    spans = spans.filter(pl.col("left") > pl.col("first")).with_row_index("span")
    ends = usual.alias("cause").to_frame().with_row_index("at").with_columns(pl.col("at").cast(pl.Int64))
    changes = pl.concat([_of_steps(spans, ends), _of_names(spans, ends, named, steps)]).sort(
        "span", "at", "weight"
    )
    changes = changes.unique(["span", "at"], keep="last", maintain_order=True)
    kind = ["span", "cause"]
    changed = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in kind)
    return (
        changes.filter(changed)
        .with_columns(last=pl.col("at").shift(-1).over("span").fill_null(pl.col("left")) - 1)
        .drop("span", "weight")
    )


def _of_steps(spans: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """For each span the places where the usual cause is another than before."""
    changed = pl.col("cause").ne_missing(pl.col("cause").shift(1)).fill_null(value=True)
    run = ends.select(run=changed.cum_sum().cast(pl.Int64))["run"]
    begins = ends.with_columns(run=run).unique("run", keep="first", maintain_order=True)
    return (
        spans.with_columns(first_run=run.gather(spans["first"]), last_run=run.gather(spans["left"] - 1))
        .with_columns(run=pl.int_ranges("first_run", pl.col("last_run") + 1))
        .explode("run")
        .join(begins, on="run", how="left", maintain_order="left")
        .select(*spans.columns, at=pl.max_horizontal("first", "at"), cause="cause", weight=_weight(0))
    )


def _of_names(
    spans: pl.DataFrame, ends: pl.DataFrame, named: pl.DataFrame, steps: pl.DataFrame
) -> pl.DataFrame:
    """Steps that name a request, and the step after each, which may not."""
    latest = named.drop_nulls().unique(["step", "request_id"], keep="last", maintain_order=True)
    own = (
        place_of(latest, steps, "step", "at")
        .join(spans, on="request_id", maintain_order="left")
        .filter((pl.col("first") <= pl.col("at")) & (pl.col("at") < pl.col("left")))
        .select(*spans.columns, "at", "cause", weight=_weight(2))
    )
    after = (
        own.with_columns(pl.col("at") + 1)
        .filter(pl.col("at") < pl.col("left"))
        .drop("cause", "weight")
        .join(ends, on="at", how="left", maintain_order="left")
        .select(*spans.columns, "at", "cause", weight=_weight(1))
    )
    return pl.concat([own, after])


def _weight(value: int) -> pl.Expr:
    """Which of several changes at a place counts: the heaviest."""
    return pl.lit(value, pl.Int8)
