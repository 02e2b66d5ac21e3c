"""What the rules ``...-bound`` share: one limit explains most of the time that requests waited."""

from dataclasses import dataclass

import polars as pl

from schedtrace.diagnose.limits import refused_demand
from schedtrace.diagnose.rules.common import counted, in_trials, share, step_numbers, trial_numbers
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

MOST_OF_IT = 0.5
"""Above half, no other cause can explain as much."""

FELT = 0.10
"""A tenth of the requests' time end to end is felt; below that the limit is told as information."""


@dataclass(frozen=True)
class Bound:
    """One limit, and the words for it."""

    code: str
    causes: tuple[str, ...]
    what: str
    advice: str


def find_bound(timeline: Timeline, bound: Bound) -> list[Finding]:
    """At most one finding: this limit explains more than ``MOST_OF_IT`` of the time spent waiting."""
    demand = refused_demand(timeline)
    ours = demand.filter(pl.col("cause").is_in(bound.causes))
    wait_us, all_us = int(ours["wait_us"].sum() or 0), int(demand["wait_us"].sum() or 0)
    if not all_us or wait_us / all_us <= MOST_OF_IT:
        return []
    steps = timeline.steps.filter(pl.col("step").is_in(ours["step"].unique().implode()))
    trials = trial_numbers(steps)
    left = _mean(steps, pl.col("remaining_budget") / pl.col("token_budget"))
    free = _mean(steps, pl.col("kv_blocks_free_after") / pl.col("kv_blocks_total"))
    seats = _mean(steps, 1 - pl.col("num_running_after") / timeline.seats)
    lived_us = timeline.finishes.select((pl.col("last_token_us") - pl.col("queued_us")).sum()).item() or 0
    felt = wait_us / lived_us if lived_us else None
    message = (
        f"{share(wait_us / all_us)} of the time that requests waited{in_trials(trials, len(timeline.trials()))} "
        f"they waited for {bound.what}: {wait_us / 1e6:,.2f} s added up over the requests, in "
        f"{counted(steps.height, 'step')}"
        + (f" ({share(felt)} of their time in the engine)" if felt is not None else "")
        + f". Meanwhile {_room(left, free, seats)}."
    )
    longest = ours.sort("wait_us", "step", descending=[True, False]).row(0, named=True)
    return [
        Finding(
            code=bound.code,
            severity="warning" if felt is not None and felt >= FELT else "info",
            cause=bound.causes[0],
            via=str(steps["waiting_via"].unique().sort()[0]),
            engine_rank=timeline.rank,
            count=steps.height,
            trials=trials,
            steps=step_numbers(steps),
            tokens=round(float(ours["tokens"].max() or 0)),  # type: ignore[arg-type]  # a column of floats
            message=message,
            advice=bound.advice,
            evidence={
                "share_frac": wait_us / all_us,
                "wait_ms": wait_us / 1e3,
                "of_time_in_engine_frac": felt,
                "mean_budget_left_frac": left,
                "mean_blocks_free_frac": free,
                "mean_seats_free_frac": seats,
                "examples": [{name: longest[name] for name in ("step", "trial", "requests", "wait_us")}],
                "example": (
                    f"after step {longest['step']} {counted(longest['requests'], 'request')} waited "
                    f"{longest['wait_us'] / 1e3:,.1f} ms in all for it."
                ),
            },
        )
    ]


def _mean(steps: pl.DataFrame, value: pl.Expr) -> float | None:
    mean = steps.select(value.mean()).item()
    return None if mean is None else float(mean)


def _room(left: float | None, free: float | None, seats: float | None) -> str:
    """What else was free in these steps: where all of it was, the limit is worth raising."""
    parts = [(left, "the token budget"), (free, "the KV blocks"), (seats, "the seats")]
    known = [f"{share(max(0.0, part))} of {of}" for part, of in parts if part is not None]
    return f"on average {', '.join(known[:-1])} and {known[-1]} were free"
