"""``kv-bound``: requests waited for KV cache space, or recomputed what a preemption had discarded."""

import polars as pl

from schedtrace.diagnose.gains import RAN, with_more_running
from schedtrace.diagnose.kv_cache import GroupUse, Need, group_use, need_at_refusals
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import kv_space
from schedtrace.diagnose.rules.common import WAITED, Waited, advise, wait_figures
from schedtrace.diagnose.rules.full_device import limit_finding
from schedtrace.diagnose.waits import Charged, charged, mean
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Message, Steps
from schedtrace.model.report import Advice
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import RECOMPUTE
from schedtrace.timeline.timeline import Timeline

REFUSALS = "{refused_steps:n} of {steps:n step} refused a request for KV blocks; " + WAITED
PREEMPTIONS = (
    " It also caused {preemptions:n preemption}: vLLM computed {recomputed_tokens:n token} twice "
    "({recomputed_frac:%} of all computed tokens)."
)
STATED_FRAC = 0.01
"""Minimum share of the requests' time spent on recomputation for the verdict to state it."""
WATERMARKS = (0.05, 0.1, 0.2)
STATE = "Mamba"
"""Kind of the cache groups whose blocks hold a state of fixed size instead of tokens."""


class KvSpace(Waited, kw_only=True):
    """Waits for KV blocks, and the cost of preemptions."""

    refused_steps: int
    """Number of steps that refused a request for KV blocks."""
    steps: int
    """Number of all steps."""
    preemptions: int
    """Number of preemptions."""
    recomputed_tokens: int
    """Number of tokens that were computed again."""
    recomputed_frac: float
    """Recomputed tokens as a share of all computed tokens."""
    mean_budget_left_frac: float | None
    """Mean share of the token budget that was left in the steps that refused a request for KV blocks."""
    held_step: int | None
    """Step to which ``running`` and the held, free and needed blocks belong, so that they add up: that of the
    longest refusal for which the trace lists the holders, or else the step with the median number of held
    blocks among the steps that refused a request (among all steps if none did)."""
    running: int | None
    """Number of running requests in ``held_step``."""
    blocks_held: int | None
    """Number of KV blocks that all requests held, not counting vLLM's null block."""
    blocks_free: int | None
    """Number of free KV blocks."""
    blocks_needed: int | None
    """Number of KV blocks that the refused request needed."""
    blocks_total: int | None
    """Number of KV blocks in the cache."""
    blocks_for_all: int | None
    """Approximate number of KV blocks that hold as many requests as were in the scheduler at once (at most
    the seats), with vLLM's null block: this number times the mean ``ceil((prompt + output tokens) /
    block_size)`` of finished requests, or the largest need of as many requests that vLLM admitted in a row.
    With several cache groups, the mean number of blocks that a running request held counts instead. None: the
    cache has as many."""
    largest_holder: str | None
    """Request that held the most blocks in ``held_step``, if the trace lists the holders."""
    largest_holder_blocks: int | None
    """Number of KV blocks that the largest holder held."""
    set_aside: float
    """Number of requests that, in ``held_step``, a scheduler other than vLLM's had removed from the running
    list without freeing their blocks."""
    groups: list[GroupUse]
    """KV cache groups; empty if there is only one group, or if groups are not recorded."""


def _find(timeline: Timeline) -> Findings:
    waits = charged(timeline, *RULE.charges)
    if waits is None:
        return
    evidence = _evidence(timeline, waits)
    lost = waits.rows.filter(pl.col("state").is_in(["preempted", "recompute"]))
    again = int(lost["time_us"].sum()) / timeline.requests_us
    thrashing = again > waits.share_frac / 2
    gain = None
    if evidence.blocks_for_all is not None and evidence.blocks_total:  # more running requests, no preemptions
        most = RAN * evidence.blocks_for_all / evidence.blocks_total
        if timeline.seats:
            most = pl.min_horizontal(most, pl.lit(timeline.seats))
        gain = with_more_running(timeline, waits, most, recomputed_tokens=evidence.recomputed_tokens)
    yield limit_finding(
        timeline,
        waits,
        title="Preemptions: the KV cache is too small for the running requests"
        if thrashing
        else "KV cache too small",
        verdict="KV cache space limits this run: requests spent {share:%} of their time waiting for KV blocks"
        "[{again:?} or computing again after a preemption]{free}.",
        values={
            "again": again >= STATED_FRAC,
            "free": NOTHING
            if evidence.mean_budget_left_frac is None
            else say(", while {mean_budget_left_frac:%} of the token budget stayed free", evidence),
        },
        holder=_holder(evidence),
        gain=gain,
        limit=Cause.KV_BLOCKS,
        message=REFUSALS + (PREEMPTIONS if evidence.preemptions else ""),
        advice=_advice(timeline, evidence, thrashing=thrashing),
        evidence=evidence,
    )


