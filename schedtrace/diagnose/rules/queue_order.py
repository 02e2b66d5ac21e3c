"""Waits that are caused by the queue's order: ``head-of-line`` and ``priority-inversion``.

* ``head-of-line``: a request refused for its size held up requests behind it that would have fitted.
* ``priority-inversion``: more urgent requests waited while less urgent ones ran, or were admitted.
"""

import numpy as np
import polars as pl

from schedtrace.diagnose.gains import unless_shown
from schedtrace.diagnose.kv_cache import need_at_refusals
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import most_seats, seats_cost, twice_the_blocks
from schedtrace.diagnose.rules.common import (
    Waited,
    advise,
    by_class,
    listed,
    only,
    wait_figures,
    wait_finding,
)
from schedtrace.diagnose.rules.kv_bound import largest_holder
from schedtrace.diagnose.waits import ClassTime, charged, running_classes
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Advice
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import HEAD_OF_LINE, PRIORITY_INVERSION
from schedtrace.timeline.queue_waits import heads_by_size
from schedtrace.timeline.timeline import Timeline


class HeadOfLine(Waited, kw_only=True):
    """Refused requests, and the requests behind them."""

    heads: int
    """Number of different refused requests at the head of the queue."""
    head: str
    """Head behind which requests waited longest in total."""
    head_tokens: int
    """Number of tokens that this head wanted."""
    blocks_free: float | None
    """Median number of KV blocks that were free after a step that refused this head."""


def held_up_requests(timeline: Timeline) -> pl.DataFrame:
    """Return the requests held up behind a head, each with its additional wait (``waited_us``)."""
    starts = timeline.steps[["step", "start_us"]]
    passed = timeline.charge_tables.held_up.join(starts, on="step", how="left", maintain_order="left").join(
        starts.rename({"step": "left_step", "start_us": "left_us"}), on="left_step", how="left"
    )
    waited = pl.col("left_us").fill_null(timeline.end_us) - pl.col("start_us")
    return passed.with_columns(waited_us=waited).sort("waited_us", "step", descending=[True, False])


def _find_held_up(timeline: Timeline) -> Findings:
    waits = charged(timeline, HEAD_OF_LINE)
    if waits is None:
        return
    heads, passed = heads_by_size(timeline.refused_heads), held_up_requests(timeline)
    cause = str(passed["cause"].mode().sort()[0])
    worst = (
        passed.group_by("head", maintain_order=True)
        .agg(pl.col("waited_us").sum(), pl.col("head_tokens").first())
        .sort("waited_us", "head", descending=[True, False])
        .row(0, named=True)
    )
    evidence = HeadOfLine(
        heads=heads["head"].n_unique(),
        head=worst["head"],
        head_tokens=worst["head_tokens"],
        blocks_free=heads.filter(pl.col("head") == worst["head"])["kv_blocks_free"].median(),  # type: ignore[arg-type]  # of integers
        **wait_figures(waits),
    )
    yield wait_finding(
        timeline,
        waits,
        title="A refused request holds up others that would fit",
        verdict="The head of the queue holds up the rest: requests that would have fitted spent {share:%} of "
        "all requests' time behind {head:id}[ and {other_heads:n} others, which were refused for their size]"
        "[{other_heads:!}, which was refused for its size].",
        holder=_head_and_holders(timeline, evidence, cause),
        cause=cause,
        location=only(heads["location"]),
        message="{requests:n request} would have been admitted {mean:us} earlier on average "
        "({longest_request:id}: {longest_ms:ms}), had vLLM looked past {heads:n refused request}; it "
        "admits in queue order.",
        values={"mean": waits.time_us / waits.requests, "other_heads": evidence.heads - 1},
        advice=unless_shown(timeline, waits, _advice_on_head(timeline, cause)),
        evidence=evidence,
        example="{at} refused {head:id} ({head_tokens:n token}) and left {budget_left:n token}, "
        "{kv_blocks_free:n KV block} and {seats_left:n seat}; {request_id:id} behind it needed "
        "{tokens:n token} and {blocks:n block}, and waited {waited_us:us} more.",
        cases=passed,
    )


def _head_and_holders(timeline: Timeline, evidence: HeadOfLine, cause: str) -> Message:
    if cause != Cause.KV_BLOCKS or evidence.blocks_free is None:
        return say("{head:id} has {head_tokens:n token} ({cause:cause}).", evidence, cause=cause)
    held = need_at_refusals(timeline, evidence.head)
    running = NOTHING
    if held.running and held.blocks_held is not None:
        running = say(
            "; {blocks_held:n} of {total:n} are held by {running:n running request}{largest}",
            held,
            total=held.blocks_total - 1 if held.blocks_total else None,
            largest=largest_holder(held),
        )
    needs = say("has {tokens:n token}", tokens=evidence.head_tokens)
    if held.blocks_needed is not None:
        needs = say("needs {blocks_needed:n KV block}", held)
    return say(
        "{head:id} {needs}, {blocks_free:n} are free{running}{step}.",
        held,
        head=evidence.head,
        needs=needs,
        running=running,
        step=NOTHING if held.held_step is None else say(" ({held_step:step})", held),
    )


def _advice_on_head(timeline: Timeline, cause: str) -> list[Advice]:
    config = timeline.header.scheduler_config
    pieces = []
    if cause == Cause.KV_BLOCKS:
        pieces.append(twice_the_blocks(timeline))
        if config.get("scheduler_reserve_full_isl") and config.get("enable_chunked_prefill"):
            pieces.append(
                advise(
                    "{option:setting} (now on) admits it with its first chunk",
                    option="--no-scheduler-reserve-full-isl",
                    costs="A risk of preemptions.",
                )
            )
    if cause == Cause.CHUNKED_PREFILL_OFF:
        pieces.append(
            advise(
                "{option} (now off): the large prompt then takes the budget that is left",
                setting="enable_chunked_prefill",
                value=True,
            )
        )
    pieces.append(advise("send long prompts to an engine of their own"))
    return pieces


