"""``scheduler-overhead``: the device waited for the host between steps, though requests were running."""

import polars as pl

from schedtrace.diagnose.rules.common import (
    at_step,
    counted,
    in_trials,
    severity_of,
    share,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "scheduler-overhead"
SUMMARY = "the device waited between steps while the host scheduled, processed outputs or did other work"
NEEDS = (Fact.TIMES, Fact.QUEUE)

FOUND_FROM_FRAC = 0.05
"""A twentieth of the run: below that no setting of the host's work is worth a person's time."""

ADVICE_SYNC = (
    "Asynchronous scheduling is off: --async-scheduling does this work while the device computes. Larger "
    "steps (more requests at once) make it a smaller share."
)
ADVICE_ASYNC = (
    "Asynchronous scheduling is on and the host is still slower than the device: give the engine process a "
    "CPU core of its own, spread requests over more engines (--data-parallel-size), or make steps larger."
)
_EXAMPLE = ("step", "trial", "gap_us", "schedule_us", "before_update_us", "busy_us", "num_running_before")


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/scheduler-overhead.md``."""
    gaps = host_gaps(timeline)
    gap_us, duration_us = int(gaps["gap_us"].sum() or 0), timeline.duration_us
    if not duration_us or gap_us / duration_us < FOUND_FROM_FRAC:
        return []
    frac = gap_us / duration_us
    scheduling = int(gaps["in_schedule_us"].sum())
    updating = int(gaps["in_update_us"].sum())
    trials = trial_numbers(gaps)
    worst = gaps.sort("gap_us", "step", descending=[True, False])
    message = (
        f"For {gap_us / 1e3:,.0f} ms ({share(frac)} of the run) the device waited for the host between steps "
        f"although requests were running, before {counted(gaps.height, 'step')}"
        f"{in_trials(trials, len(timeline.trials()))}: {share(scheduling / gap_us)} of it in schedule(), "
        f"{share(updating / gap_us)} in update_from_output(), the rest elsewhere in the engine (sending "
        "outputs, taking requests, preparing the step)."
    )
    first = worst.row(0, named=True)
    return [
        Finding(
            code=CODE,
            severity=severity_of(frac),
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=gaps.height,
            trials=trials,
            steps=step_numbers(gaps),
            tokens=0,
            message=message,
            advice=ADVICE_ASYNC if timeline.header.async_scheduling else ADVICE_SYNC,
            evidence={
                "gap_ms": gap_us / 1e3,
                "schedule_ms": scheduling / 1e3,
                "update_ms": updating / 1e3,
                "median_gap_us": gaps["gap_us"].median(),
                "example": (
                    f"before {at_step(first)} the device waited {first['gap_us'] / 1e3:,.1f} ms; "
                    f"{counted(first['num_running_before'], 'request')} ran."
                ),
                "examples": worst.select(_EXAMPLE).head(3).to_dicts(),
            },
            cost_ms=gap_us / 1e3,
            cost_frac=frac,
        )
    ]


def host_gaps(timeline: Timeline) -> pl.DataFrame:
    """Steps before which the device had nothing to do although requests ran.

    Columns of ``timeline.steps``, and ``gap_us``: from the output of the step before to the end of
    ``schedule()``; ``in_schedule_us``, ``in_update_us``: the parts of it in ``schedule()`` and in the
    ``update_from_output()`` of the step before; ``before_update_us``: how long that took.
    """
    end = pl.col("start_us") + pl.col("schedule_us")
    back = pl.col("output_us").shift(1).over("trial")
    updated = pl.col("update_us").shift(1).over("trial")
    return (
        timeline.steps.with_columns(
            gap_us=end - back,
            in_schedule_us=pl.min_horizontal("schedule_us", end - back),
            before_update_us=updated,
        )
        .with_columns(
            in_update_us=pl.min_horizontal("before_update_us", pl.col("gap_us") - pl.col("in_schedule_us"))
        )
        .filter((pl.col("gap_us") > 0) & (pl.col("num_running_before") > 0) & (pl.col("total_requests") > 0))
    )
