"""``no-progress``: requests that restart again and again, or are ready but never scheduled."""

import msgspec
import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.allowed_settings import current_value_note, kv_space
from schedtrace.diagnose.rules.common import (
    advise,
    finding_of,
    first_examples,
    severity_by_weight,
    share_of_requests,
    step_numbers,
    trial_numbers,
)
from schedtrace.diagnose.stuck_requests import never_fitting, no_progress, ready_but_parked
from schedtrace.model.causes import CAUSES, Cause
from schedtrace.model.message import NOTHING, Message, Requests, Steps
from schedtrace.model.report import MAX_STEPS, Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.spans import total_us
from schedtrace.timeline.timeline import Timeline

CIRCLES = "A request computes its tokens again and again"
MOST_HOLDERS = 3
LEADS_FRAC = 0.5
"""Share of all computed tokens from which repeated work leads the report, even if all requests finished."""


class NoProgressExample(msgspec.Struct, kw_only=True):
    """A request that made no progress."""

    request_id: str
    """vLLM's id of the request."""
    trial: int | None
    """Trial of the request; None for a trace without trials."""
    step: int
    """Step of the first restart, or first step parked."""
    last_step: int
    """Step of the last restart, or last step parked."""
    restarts: int = 0
    """Number of restarts."""
    fruitless: int = 0
    """Number of restarts after which the request got no further than before."""
    high_tokens: int = 0
    """Largest number of its tokens that were computed at one time."""
    recomputed_tokens: int = 0
    """Tokens computed again."""
    unfinished: bool
    """Whether the request did not finish or, if it was parked, was not scheduled again."""
    hopeless: bool = False
    """Whether the request cannot make progress."""
    preemptions: int = 0
    """Number of its preemptions."""
    for_itself: int = 0
    """Number of preemptions for its own allocation."""
    ready_us: int | None = None
    """Time when a parked request was ready, on the trace's clock; None: it was not parked."""
    parked_ms: float | None = None
    """Time parked after it was ready; None: it was not parked."""

    @property
    def at(self) -> Steps:
        """Range of steps from the first of these to the last."""
        return Steps(self.step, self.last_step, self.trial)


class NoProgress(Evidence, kw_only=True):
    """Requests without progress, and the tokens that they recomputed."""

    requests: int
    """Number of requests."""
    unfinished: int
    """Number of these that did not finish or, if they were parked, were not scheduled again."""
    hopeless: int
    """Number of these that cannot make progress, as no other request did either until the trace ended."""
    recomputed_tokens: int = 0
    """Tokens computed again."""
    recomputed_frac: float | None = None
    """Share of all tokens computed; None for parked requests."""
    holders: list[str] = msgspec.field(default_factory=list)
    """Requests for which vLLM preempted the first one; where it was preempted for itself, those that had
    tokens in most steps meanwhile."""
    examples: list[NoProgressExample]
    """Requests that recomputed the most tokens."""


def _find(timeline: Timeline) -> list[Finding]:
    never = pl.lit(never_fitting(timeline)["request_id"]).implode()
    restarted = _not_by_resets(timeline, no_progress(timeline).filter(~pl.col("request_id").is_in(never)))
    parked = ready_but_parked(timeline)
    restarts = [_restarts(timeline, restarted)] if restarted.height else []
    return restarts + [
        _parked(timeline, rows["cause"][0], rows)
        for rows in parked.partition_by("cause", maintain_order=True)
    ]