HEAD_OF_LINE_RULE = Rule(
    code="head-of-line",
    summary="a refused request held up others behind it that would have fitted",
    needs=frozenset(
        {Fact.QUEUE, Fact.EXITS, Fact.LIVES, Fact.BLOCKS, Fact.REQUESTS, Fact.TIMES, Fact.CONFIG}
    ),
    find=_find_held_up,
    charges=(HEAD_OF_LINE,),
    specific=True,
    proven=(("kv_blocks", "num_gpu_blocks_override"),),
)


class Inversion(Waited, kw_only=True):
    """Urgent requests that waited while less urgent requests ran."""

    waited_for: list[str]
    """Causes of the waits of urgent requests, the cause with the most time first."""
    classes: list[ClassTime]
    """Priority classes of the requests that ran in the steps with waits."""
    admitted_before: int
    """Number of steps that admitted a less urgent request although a more urgent one waited before and after
    the step and no exit of the step's waiting loop names it."""


def _find_inversions(timeline: Timeline) -> Findings:
    waits = charged(timeline, PRIORITY_INVERSION)
    if waits is None:
        return
    causes = waits.rows.group_by("cause").agg(pl.col("time_us").sum()).sort("time_us", descending=True)
    waited_for = causes["cause"].to_list()
    classes = running_classes(timeline, waits.steps)
    nouns = {str(Cause.MAX_NUM_SEQS): say("seats"), str(Cause.KV_BLOCKS): say("KV blocks")}
    advice = [
        advise(
            "send less urgent requests to an engine of their own, or limit how many are sent",
            costs="Idle capacity while there are few urgent requests.",
        )
    ]
    value = min(2 * timeline.seats, most_seats(timeline))
    if value > timeline.seats:
        advice.append(
            advise(
                "{option} {value:n} (now {seats:n}), where the KV cache has room",
                timeline,
                setting=timeline.seats_name,
                value=value,
                costs=seats_cost(timeline),
            )
        )
    yield wait_finding(
        timeline,
        waits,
        evidence=Inversion(
            **wait_figures(waits),
            waited_for=waited_for,
            classes=classes,
            admitted_before=priority_inversions(timeline).height,
        ),
        title="Urgent requests wait for less urgent ones",
        verdict="Priority does not hold: more urgent requests spent {share:%} of all requests' time "
        "waiting for {resource} that less urgent ones held.",
        holder="Meanwhile {ran} ran on average (lower is more urgent).",
        cause=waited_for[0],
        message="{requests:n request} waited {wait_ms:ms} in total, {longest_request:id} the longest "
        "({longest_ms:ms}). vLLM preempts nobody for a waiting request, however urgent."
        "[ {admitted_before:n step} even admitted a less urgent request before a more urgent one.]",
        values={
            "resource": listed(
                [nouns.get(cause) or say("{cause:cause}", cause=cause) for cause in waited_for]
            ),
            "ran": by_class(classes),
        },
        advice=advice,
    )


INVERSION_COLUMNS = {
    "step": pl.Int64,
    "trial": pl.Int64,
    "request_id": pl.String,
    "priority": pl.Int64,
    "by": pl.String,
    "by_priority": pl.Int64,
}


def priority_inversions(timeline: Timeline) -> pl.DataFrame:
    """Return a row per step that scheduled a request from the queue but left a more urgent, ready one.

    There are rows only with ``--scheduling-policy priority``, where smaller numbers go first. A request that
    the step skipped or refused individually does not count. Columns: ``step``, ``trial``; ``request_id`` and
    ``priority`` of the most urgent request left waiting; ``by`` and ``by_priority``, the id and priority of
    the least urgent request scheduled.
    """
    queue = timeline.waits
    if timeline.header.scheduler_config.get("policy") != "priority" or queue.is_empty():
        return pl.DataFrame(schema=INVERSION_COLUMNS)
    since, left = queue["since_step"].to_numpy(), queue["left_step"].to_numpy()
    urgency, ids = queue["priority"].to_numpy(), queue["request_id"].to_numpy()
    named = set(timeline.exits.filter(pl.col("loop") == "waiting")[["step", "request_id"]].iter_rows())
    asked = timeline.known_requests[["request_id", "priority"]]
    admitted = (
        timeline.admitted.lazy()
        .select("step", "trial", "request_id")
        .collect()
        .join(asked, on="request_id")
        .sort("step", "priority", descending=[False, True])
        .unique("step", keep="first", maintain_order=True)
    )
    rows = []
    for step, trial, by, by_priority in admitted.iter_rows():
        behind = np.flatnonzero((since <= step) & (step < left) & (urgency < by_priority))
        ready = [at for at in behind if (step, ids[at]) not in named]
        if ready:
            first = min(ready, key=lambda at: (urgency[at], at))
            rows.append((step, trial, str(ids[first]), int(urgency[first]), by, by_priority))
    return pl.DataFrame(rows, schema=INVERSION_COLUMNS, orient="row")


PRIORITY_INVERSION_RULE = Rule(
    code="priority-inversion",
    summary="more urgent requests waited while less urgent ones ran",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES}),
    find=_find_inversions,
    specific=True,
    proven=(("max_num_seqs", "max_num_seqs"),),
)