def _evidence(timeline: Timeline, waits: Charged) -> KvSpace:
    need = need_at_refusals(timeline)
    refused = timeline.exits.filter((pl.col("cause") == Cause.KV_BLOCKS) & pl.col("refusal"))
    computed = int(timeline.steps["used_tokens"].sum() or 0)
    recomputed = int(timeline.steps["recomputed_tokens"].sum() or 0)
    return KvSpace(
        **wait_figures(waits),
        refused_steps=refused["step"].n_unique(),
        steps=timeline.steps.height,
        preemptions=timeline.preemptions.filter(pl.col("in_schedule")).height,
        recomputed_tokens=recomputed,
        recomputed_frac=recomputed / computed if computed else 0.0,
        mean_budget_left_frac=mean(waits.steps, pl.col("remaining_budget") / pl.col("token_budget")),
        groups=group_use(timeline) if len(timeline.header.cache_groups) > 1 else [],
        **need.holdings(),
    )


def _named_groups(evidence: KvSpace) -> Message:
    """Describe the blocks that each request holds for the state of Mamba groups; nothing without any."""
    states = [group for group in evidence.groups if group.kind == STATE]
    if not states:
        return NOTHING
    own = sum(group.blocks_per_request for group in states)
    each = sum(group.blocks_per_request for group in evidence.groups)
    return say(
        " At the refusals each request held {each:n block} on average[, {share:%} of the pool]; {own:n} of "
        "them for the state of {groups:n Mamba group}, however short it is.",
        each=round(each),
        share=each / evidence.blocks_total if evidence.blocks_total else None,
        own=round(own),
        groups=len(states),
    )


def _holder(evidence: KvSpace) -> Message:
    if evidence.blocks_held is None or not evidence.running:
        return NOTHING
    short = NOTHING
    if evidence.blocks_needed is not None and evidence.blocks_free is not None:
        short = say(
            "; the next in line needs {blocks_needed:n}, {blocks_free:n} are[{scarce:!}, less vLLM's "
            "reserve] free",
            evidence,
            scarce=evidence.blocks_needed > evidence.blocks_free,
        )
    return say(
        "{blocks_held:n} of {usable:n} usable blocks are held by {running:n running request}"
        "[ and {set_aside:n} set aside by their scheduler]{largest}{short} ({step}).{groups}",
        evidence,
        usable=evidence.blocks_total - 1 if evidence.blocks_total else None,
        largest=largest_holder(evidence),
        short=short,
        step="unknown" if evidence.held_step is None else Steps(evidence.held_step, evidence.held_step),
        groups=_named_groups(evidence),
    )


def largest_holder(held: Need | KvSpace) -> Message:
    """Return `` (t1-3 alone 9)``; nothing if no request holds far more than the others."""
    if not held.largest_holder or not held.blocks_held or not held.running:
        return NOTHING
    blocks, several = held.largest_holder_blocks or 0, held.running > 1
    if several and blocks <= 2 * held.blocks_held / held.running:
        return NOTHING
    return say(" ({largest_holder:id}[{several:?} alone {blocks:n}])", held, several=several, blocks=blocks)


def _advice(timeline: Timeline, evidence: KvSpace, *, thrashing: bool) -> list[Advice]:
    need, blocks = evidence.blocks_for_all, "[: now {total:n} blocks]"
    if need is not None:
        blocks = ": {value:n} blocks[ instead of {total:n}] hold all requests at once"
    pieces = [
        advise(
            "{space}" + blocks,
            space=kv_space(timeline, need),
            total=evidence.blocks_total,
            setting="num_gpu_blocks_override",
            value=need,
        )
    ]
    cache_dtype = timeline.header.settings.get("cache_config.cache_dtype")
    if timeline.header.device != "cpu" and not str(cache_dtype).startswith("fp8"):
        pieces.append(
            advise(
                "{option:setting}[ (now {now})], where the GPU's attention backend supports it: twice the "
                "blocks in the same memory",
                option="--kv-cache-dtype fp8",
                now=None if cache_dtype is None else str(cache_dtype),
                costs="Some accuracy.",
            )
        )
    config, total = timeline.header.scheduler_config, timeline.header.kv_blocks_total or 0
    # The smallest reserve of at least a block; what more than a present reserve would do is not known.
    value = next((share for share in WATERMARKS if share * total >= 1), None)
    if thrashing and value is not None and "watermark" in config and not config["watermark"]:
        pieces.append(
            advise(
                "{option} {value:n} (now {now:n}): a reserve of {blocks:n block} for running requests",
                now=0,
                blocks=int(value * (evidence.blocks_total or 0)),
                setting="watermark",
                value=value,
                costs="Later admission: a longer time to first token.",
            )
        )
    return pieces


RULE = Rule(
    code="kv-bound",
    summary="requests waited for KV cache space, or were preempted for want of it",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES}),
    find=_find,
    charges=(str(Cause.KV_BLOCKS), RECOMPUTE),
    proven=(
        ("kv_blocks", "num_gpu_blocks_override"),
        ("kv_blocks", "watermark"),
    ),
)
