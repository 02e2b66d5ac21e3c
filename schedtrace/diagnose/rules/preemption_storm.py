"""``preemption-storm``: the same requests lose their blocks again and again, or much work is done twice."""

from typing import Any

import polars as pl

from schedtrace.diagnose.cache_use import resumptions, steps_of_a_block
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import StepExample, prefill_cost, step_finding
from schedtrace.diagnose.rules.preemption import MOST_VICTIMS, RepeatVictim, repeat_victims, repeatedly
from schedtrace.model.causes import Cause
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

OFTEN = 3
"""Preemptions of one request: the second may be bad luck, the third says that coming back does not help."""
FEWEST_PREEMPTIONS = 3
MUCH_FRAC = 0.10
"""A tenth of the prefill done twice, by ``FEWEST_PREEMPTIONS`` or more: one or two are no storm."""


class StormExample(StepExample, kw_only=True):
    """One preemption and how long its victim was away."""

    request_id: str
    """Request that was preempted."""
    num_preemptions: int | None
    """Number of its preemptions, this one included."""
    lost_tokens: int
    """Computed tokens that it lost."""
    lasted_steps: int | None
    """Steps from its admission to the preemption."""
    resumed_step: int | None
    """Step that admitted it again; None: none did."""
    away_us: int
    """Time from the start of the step that preempted it to that of the step that admitted it again; to its
    end, or to the trace's last output, if none did."""


class Storm(Evidence, kw_only=True):
    """Who was preempted how often, what was computed again, and where it began."""

    victims: int
    """Number of different preempted requests."""
    repeat_victims: list[RepeatVictim]
    """Up to ten requests that were preempted more than once, most often preempted first."""
    cycles: int
    """Number of preemptions within ``cycle_steps`` of an admission."""
    cycle_steps: int
    """Number of steps that makes a cycle."""
    recomputed_tokens: int
    """Tokens that were computed again."""
    recomputed_frac: float
    """Share of all prefill."""
    first_step: int
    """First step that preempted."""
    first_running: int
    """Number of running requests before it."""
    first_used_frac: float | None
    """Share of KV blocks in use before it: ``1 - kv_blocks_free_before / (kv_blocks_total - 1)`` (one block
    is vLLM's null block); None: not known."""
    examples: list[StormExample]
    """Longest absences, of those hit most often if any was hit again."""


def _find(timeline: Timeline) -> Findings:
    lost = resumptions(timeline)
    if lost.is_empty():
        return
    repeated = repeat_victims(lost)
    recomputed = int(timeline.steps["recomputed_tokens"].sum())
    prefill = int((timeline.steps["used_tokens"] - timeline.steps["decode_tokens"]).sum())
    part = recomputed / max(1, prefill, recomputed)
    often = bool(repeated) and repeated[0].times >= OFTEN
    if not often and (lost.height < FEWEST_PREEMPTIONS or part < MUCH_FRAC):
        return
    cost = prefill_cost(timeline, recomputed)
    severity = cost.severity(unknown="warning")
    yield step_finding(
        timeline,
        lost,
        _evidence(timeline, lost, repeated, recomputed=recomputed, part=part),
        severity="warning" if severity == "info" else severity,
        cause=Cause.KV_BLOCKS,
        tokens=recomputed,
        message="{steps:n preemption}{trials} hit {victims:n request}{repeated}. {cycles:n} came within "
        "{cycle_steps:n step} of admission. vLLM computed {recomputed_tokens:n token} again, "
        "{recomputed_frac:%} of all prefill. The first was in {first_step:step} with "
        "{first_running:n request} running[ and {first_used_frac:%} of the KV cache in use].",
        values={"repeated": repeatedly(repeated)},
        example="{at} preempted {request_id:id}[ (its preemption number {num_preemptions:n})][ "
        "{lasted_steps:n step} after its admission]: it lost {lost_tokens:n computed token} and was away "
        "for {away_us:us}.",
        cost=cost,
    )


def _evidence(
    timeline: Timeline, lost: pl.DataFrame, repeated: list[RepeatVictim], *, recomputed: int, part: float
) -> Storm:
    steps = timeline.steps.filter(pl.col("step").is_in(lost["step"].implode()))
    first = steps.row(0, named=True)
    return Storm(
        victims=lost["request_id"].n_unique(),
        repeat_victims=repeated[:MOST_VICTIMS],
        cycles=lost.filter("cycle").height,
        cycle_steps=steps_of_a_block(timeline),
        recomputed_tokens=recomputed,
        recomputed_frac=part,
        first_step=first["step"],
        first_running=first["num_running_before"],
        first_used_frac=_used_frac(first),
        examples=_examples(lost, repeated),
    )


def _used_frac(step: dict[str, Any]) -> float | None:
    """Share of the KV blocks in use before a step; one of them, vLLM's null block, holds no tokens."""
    total, free = step["kv_blocks_total"], step["kv_blocks_free_before"]
    if free is None or total is None or total < 2:  # noqa: PLR2004  # no block but the null block
        return None
    return float(1 - free / (total - 1))


def _examples(lost: pl.DataFrame, repeated: list[RepeatVictim]) -> list[StormExample]:
    """The longest absences, of those hit most often if any was hit again."""
    most = [victim.request_id for victim in repeated if victim.times == repeated[0].times]
    shown = lost.filter(pl.col("request_id").is_in(most)) if most else lost
    return StormExample.largest(shown, "away_us")


RULE = Rule(
    code="preemption-storm",
    summary="the same requests were preempted again and again, or much of the prefill was done twice",
    needs=frozenset({Fact.PREEMPTIONS, Fact.REQUESTS, Fact.BLOCKS, Fact.TIMES}),
    find=_find,
    symptom_of=("kv-bound", "no-progress"),
)