def _not_by_resets(timeline: Timeline, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the requests without finished ones that only cache resets preempted (``interruption``)."""
    if rows.is_empty():
        return rows
    each = timeline.preemptions.group_by("request_id").agg(by_reset=~pl.col("in_schedule").any())
    examined = rows.join(each, on="request_id", how="left", maintain_order="left")
    return examined.filter(pl.col("unfinished") | ~pl.col("by_reset").fill_null(value=False)).drop("by_reset")


def _restarts(timeline: Timeline, rows: pl.DataFrame) -> Finding:
    ids = pl.lit(rows["request_id"]).implode()
    taken = timeline.preemptions.filter(pl.col("request_id").is_in(ids))
    lost = taken.filter("in_schedule")
    by_itself = (pl.col("for_request_id") == pl.col("request_id")).sum()
    times = lost.group_by("request_id").agg(preemptions=pl.len(), for_itself=by_itself)
    examined = rows.rename({"first_step": "step"}).join(
        times, on="request_id", how="left", maintain_order="left"
    )
    examples = first_examples(
        NoProgressExample, examined.with_columns(pl.col("preemptions", "for_itself").fill_null(0))
    )
    worst: NoProgressExample = examples[0]
    recomputed = int(rows["recomputed_tokens"].sum())
    computed = int(timeline.steps["used_tokens"].sum())
    part = recomputed / computed if computed else None
    rows = rows.sort("hopeless", descending=True, maintain_order=True)
    unfinished, hopeless = rows.filter("unfinished").height, rows.filter("hopeless").height
    holders = _holders(timeline, worst, lost)
    again = timeline.request_states.filter(
        pl.col("state").is_in(["recompute", "preempted"]) & pl.col("request_id").is_in(ids)
    )
    share = share_of_requests(timeline, total_us(again))
    return finding_of(
        NoProgress(
            requests=rows.height,
            unfinished=unfinished,
            hopeless=hopeless,
            recomputed_tokens=recomputed,
            recomputed_frac=part,
            holders=holders,
            examples=examples,
        ),
        engine_rank=timeline.rank,
        trials=trial_numbers(rows),
        severity="critical" if hopeless else severity_by_weight(None, share),
        title="A request makes no progress" if hopeless else CIRCLES,
        verdict=say(
            "{request_id:id} [{hopeless:?}makes no progress: it ]started again {restarts:n time} and "
            "computed {recomputed_tokens:n token} again to get no further than {high_tokens:n token}.",
            worst,
        ),
        share_frac=share,
        holder=_held_by(worst, holders, resets=taken.filter(~pl.col("in_schedule"))),
        leads=hopeless > 0 or (part or 0) >= LEADS_FRAC,
        cause=Cause.KV_BLOCKS if lost.height else None,
        count=int(rows["restarts"].sum()),
        steps=step_numbers(lost),
        tokens=recomputed,
        message=say(
            "{requests} computed {tokens:n token} again, {part:%} of all computed tokens. {request_id:id} "
            "restarted {restarts:n time}, {fruitless:n} of them without getting beyond "
            "{high_tokens:n computed token}[{unfinished:?}, and did not finish].",
            worst,
            requests=Requests(rows["request_id"].to_list(), rows.height),
            tokens=recomputed,
            part=part,
        ),
        advice=_advice(timeline, lost),
        example=say(
            "in {at} {request_id:id} computed {recomputed_tokens:n token} again, {times:n time} its most.",
            worst,
            times=worst.recomputed_tokens // max(1, worst.high_tokens),
        ),
    )


def _holders(timeline: Timeline, worst: NoProgressExample, lost: pl.DataFrame) -> list[str]:
    """Return the requests for which it was preempted, the most frequent first; else those in most steps."""
    mine = pl.col("request_id") == worst.request_id
    preemptors = lost.filter(mine, pl.col("for_request_id") != worst.request_id)
    if preemptors.height:
        return (
            preemptors.group_by("for_request_id", maintain_order=True)
            .len()
            .sort("len", descending=True, maintain_order=True)["for_request_id"]
            .head(MOST_HOLDERS)
            .to_list()
        )
    shared = pl.min_horizontal("last_step", worst.last_step) - pl.max_horizontal("step", worst.step) + 1
    return (
        timeline.stretches.filter(~mine, pl.col("step") <= worst.last_step, pl.col("last_step") >= worst.step)
        .group_by("request_id", maintain_order=True)
        .agg(shared.sum().alias("steps"))
        .sort("steps", descending=True, maintain_order=True)
        .head(MOST_HOLDERS)
        .collect()["request_id"]
        .to_list()
    )


def _held_by(worst: NoProgressExample, holders: list[str], resets: pl.DataFrame) -> Message:
    if times := resets.filter(pl.col("request_id") == worst.request_id).height:
        return say("{times:n reset} of the prefix cache preempted {request_id:id}.", worst, times=times)
    if not holders or not worst.preemptions:
        return NOTHING
    holding = Requests(holders, len(holders))
    if worst.preemptions > worst.for_itself:
        return say(
            "vLLM preempted {request_id:id} {preemptions:n time}, for {others}.", worst, others=holding
        )
    return say("Meanwhile {others} held KV blocks.", others=holding)


def _advice(timeline: Timeline, lost: pl.DataFrame) -> list[Advice]:
    """Return advice; none if no preemption took its tokens, such as after a failed KV load."""
    if lost.is_empty():
        return []
    advices = []
    if timeline.header.scheduler_config.get("scheduler_reserve_full_isl") is False:
        advices.append(
            advise(
                "Set {option} (now off): vLLM then admits a prompt only if all of it fits.",
                setting="scheduler_reserve_full_isl",
                value=True,
                costs="Long prompts wait longer for their first chunk.",
            )
        )
    advices.append(
        advise(
            "Give the KV cache more blocks[ (now {total:n})]: {space}.",
            total=timeline.header.kv_blocks_total,
            space=kv_space(timeline),
            setting="kv_cache_memory_bytes",
            costs="More memory for the KV cache.",
        )
    )
    after = timeline.steps.filter(pl.col("step").is_in(pl.lit(lost["step"]).implode()))["num_running_after"]
    fewest = max(1, int(after.min() or 1))  # type: ignore[arg-type]  # a column of integers
    if not timeline.active_limit and fewest < timeline.seats:
        advices.append(
            advise(
                "Lower {option} to {value:n}{now}: so many ran after a preemption.",
                now=current_value_note(timeline, "max_num_seqs"),
                setting="max_num_seqs",
                value=fewest,
                costs="Fewer requests run at once, also while the KV cache has room.",
            )
        )
    return advices


_READY = {
    Cause.GRAMMAR_PENDING: "its grammar was compiled",
    Cause.REMOTE_KV_PENDING: "its KV blocks had arrived",
}


def _parked(timeline: Timeline, cause: str, rows: pl.DataFrame) -> Finding:
    ready, unended = _READY[CAUSES[cause]], rows.filter("unended").height
    hopeless, share = (
        rows.filter("hopeless").height,
        share_of_requests(timeline, int(rows["parked_us"].sum())),
    )
    examined = rows.rename({"first_step": "step", "unended": "unfinished"})
    examples = first_examples(NoProgressExample, examined.with_columns(parked_ms=pl.col("parked_us") / 1e3))
    worst: NoProgressExample = examples[0]
    return finding_of(
        NoProgress(requests=rows.height, unfinished=unended, hopeless=hopeless, examples=examples),
        engine_rank=timeline.rank,
        trials=trial_numbers(rows),
        severity="critical" if hopeless else severity_by_weight(None, share),
        title="A ready request stays parked",
        verdict=say(
            "{request_id:id} is ready and vLLM does not schedule it: {ready} {ready_us:us} into the "
            "recording, and it waited {parked_ms:ms} more.",
            worst,
            ready=ready,
        ),
        share_frac=share,
        leads=hopeless > 0,
        cause=cause,
        count=int(rows["steps"].sum()),
        steps=list(range(worst.step, worst.last_step + 1))[:MAX_STEPS],
        message=say(
            "{requests:n request} stayed in the queue ({cause:cause}) after {ready}: {request_id:id} in "
            "{at}, for {parked_ms:ms}[{unfinished:?}, and was never scheduled].",
            worst,
            requests=rows.height,
            cause=cause,
            ready=ready,
        ),
        advice=[advise("Abort {request_id:id} and send it again; report it to vLLM.", worst)],
        example=say("{request_id:id} waited in {at} although {ready}.", worst, ready=ready),
    )


RULE = Rule(
    code="no-progress",
    summary="requests computed the same tokens again and again, or were ready and stayed parked",
    needs=frozenset({Fact.REQUESTS, Fact.QUEUE, Fact.EXITS, Fact.LIVES, Fact.PREEMPTIONS}),
    find=_find,
    proven=(
        ("kv_blocks", "max_num_seqs"),
        ("kv_blocks", "scheduler_reserve_full_isl"),
    ),
)
