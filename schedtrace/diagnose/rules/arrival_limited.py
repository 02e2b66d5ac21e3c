"""``arrival-limited``: the step was small because requests had not arrived yet, and nobody was refused."""

from typing import Any

import polars as pl

from schedtrace.diagnose.rules.common import (
    at_step,
    counted,
    in_trials,
    only,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "arrival-limited"
SUMMARY = "steps were small because requests had not reached the scheduler yet; nobody was refused"
NEEDS = (Fact.TIMES, Fact.QUEUE, Fact.EXITS, Fact.LIVES, Fact.REQUESTS)
ADVICE_OPEN = (
    "Nobody was refused: no limit to raise. Requests that come by themselves meet a step that is already "
    "under way; vLLM does not wait for more of them."
)
ADVICE_CLOSED = (
    "Nobody was refused: no limit to raise, and no bug in the budget. To measure with full batches, "
    "have everything queued before the first step: schedtrace run --prequeue "
    "(in vLLM: vllm bench throughput --prequeue-requests)."
)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/arrival-limited.md``."""
    late = late_requests(timeline)
    if late.is_empty():
        return []
    steps = late.select("step", "trial").unique()
    first_seen = (
        timeline.admitted.lazy()
        .filter(pl.col("phase") == "new")
        .group_by("request_id")
        .agg(pl.col("step").min())
    ).collect()
    followers = late.select("request_id").join(first_seen, on="request_id")["step"].unique()
    extra = timeline.steps.filter(pl.col("step").is_in(followers.implode()))
    extra_ms = float(extra.select((pl.col("output_us") - pl.col("start_us")).sum()).item() or 0) / 1e3
    latest_ms = float(late["late_us"].max() or 0) / 1e3  # type: ignore[arg-type]  # an integer column
    on_their_way = late.filter(pl.col("late_us") <= 0).height
    trials = trial_numbers(steps)
    tokens = int(late["prompt_tokens"].sum())
    message = (
        f"{counted(steps.height, 'step')}{in_trials(trials, len(timeline.trials()))} left token budget unused "
        "because requests had not reached the scheduler yet: when schedule() ended, nothing eligible "
        "waited. "
        f"{counted(late.height, 'request')} ({tokens:,} tokens) that would have fitted came before the "
        f"step's output was back, {_how_late(latest_ms, on_their_way, late.height)}, "
        f"and {_taken_in(extra.height, extra_ms)}."
    )
    return [
        Finding(
            code=CODE,
            severity="info",
            cause=Cause.QUEUE_EMPTY,
            via=str(late["waiting_via"].unique().sort()[0]),
            location=only(late["waiting_location"]),
            engine_rank=timeline.rank,
            count=steps.height,
            trials=trials,
            steps=step_numbers(steps),
            tokens=tokens,
            message=message,
            advice=ADVICE_CLOSED if timeline.closed_workload else ADVICE_OPEN,
            evidence={
                "late_requests": late.height,
                "late_us_min": late["late_us"].min(),
                "late_us_max": late["late_us"].max(),
                "on_their_way": on_their_way,
                "extra_steps": extra.height,
                "extra_steps_us": round(extra_ms * 1e3),
                "example": _in_words(_examples(late)[0]),
                "examples": _examples(late),
            },
        )
    ]


def late_requests(timeline: Timeline) -> pl.DataFrame:
    """Requests that a step missed only because they were not there yet, and that would have fitted into it.

    One row per request: ``step``, ``trial``, ``request_id``, ``prompt_tokens``, ``late_us`` (arrival at the
    front end minus the end of ``schedule()``; negative: it was on its way) and the step's columns. A request
    is counted once, at the first step whose output came back after its arrival.
    """
    steps = (
        timeline.steps.filter(
            (pl.col("total_requests") > 0)
            & pl.col("output_us").is_not_null()
            & pl.col("end_us").is_not_null()
        )
        .select(
            "step",
            "trial",
            "end_us",
            "output_us",
            "remaining_budget",
            "used_tokens",
            "total_requests",
            "waiting_cause",
            "waiting_via",
            "waiting_location",
            "num_running_after",
            "kv_blocks_free_after",
        )
        .sort("output_us")
    )
    arrivals = (
        timeline.arrivals.filter(pl.col("arrived_us").is_not_null() & ~pl.col("streaming_update"))
        .select("request_id", "arrived_us", "queued_us", "prompt_tokens")
        .sort("arrived_us")
    )
    missed = arrivals.join_asof(
        steps, left_on="arrived_us", right_on="output_us", strategy="forward", coalesce=False
    ).filter(
        (pl.col("queued_us") >= pl.col("end_us"))
        & (pl.col("remaining_budget") > 0)
        & (pl.col("waiting_cause") == Cause.QUEUE_EMPTY)
    )
    block_size = timeline.header.block_size
    blocks = pl.lit(None, pl.Int64) if block_size is None else -(-pl.col("prompt_tokens") // block_size)
    seats = timeline.seats - pl.col("num_running_after")
    return (
        missed.sort("queued_us")
        .with_columns(
            late_us=pl.col("arrived_us") - pl.col("end_us"),
            tokens_so_far=pl.col("prompt_tokens").cum_sum().over("step"),
            blocks_so_far=blocks.cum_sum().over("step"),
            place=pl.col("step").cum_count().over("step"),
        )
        .filter(
            (pl.col("tokens_so_far") <= pl.col("remaining_budget"))
            & (pl.col("place") <= seats)
            & (pl.col("blocks_so_far") <= pl.col("kv_blocks_free_after")).fill_null(value=True)
        )
    )


def _taken_in(steps: int, duration_ms: float) -> str:
    """When they were scheduled at last."""
    if not steps:
        return "had not been scheduled when the trace ended"
    took = f" ({duration_ms:,.0f} ms in all)" if duration_ms else ""
    return f"were first scheduled in {counted(steps, 'later step')}{took}"


def _how_late(latest_ms: float, on_their_way: int, count: int) -> str:
    """When they reached the front end, as seen from the end of ``schedule()``."""
    if on_their_way == count:
        return "all of them already on their way from the front end"
    way = f" ({on_their_way:,} of them already on their way before)" if on_their_way else ""
    return f"the last one {latest_ms:,.1f} ms after schedule(){way}"


def _in_words(example: dict[str, Any]) -> str:
    return (
        f"{at_step(example)} scheduled {example['scheduled_requests']:,} "
        f"({counted(example['scheduled_tokens'], 'token')}) of the "
        f"{example['scheduled_requests'] + example['late_requests']:,} requests that it could have, "
        f"with {example['remaining_budget']:,} tokens of budget left."
    )


def _examples(late: pl.DataFrame) -> list[dict[str, Any]]:
    """The three steps that missed most."""
    return (
        late.group_by("step", "trial", maintain_order=True)
        .agg(
            pl.col("total_requests").first().alias("scheduled_requests"),
            pl.col("used_tokens").first().alias("scheduled_tokens"),
            pl.col("remaining_budget").first(),
            pl.len().alias("late_requests"),
            pl.col("prompt_tokens").sum().alias("late_tokens"),
            pl.col("late_us").max().alias("late_us_max"),
        )
        .sort("late_requests", "step", descending=[True, False])
        .head(3)
        .to_dicts()
    )
