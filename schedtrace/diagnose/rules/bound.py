"""What the rules ``...-bound`` share: one limit explains most of the time that requests waited."""

from dataclasses import dataclass

import msgspec
import polars as pl

from schedtrace.diagnose.rules.common import in_trials, listed, step_numbers, trial_numbers
from schedtrace.model.message import Duration, Message, Request, Share, Steps, message
from schedtrace.model.report import Evidence, Finding
from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.shares import per_step, refused
from schedtrace.timeline.timeline import Timeline

MOST_OF_IT = 0.5
"""Above half, no other cause can explain as much."""

FELT = 0.10
"""A tenth of the requests' time in the engine is felt; below that the finding is information."""


@dataclass(frozen=True)
class Bound:
    """One limit."""

    code: str
    causes: tuple[str, ...]
    resource: Message
    """What the requests waited for."""
    advice: Message


class WaitExample(msgspec.Struct, kw_only=True):
    """One request, and the steps that it waited through."""

    request_id: str
    trial: int | None
    first_step: int
    last_step: int
    wait_us: int


class WaitingFor(Evidence, kw_only=True):
    """Waiting for one limit, and what else was free meanwhile."""

    share_frac: float
    wait_ms: float
    of_time_in_engine_frac: float
    mean_budget_left_frac: float | None
    mean_blocks_free_frac: float | None
    mean_seats_free_frac: float | None
    examples: list[WaitExample]


def find_bound(timeline: Timeline, bound: Bound) -> list[Finding]:
    """At most one finding: this limit explains more than ``MOST_OF_IT`` of the time spent waiting."""
    waits = refused(timeline).with_columns(wait_us=LENGTH_US)
    ours = waits.filter(pl.col("cause").is_in(bound.causes))
    wait_us, all_us = int(ours["wait_us"].sum()), int(waits["wait_us"].sum())
    if not all_us or wait_us / all_us <= MOST_OF_IT:
        return []
    steps = timeline.steps.join(per_step(timeline, ours), on="step", how="semi")
    trials = trial_numbers(steps)
    lived = timeline.request_states.filter(pl.col("state") != "front_end")
    felt = wait_us / int(lived.select(LENGTH_US.sum()).item())
    seats = 1 - pl.col("num_running_after") / timeline.seats if timeline.seats else pl.lit(None, pl.Float64)
    evidence = WaitingFor(
        share_frac=wait_us / all_us,
        wait_ms=wait_us / 1e3,
        of_time_in_engine_frac=felt,
        mean_budget_left_frac=_mean(steps, pl.col("remaining_budget") / pl.col("token_budget")),
        mean_blocks_free_frac=_mean(steps, pl.col("kv_blocks_free_after") / pl.col("kv_blocks_total")),
        mean_seats_free_frac=_mean(steps, seats),
        examples=[_longest(ours)],
    )
    return [
        Finding(
            code=bound.code,
            severity="warning" if felt >= FELT else "info",
            cause=bound.causes[0],
            via=str(steps["waiting_via"].unique().sort()[0]),
            engine_rank=timeline.rank,
            count=steps.height,
            trials=trials,
            steps=step_numbers(steps),
            tokens=int(steps.select(pl.col("waiting_tokens_after").max()).item() or 0),
            message=message(
                "{share} of waiting time{trials} was for {resource}: requests waited {time} in total, {felt} "
                "of their time in the engine. "
                "Meanwhile {room}.",
                share=Share(evidence.share_frac),
                trials=in_trials(timeline, trials),
                resource=bound.resource,
                time=Duration(wait_us),
                felt=Share(felt),
                room=_room(evidence),
            ),
            advice=bound.advice,
            evidence=evidence,
            example=_described(evidence.examples[0]),
        )
    ]


def _mean(steps: pl.DataFrame, value: pl.Expr) -> float | None:
    mean = steps.select(value.mean()).item()
    return None if mean is None else float(mean)


def _room(evidence: WaitingFor) -> Message:
    """What else was free in these steps: where all of it was, the limit is worth raising."""
    parts = [
        (evidence.mean_budget_left_frac, "token budget"),
        (evidence.mean_blocks_free_frac, "KV blocks"),
        (evidence.mean_seats_free_frac, "seats"),
    ]
    known = [
        message("{share} of the {resource}", share=Share(max(0.0, free)), resource=resource)
        for free, resource in parts
        if free is not None
    ]
    return message("{parts} were free on average", parts=listed(known))


def _longest(waits: pl.DataFrame) -> WaitExample:
    first = waits.sort("wait_us", "begin_us", descending=[True, False]).row(0, named=True)
    return WaitExample(
        request_id=first["request_id"],
        trial=first["trial"],
        first_step=first["begin_step"],
        last_step=first["end_step"],
        wait_us=first["wait_us"],
    )


def _described(example: WaitExample) -> Message:
    return message(
        "{request} waited {time} for it, in {steps}.",
        request=Request(example.request_id),
        time=Duration(example.wait_us),
        steps=Steps(example.first_step, example.last_step, example.trial),
    )
