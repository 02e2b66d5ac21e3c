"""Holders of resources that other requests are refused: KV blocks of idle requests, most of the token budget.

A streaming session keeps its blocks between two parts; a finished request keeps them until a KV transfer has
fetched them. KV loads in progress and requests that their scheduler set aside are handled elsewhere. A long
prompt takes most of the steps' prefill tokens.
"""

from typing import Any

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.frames import EngineFrames

FEWEST_STEPS = 10
"""Fewest steps of a run, within which every running request gets tokens."""
MOST_FRAC = 0.5
"""Share of the held blocks from which their holders are to blame."""
ELSEWHERE = ("kv_loads", "set_aside")

SCHEMA = {
    "first_step": pl.Int64,
    "last_step": pl.Int64,
    "head": pl.String,
    "held": pl.Int64,
    "request_id": pl.String,
    "blocks": pl.Int64,
    "kind": pl.String,
    "silent": pl.Boolean,
    "alone": pl.Boolean,
}


def idle_holders(frames: EngineFrames) -> pl.DataFrame:
    """Return a row per run of steps that refused a request KV blocks, and holder that got no tokens in it.

    Only runs of at least ``FEWEST_STEPS`` count, in which such holders keep ``MOST_FRAC`` of all held blocks.

    Columns: ``first_step``, ``last_step``, ``head`` (the refused request), ``held`` (blocks of all holders
    when it was first refused), ``request_id``, its ``blocks``, ``kind`` (``session``, ``finished`` or
    ``request``), ``silent`` (a session whose client has not sent the next part) and ``alone`` (nobody ran).
    """
    if "refusals" not in frames.lists:
        return pl.DataFrame(schema=SCHEMA)
    gone = frames.finishes.select("request_id", "finished_us").unique("request_id", keep="last")
    rows = (
        _runs(frames)
        .join_asof(_held(frames), left_on="first_step", right_on="step", by="head", check_sortedness=False)
        .explode("request_id", "blocks")
        .join(gone, on="request_id", how="left", maintain_order="left")
        .with_columns(unfetched=pl.col("finished").list.contains(pl.col("request_id")))
        .filter(pl.col("unfetched") | (pl.col("finished_us") > pl.col("begin_us")).fill_null(value=True))
        .drop_nulls("request_id")
    )
    got = frames.stretches.select("request_id", "step", got_last="last_step").collect()
    paused = frames.exits.filter(pl.col("cause") == str(Cause.STREAMING_INPUT_PENDING))
    session = pl.col("request_id").is_in(frames.sessions.implode())
    idle = (
        _without(rows, got)
        .join(_elsewhere(frames), on="request_id", how="anti", maintain_order="left")
        .filter(pl.col("blocks").sum().over("first_step") >= MOST_FRAC * pl.col("held"))
    )
    holder = ["first_step", "request_id"]
    answered = _without(idle, paused.select("request_id", "step", got_last="step")).select(holder)
    kind = pl.when("unfetched").then(pl.lit("finished")).when(session).then(pl.lit("session"))
    return (
        idle.join(
            answered.with_columns(silent=pl.lit(value=False)), on=holder, how="left", maintain_order="left"
        )
        .with_columns(pl.col("silent").fill_null(value=True), kind=kind.otherwise(pl.lit("request")))
        .select(*SCHEMA)
    )


def _runs(frames: EngineFrames) -> pl.DataFrame:
    """Return runs of steps that refused ``head``: ``first_step``, ``last_step``, ``begin_us``, ``alone``."""
    refused = frames.exits.filter(
        pl.col("refusal") & (pl.col("loop") == "waiting") & (pl.col("cause") == str(Cause.KV_BLOCKS))
    ).select("step", head="request_id")
    steps = frames.steps.select("step", "start_us", "num_running_after")
    rows = refused.drop_nulls().unique("step", keep="last").join(steps, on="step").sort("step")
    goes_on = (pl.col("step") == pl.col("step").shift(1) + 1) & (pl.col("head") == pl.col("head").shift(1))
    return (
        rows.group_by((~goes_on.fill_null(value=False)).cum_sum().alias("run"), maintain_order=True)
        .agg(
            pl.col("head").first(),
            first_step=pl.col("step").first(),
            last_step=pl.col("step").last(),
            begin_us=pl.col("start_us").first(),
            alone=pl.col("num_running_after").max() == 0,
        )
        .filter(pl.col("last_step") - pl.col("first_step") + 1 >= FEWEST_STEPS)
    )


