"""``no-progress``: requests that restart again and again, or are ready but never scheduled."""

from typing import Any

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.allowed_settings import current_value_note, kv_space
from schedtrace.diagnose.rules.common import (
    advise,
    severity_by_weight,
    share_of_requests,
    step_finding,
    step_numbers,
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
"""Minimum share of repeated work in all computed tokens at which the finding leads the report, even if all
requests finished."""
MOST_FRAC = 0.5
"""Minimum share of steps in vain among the steps with preemptions, and minimum share of the lost tokens whose
blocks are still taken after a step for this step to be in vain."""


class Restarts(Evidence, kw_only=True):
    """Requests that computed the same tokens again, with figures of the one that recomputed the most."""

    requests: int
    """Number of restarted requests."""
    unfinished: int
    """Number of restarted requests that did not finish."""
    hopeless: int
    """Number of restarted requests that cannot make progress, because no other request made any until the
    trace ended."""
    request_id: str
    """Request that recomputed the most tokens."""
    restarts: int
    """Number of restarts of ``request_id``."""
    fruitless: int
    """Number of restarts after which ``request_id`` got no further than before."""
    high_tokens: int
    """Largest number of computed tokens that this request held at any time."""
    recomputed_tokens: int
    """Number of tokens that this request computed again."""
    preemptions: int
    """Number of this request's preemptions."""
    holders: list[str]
    """Requests for which vLLM preempted this one or, if only for itself, the requests that got tokens in most
    steps meanwhile."""
    steps_in_vain: int | None
    """Number of steps that preempted several requests whose blocks were not free at once; None: too few."""
    victims_in_vain: float | None
    """Mean number of requests that such a step preempted."""


class Parked(Evidence, kw_only=True):
    """Requests that were ready and stayed parked, with figures of the one that stayed longest."""

    requests: int
    """Number of parked requests."""
    unfinished: int
    """Number of parked requests that were not scheduled again."""
    hopeless: int
    """Number of parked requests that cannot make progress, because no other request made any until the trace
    ended."""
    request_id: str
    """Request that stayed parked longest."""
    ready_us: int
    """Time at which this request was ready, on the trace's clock."""
    parked_ms: float
    """Time for which this request stayed parked after it was ready."""


def _find(timeline: Timeline) -> list[Finding]:
    never = pl.lit(never_fitting(timeline)["request_id"]).implode()
    restarted = no_progress(timeline).filter(~pl.col("request_id").is_in(never))
    if restarted.height:  # finished ones that only cache resets preempted are those of ``interruption``
        each = timeline.preemptions.group_by("request_id").agg(by_reset=~pl.col("in_schedule").any())
        by_reset = pl.col("by_reset").fill_null(value=False)
        restarted = (
            restarted.join(each, on="request_id", how="left", maintain_order="left")
            .filter(pl.col("unfinished") | ~by_reset)
            .drop("by_reset")
        )
    parked = ready_but_parked(timeline)
    restarts = [_restarts(timeline, restarted)] if restarted.height else []
    return restarts + [
        _parked(timeline, rows["cause"][0], rows)
        for rows in parked.partition_by("cause", maintain_order=True)
    ]


def _restarts(timeline: Timeline, rows: pl.DataFrame) -> Finding:
    ids, worst = pl.lit(rows["request_id"]).implode(), rows.row(0, named=True)
    taken = timeline.preemptions.filter(pl.col("request_id").is_in(ids))
    lost = taken.filter("in_schedule")
    of_worst = lost.filter(pl.col("request_id") == worst["request_id"])
    recomputed, computed = int(rows["recomputed_tokens"].sum()), int(timeline.steps["used_tokens"].sum())
    part = recomputed / computed if computed else None
    rows = rows.sort("hopeless", descending=True, maintain_order=True)
    in_vain = _in_vain(timeline)
    evidence = Restarts(
        requests=rows.height,
        unfinished=rows.filter("unfinished").height,
        hopeless=rows.filter("hopeless").height,
        preemptions=of_worst.height,
        holders=_holders(timeline, worst, of_worst),
        steps_in_vain=in_vain.height or None,
        victims_in_vain=float(in_vain["victims"].sum()) / in_vain.height if in_vain.height else None,
        **{
            name: worst[name]
            for name in ("request_id", "restarts", "fruitless", "high_tokens", "recomputed_tokens")
        },
    )
    again = timeline.request_states.filter(
        pl.col("state").is_in(["recompute", "preempted"]) & pl.col("request_id").is_in(ids)
    )
    share = share_of_requests(timeline, total_us(again))
    return step_finding(
        timeline,
        rows,
        evidence,
        severity="critical" if evidence.hopeless else severity_by_weight(None, share),
        title="A request makes no progress" if evidence.hopeless else CIRCLES,
        verdict="{request_id:id} [{stuck:?}makes no progress: it ]started again {restarts:n time} and "
        "computed {recomputed_tokens:n token} again to get no further than {high_tokens:n token}.",
        share_frac=share,
        holder=_held_by(evidence, of_worst, resets=taken.filter(~pl.col("in_schedule"))),
        leads=evidence.hopeless > 0 or (part or 0) >= LEADS_FRAC,
        cause=Cause.KV_BLOCKS if lost.height else None,
        count=int(rows["restarts"].sum()),
        steps=step_numbers(lost),
        tokens=recomputed,
        message="{those} computed {tokens:n token} again, {part:%} of all computed tokens. {request_id:id} "
        "restarted {restarts:n time}, {fruitless:n} of them without getting beyond "
        "{high_tokens:n computed token}[{ends:!}, and did not finish].[ {steps_in_vain:n step} preempted "
        "{victims_in_vain:n1} requests on average, whose blocks were not free at once: with a KV connector, "
        "vLLM frees them only when the batch in flight is done.]",
        values={
            "stuck": worst["hopeless"],
            "ends": not worst["unfinished"],
            "those": Requests(rows["request_id"].to_list(), rows.height),
            "part": part,
            "span": Steps(worst["first_step"], worst["last_step"], worst["trial"]),
            "times": evidence.recomputed_tokens // max(1, evidence.high_tokens),
        },
        advice=_advice(timeline, lost, in_vain),
        example="in {span}, {request_id:id} computed {recomputed_tokens:n token} again, {times:n time} as "
        "many as it ever held.",
    )


def _in_vain(timeline: Timeline) -> pl.DataFrame:
    """Return the steps that preempted several requests in vain, with ``victims``; empty if these are few.

    With several batches in flight and a KV connector, vLLM may write to the blocks of a preempted request
    until the batch in flight is done, and keeps them until then. A release that does not allow
    for this preempts one request after the other for the same shortage.
    """
    lost = timeline.preemptions.filter("in_schedule").group_by("step", maintain_order=True)
    taken = lost.agg(victims=pl.len(), lost=pl.col("lost_tokens").sum()).join(
        timeline.steps.select("step", free="kv_blocks_free_after"), on="step", maintain_order="left"
    )
    header = timeline.header
    keeps = (header.batches_in_flight or 1) > 1 and "kv_transfer_config.kv_connector" in header.settings
    still_taken = pl.col("free") * (header.block_size or 1) < MOST_FRAC * pl.col("lost")
    in_vain = taken.filter((pl.col("victims") > 1) & still_taken & keeps)
    return in_vain if in_vain.height >= MOST_FRAC * taken.height else in_vain.clear()


def _holders(timeline: Timeline, worst: dict[str, Any], lost: pl.DataFrame) -> list[str]:
    """Return the requests for which the worst one was preempted, or else those in most steps meanwhile."""
    preemptors = lost.filter(pl.col("for_request_id") != worst["request_id"])
    if preemptors.height:
        counts = preemptors.group_by("for_request_id", maintain_order=True).len()
        often = counts.sort("len", descending=True, maintain_order=True)
        return often["for_request_id"].head(MOST_HOLDERS).to_list()
    first, last = worst["first_step"], worst["last_step"]
    shared = pl.min_horizontal("last_step", last) - pl.max_horizontal("step", first) + 1
    return (
        timeline.stretches.filter(
            pl.col("request_id") != worst["request_id"], pl.col("step") <= last, pl.col("last_step") >= first
        )
        .group_by("request_id", maintain_order=True)
        .agg(shared.sum().alias("steps"))
        .sort("steps", descending=True, maintain_order=True)
        .head(MOST_HOLDERS)
        .collect()["request_id"]
        .to_list()
    )


def _held_by(evidence: Restarts, lost: pl.DataFrame, resets: pl.DataFrame) -> Message:
    if times := resets.filter(pl.col("request_id") == evidence.request_id).height:
        return say("{times:n reset} of the prefix cache preempted {request_id:id}.", evidence, times=times)
    if not evidence.holders or not evidence.preemptions:
        return NOTHING
    holding = Requests(evidence.holders, len(evidence.holders))
    if lost["for_request_id"].eq_missing(lost["request_id"]).all():
        return say("Meanwhile {others} held KV blocks.", others=holding)
    return say("vLLM preempted {request_id:id} {preemptions:n time}, for {others}.", evidence, others=holding)


def _advice(timeline: Timeline, lost: pl.DataFrame, in_vain: pl.DataFrame) -> list[Advice]:
    """Return advice; empty if no preemption took the tokens, such as after a failed KV load."""
    advices = []
    if in_vain.height and timeline.header.pipeline_parallel_size == 1:
        advices.append(
            advise(
                "Set {option}, or use a newer vLLM, which preempts no request whose blocks it cannot free at "
                "once.",
                option="--no-async-scheduling",
                costs="Host work between steps no longer overlaps with the device.",
            )
        )
    if lost.is_empty():
        return advices
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
                "Lower {option} to {value:n}{now}, the number of requests that ran after a preemption.",
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
    ready, worst = _READY[CAUSES[cause]], rows.row(0, named=True)
    share = share_of_requests(timeline, int(rows["parked_us"].sum()))
    evidence = Parked(
        requests=rows.height,
        unfinished=rows.filter("unended").height,
        hopeless=rows.filter("hopeless").height,
        request_id=worst["request_id"],
        ready_us=worst["ready_us"],
        parked_ms=worst["parked_us"] / 1e3,
    )
    return step_finding(
        timeline,
        rows,
        evidence,
        severity="critical" if evidence.hopeless else severity_by_weight(None, share),
        title="A ready request stays parked",
        verdict="{request_id:id} is ready and vLLM does not schedule it: {ready} {ready_us:us} into the "
        "recording, and it waited {parked_ms:ms} more.",
        share_frac=share,
        leads=evidence.hopeless > 0,
        cause=cause,
        count=int(rows["steps"].sum()),
        steps=list(range(worst["first_step"], worst["last_step"] + 1))[:MAX_STEPS],
        message="{requests:n request} stayed in the queue ({cause:cause}) after {ready}: {request_id:id} in "
        "{span}, for {parked_ms:ms}[{ends:!}, and was never scheduled].",
        values={
            "ready": ready,
            "cause": cause,
            "ends": not worst["unended"],
            "span": Steps(worst["first_step"], worst["last_step"], worst["trial"]),
        },
        advice=[advise("Abort {request_id:id} and send it again; report it to vLLM.", evidence)],
        example="{request_id:id} waited in {span} although {ready}.",
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
