"""``preemption-storm``: the same requests lose their blocks again and again, or much work is done twice."""

from typing import Any

import polars as pl

from schedtrace.diagnose.cache_use import resumptions, steps_of_a_block
from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import (
    StepExample,
    in_trials,
    prefill_cost,
    step_numbers,
    trial_numbers,
)
from schedtrace.diagnose.rules.preemption import MOST_VICTIMS, RepeatVictim, repeat_victims, repeatedly
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

CODE = "preemption-storm"

OFTEN = 3
"""Preemptions of one request: the second may be bad luck, the third says that coming back does not help."""
FEWEST_PREEMPTIONS = 3
MUCH_FRAC = 0.10
"""A tenth of the prefill done twice, by ``FEWEST_PREEMPTIONS`` or more: one or two are no storm."""


class StormExample(StepExample, kw_only=True):
    """One preemption and how long its victim was away."""

    request_id: str
    for_request_id: str | None
    num_preemptions: int | None
    lost_tokens: int
    lasted_steps: int | None
    resumed_step: int | None
    away_us: int


class Storm(Evidence, kw_only=True):
    """Who was preempted how often, what was computed again, and where it began."""

    victims: int
    repeat_victims: list[RepeatVictim]
    cycles: int
    cycle_steps: int
    recomputed_tokens: int
    recomputed_frac: float
    first_step: int
    first_running: int
    first_used_frac: float | None
    fewest_running: int
    away_ms: float
    longest_away_ms: float
    examples: list[StormExample]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/preemption-storm.md``."""
    lost = resumptions(timeline)
    if lost.is_empty():
        return []
    repeated = repeat_victims(lost)
    recomputed = int(timeline.steps["recomputed_tokens"].sum())
    prefill = int((timeline.steps["used_tokens"] - timeline.steps["decode_tokens"]).sum())
    part = recomputed / max(1, prefill, recomputed)
    often = bool(repeated) and repeated[0].times >= OFTEN
    if not often and (lost.height < FEWEST_PREEMPTIONS or part < MUCH_FRAC):
        return []
    trials = trial_numbers(lost)
    cost = prefill_cost(timeline, recomputed)
    severity = cost.severity(unknown="warning")
    evidence = _evidence(timeline, lost, repeated, recomputed=recomputed, part=part)
    return [
        Finding(
            code=CODE,
            severity="warning" if severity == "info" else severity,
            cause=Cause.KV_BLOCKS,
            via="recorded",
            engine_rank=timeline.rank,
            count=lost.height,
            trials=trials,
            steps=step_numbers(lost),
            tokens=recomputed,
            message=joined(
                [
                    say(
                        "{preemptions:n preemption}{trials} hit {victims:n request}{repeated}.",
                        preemptions=lost.height,
                        trials=in_trials(timeline, trials),
                        victims=evidence.victims,
                        repeated=repeatedly(repeated),
                    ),
                    _course(evidence),
                ]
            ),
            evidence=evidence,
            example=_described(evidence.examples[0]),
            cost_ms=cost.ms,
            cost_frac=cost.frac,
            cost_error_frac=cost.error_frac,
        )
    ]


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
        fewest_running=int(steps["num_running_before"].min()),  # type: ignore[arg-type]  # an integer column
        away_ms=int(lost["away_us"].sum()) / 1e3,
        longest_away_ms=int(lost["away_us"].max() or 0) / 1e3,  # type: ignore[arg-type]  # likewise
        examples=_examples(lost, repeated),
    )


def _course(evidence: Storm) -> Message:
    """How soon they came after admission, what was computed again, and where it began."""
    used = evidence.first_used_frac
    return say(
        "{cycles:n} came within {steps:n step} of admission. vLLM computed {recomputed:n "
        "token} again, {part:%} of all prefill. The first was in {first:step} with "
        "{running:n request} running{used}.",
        cycles=evidence.cycles,
        steps=evidence.cycle_steps,
        recomputed=evidence.recomputed_tokens,
        part=evidence.recomputed_frac,
        first=evidence.first_step,
        running=evidence.first_running,
        used=NOTHING if used is None else say(" and {used:%} of the KV cache in use", used=used),
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
    rows = shown.sort("away_us", "step", descending=[True, False])
    return StormExample.first(rows)


def _described(example: StormExample) -> Message:
    nth, lasted = example.num_preemptions, example.lasted_steps
    return say(
        "{step} preempted {request:id}{nth}{since}: it lost {lost:n computed token} and was "
        "away for {away:us}.",
        step=example.at,
        request=example.request_id,
        nth=NOTHING if nth is None else say(" (its preemption number {nth:n})", nth=nth),
        since=NOTHING if lasted is None else say(" {steps:n step} after its admission", steps=lasted),
        lost=example.lost_tokens,
        away=example.away_us,
    )


RULE = Rule(
    code=CODE,
    summary="the same requests were preempted again and again, or much of the prefill was done twice",
    needs=frozenset({Fact.PREEMPTIONS, Fact.REQUESTS, Fact.BLOCKS, Fact.TIMES}),
    find=find,
    symptom_of=("kv-bound", "no-progress"),
)