def _held(frames: EngineFrames) -> pl.DataFrame:
    """Return ``step``, ``head``, ``held``, and of its holders ``request_id``, ``blocks`` and ``finished``."""
    taken = frames.lists["refusals"].select(
        "step", "request_id", "holders", "held", "finished_holders", "other_held"
    )
    rows = []
    for step, head, holders, groups, finished, other_blocks in taken.collect().iter_rows():
        blocks = [sum(each) for each in zip(*(group for group in groups if group), strict=True)]
        if len(blocks) == len(holders):
            rows.append((step, head, holders, blocks, finished or [], sum(blocks) + sum(other_blocks or [])))
    names, numbers = pl.List(pl.String), pl.List(pl.Int64)
    schema: dict[str, Any] = {"step": pl.Int64, "head": pl.String, "request_id": names, "blocks": numbers}
    schema |= {"finished": names, "held": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row").sort("step")


def _without(rows: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the rows whose request has none of these spans (``step`` to ``got_last``) within its run."""
    within = (pl.col("step") <= pl.col("last_step")) & (pl.col("got_last") >= pl.col("first_step"))
    touched = rows.select("request_id", "first_step", "last_step").join(spans, on="request_id").filter(within)
    return rows.join(touched, on=["request_id", "first_step"], how="anti", maintain_order="left")


def _elsewhere(frames: EngineFrames) -> pl.DataFrame:
    holders = [frames.lists[name].select("request_id") for name in ELSEWHERE if name in frames.lists]
    return pl.concat([pl.LazyFrame(schema={"request_id": pl.String}), *holders]).unique().collect()


MOST_PREFILL_FRAC = 0.5
"""Share of a step's prefill tokens that one prompt takes to count as long."""
SHORT_FRAC = 0.25
"""Relative length up to which a prompt is short beside another one; longer prompts are of the same kind."""


def prefills(frames: EngineFrames) -> pl.DataFrame:
    """Return one row per step and prompt of which the step computed a part.

    Columns, as in ``timeline.requests``: ``step``, ``request_id``, ``prompt_tokens``, ``scheduled_tokens``
    and ``computed_tokens``.
    """
    about = frames.first_arrivals.select("request_id", "prompt_tokens")
    begun = frames.stretches.join(about.lazy(), on="request_id").filter(
        pl.col("computed_tokens") < pl.col("prompt_tokens")
    )
    # A stretch of several steps goes on computing the prompt, but may decode in its last ones.
    rows = begun.with_columns(step=pl.int_ranges("step", pl.col("last_step") + 1), at=pl.lit(0)).collect()
    return (
        rows.with_columns(number=pl.int_ranges(0, pl.col("step").list.len()))
        .explode("step", "number")
        .with_columns(pl.col("computed_tokens") + pl.col("number") * pl.col("scheduled_tokens"))
        .filter(pl.col("computed_tokens") < pl.col("prompt_tokens"))
        .select("step", "request_id", "prompt_tokens", "scheduled_tokens", "computed_tokens")
    )


def long_prefills(frames: EngineFrames) -> pl.DataFrame:
    """Return the steps in which one long prompt took at least half of the prefill tokens.

    A prompt is long if it is larger than the token budget and the usual prompt is short beside it; many long
    prompts are simply a full device.

    Columns: ``step``, ``request_id``, ``prompt_tokens``, ``scheduled_tokens`` and ``prefill_tokens`` (of all
    prompts in this step).
    """
    arrivals = frames.arrivals.filter(~pl.col("streaming_update"))
    prompts = pl.concat([frames.present["prompt_tokens"], arrivals["prompt_tokens"]])
    usual = prompts.quantile(0.5, "lower") or 0
    return (
        prefills(frames)
        .with_columns(prefill_tokens=pl.col("scheduled_tokens").sum().over("step"))
        .filter(
            (pl.col("prompt_tokens") > frames.token_budget)
            & (SHORT_FRAC * pl.col("prompt_tokens") >= usual)
            & (pl.col("scheduled_tokens") >= MOST_PREFILL_FRAC * pl.col("prefill_tokens"))
        )
        .sort("step", "scheduled_tokens", descending=[False, True])
        .unique("step", keep="first", maintain_order=True)
        .select("step", "request_id", "prompt_tokens", "scheduled_tokens", "prefill_tokens")
    )
