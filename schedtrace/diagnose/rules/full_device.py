"""Decision whether requests waited for a limit or for the device, based on the gain from a higher limit.

Work is conserved: a fuller step does more work, and only the fixed cost of a step is saved. The device is
assumed not to become faster per token as steps grow, so steps larger than the recorded ones gain no more.
"""

from types import MappingProxyType
from typing import Unpack

import polars as pl

from schedtrace.diagnose.gains import host_time_us, shows_fuller, steps_saved, unless_shown
from schedtrace.diagnose.kv_cache import cache_use
from schedtrace.diagnose.offered_load import OfferedLoad, offered_load
from schedtrace.diagnose.rules.common import RESOLVED_FRAC, Fields, Values, advise, wait_finding
from schedtrace.diagnose.waits import Charged
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.step_time import StepTime
from schedtrace.timeline.timeline import Timeline

WORTH_FRAC = 0.05
"""Minimum gain of throughput from a higher limit that counts; below this, the device is full."""
OVERLOADED_FRAC = 0.10
"""Minimum gain of throughput that counts if more requests arrive than the engine serves."""
MISSING_FRAC = 0.25
"""Minimum gain that counts in the same case, as a share of the missing throughput; the smaller minimum
applies."""
LIMITS = {
    Cause.MAX_NUM_SEQS: ("a seat", "more seats"),
    Cause.TOKEN_BUDGET: ("the token budget", "a larger one"),
    Cause.INPUT_BUDGET: ("the token budget", "a larger one"),
    Cause.KV_BLOCKS: ("KV blocks", "more of them"),
}
"""Causes of waits, each with phrases for the scarce resource and for more of it."""
MOST_FRAC = 0.5
"""Minimum share of a full device's time for the verdict to state that prefill takes it."""


def limit_finding(
    timeline: Timeline,
    waits: Charged,
    evidence: Evidence,
    limit: Cause,
    *,
    values: Values = MappingProxyType({}),
    **fields: Unpack[Fields],
) -> Finding:
    """Return the limit as a root cause or, if raising the limit gains little, the device.

    Args:
        timeline: The engine's trace.
        waits: Time charged to the limit.
        evidence: Evidence with the finding's figures.
        limit: Cause of the waits, one of ``LIMITS``.
        values: As for ``wait_finding``.
        fields: As for ``wait_finding``, for the limit.
    """
    fields["cause"] = limit
    gain = gain_without(timeline, waits, limit)
    most, load = gain_without(timeline, waits, limit, tail=True), offered_load(timeline)
    fuller = limit not in OF_TOKENS and shows_fuller(timeline, waits)
    if gain is None or most is None or not _is_full(load, most) or fuller:
        fields["advice"] = unless_shown(timeline, waits, fields["advice"])
        return wait_finding(timeline, waits, evidence, values=values, **fields)
    resource, wider = LIMITS[limit]
    # Whole clauses: of several engines, what says one engine's gain is left out (``root_causes``).
    but = say(", but by the recorded step times {wider} would not raise throughput", wider=wider)
    if gain >= RESOLVED_FRAC:
        but = say(
            ", but by the recorded step times {wider} would raise throughput by about {gain:%}",
            wider=wider,
            gain=gain,
        )
    full: Fields = {
        **fields,
        "title": "The device is full",
        "verdict": say(
            "The device is the limit: requests spent {share:%} of their time waiting for {resource}{but}."
            "[ {work}]",
            share=waits.share_frac,
            resource=resource,
            but=but,
            work=prefill_work(timeline),
        ),
        "gain": None,
        "advice": [
            *_cached(timeline),
            advise(
                "another engine, or [fewer than these {clients:n client}: as many tokens/s, and shorter "
                "waits][{clients:!}fewer requests at a time]",
                clients=load.clients.clients if load.clients and load.clients.pattern == "loop" else None,
            ),
        ],
    }
    return wait_finding(timeline, waits, evidence, values=values, **full)


def prefill_work(timeline: Timeline) -> Message:
    """Describe prefill's share of a full device's time, and whether the prefix cache can reduce it.

    Empty if the share is less than half, or unknown. The trace does not show whether prompts that are shorter
    than a block begin alike.
    """
    model, busy_us = timeline.step_time, timeline.busy_us
    if model is None or not busy_us:
        return NOTHING
    share = min(1.0, int(timeline.steps["prefill_tokens"].sum()) * model.per_prefill_token_us / busy_us)
    if share < MOST_FRAC:
        return NOTHING
    return say(
        "Prefill takes {share:%} of the device's time[; the prefix cache spares none of it, because no "
        "prompt is longer than one block of {block:n token}].",
        share=share,
        block=_block_beyond_prompts(timeline),
    )


def _block_beyond_prompts(timeline: Timeline) -> int | None:
    """Return the block size in tokens if prefix caching is on and no prompt is longer; otherwise None."""
    if not timeline.header.enable_prefix_caching:
        return None
    use = cache_use(timeline)
    short = use.filter(pl.col("miss") == "short")
    return timeline.header.block_size if 0 < short.height == use.height else None


def _cached(timeline: Timeline) -> list[Advice]:
    """Return the advice for prompts shorter than a block, if prefill fills the device."""
    if not prefill_work(timeline) or _block_beyond_prompts(timeline) is None:
        return []
    remedy = (
        "If prompts begin alike, several tasks in a prompt, or smaller blocks as far as the model has them: "
        "vLLM caches only whole blocks"
    )
    return [advise(remedy)]


def gain_without(timeline: Timeline, waits: Charged, cause: Cause, *, tail: bool = False) -> float | None:
    """Return the relative rise of throughput if no request waited for this limit; None if unknown.

    Requests that waited at a step would have been in it, as far as the other limits allow, so fewer steps
    would do the work. No request would have recomputed tokens after a preemption.

    Args:
        timeline: The engine's trace.
        waits: Waits for the limit.
        cause: Cause of the waits.
        tail: Whether to add the steps at the end of a run with few requests: if a long request begins sooner,
            these may be saved, too.
    """
    model, working = timeline.step_time, timeline.steps.filter(pl.col("total_requests") > 0)
    if model is None or working.is_empty() or not timeline.busy_us:
        return None
    if cause in OF_TOKENS and not knows_waiting_tokens(waits.steps):
        return None
    joining, ran = _joining(timeline, cause)
    fewer, host = (joining / (joining + ran)).fill_nan(0), host_time_us(timeline) / working.height
    waited, widest, saved_us = (
        waits.steps.filter(pl.col("total_requests") > 0)
        .select(
            waited=fewer.sum(),
            widest=(pl.col("total_requests") * (1 + (joining / ran).fill_nan(0))).max(),
            saved_us=(fewer * (most_base_us(model) + host)).sum(),
        )
        .row(0)
    )
    if tail and waited and offered_load(timeline).pace == "at_once":
        sooner = steps_saved(timeline, waited, widest)[1] - waited
        saved_us += sooner * (max(model.most_base_us, model.most_decode_base_us) + host)
    saved_us += int(working["recomputed_tokens"].sum() or 0) * model.per_prefill_token_us
    return saved_us / (timeline.busy_us - saved_us) if saved_us < timeline.busy_us else None


def most_base_us(model: StepTime) -> pl.Expr:
    """Return the largest part of a step's time that may not depend on its work, with or without prefill."""
    of_decodes_us = max(model.most_base_us, model.most_decode_base_us)
    return pl.when(pl.col("prefill_tokens") == 0).then(of_decodes_us).otherwise(model.most_base_us)


LEAST_KNOWN_FRAC = 0.9


def knows_waiting_tokens(steps: pl.DataFrame) -> bool:
    """Return whether nearly all steps record the waiting tokens, from which a gain is computed."""
    return steps["waiting_tokens_after"].count() >= LEAST_KNOWN_FRAC * steps.height


OF_TOKENS = (Cause.TOKEN_BUDGET, Cause.INPUT_BUDGET)
"""Causes for which the number of waiting tokens decides what a larger limit would save."""


def _joining(timeline: Timeline, cause: Cause) -> tuple[pl.Expr, pl.Expr]:
    """Return the load that waiting requests would have added to each step, and the step's own load."""
    ran, joining = pl.col("total_requests"), pl.col("num_waiting_after").fill_null(0)
    if cause != Cause.MAX_NUM_SEQS and timeline.seats:
        joining = pl.min_horizontal(joining, timeline.seats - pl.col("num_running_after"))
    if cause != Cause.KV_BLOCKS:
        free, total = pl.col("kv_blocks_free_after"), pl.col("kv_blocks_total")
        joining = pl.min_horizontal(joining, pl.col("num_running_after") * free / (total - free))
    if cause in OF_TOKENS:
        waiting = pl.col("num_waiting_after")
        ran, joining = pl.col("used_tokens"), pl.col("waiting_tokens_after") * joining / waiting
    return joining, ran


def _is_full(load: OfferedLoad, gain_frac: float) -> bool:
    """Return whether the device is full; if the engine keeps up, even small gains shorten waits a lot."""
    if load.pace == "clock":
        return gain_frac < min(OVERLOADED_FRAC, MISSING_FRAC * load.beyond_frac)
    return gain_frac < WORTH_FRAC
