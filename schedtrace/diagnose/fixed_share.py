"""Fixed share of a step's time, and whether fuller or smaller steps therefore shorten latencies.

A step takes ``fixed + work``; the work grows with its requests and tokens. Equal batches that run one after
the other take ``fixed + work`` each, and a single step that holds ``m`` of them takes ``fixed + m * work``.
The mean time until a batch is done is shorter in the single step exactly if ``fixed > work``, for any ``m``.
Requests of unequal length gain more from running together, so half of a step's time is a safe threshold.
"""

from typing import NamedTuple

import msgspec
import polars as pl

from schedtrace.diagnose.gains import RAN, THERE, host_us
from schedtrace.diagnose.offered_load import offered_load
from schedtrace.diagnose.waits import Charged, mean
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Advice
from schedtrace.model.say import say
from schedtrace.timeline.step_time import fit_step_time, median
from schedtrace.timeline.timeline import Timeline

SIMILAR_FRAC = 0.25
"""Smallest number of tokens of a similar step, as a share of the median of the steps with waiters. Smaller
steps hide their work on a device that computes while it reads its weights.
"""
BREAK_EVEN_FRAC = 0.5
"""Fixed share above which steps that run together end sooner on average than one after the other."""
LIMITS = frozenset({"max_num_seqs", "max_num_active_seqs", "num_gpu_blocks_override"})
"""Settings whose larger values put more requests into a step."""
RESERVE = "watermark"
"""Setting that admits requests later and saves preemptions; no step time bounds which of both weighs more."""


class FixedShare(NamedTuple):
    """Bounds of the fixed share of the time of some steps, by the step times that a trace records."""

    low_frac: float
    high_frac: float
    step_us: float
    """Mean time of these steps, with the host's time, in microseconds."""

    @property
    def favours_fuller(self) -> bool:
        """Whether fuller steps shorten the mean latency even at the lower bound."""
        return self.low_frac >= BREAK_EVEN_FRAC


def fixed_share(timeline: Timeline, waits: Charged) -> FixedShare | None:
    """Return the fixed share of the steps with waiters; None if too few similar steps show it.

    The upper bound counts all of the host's time between steps as fixed, and the lower bound none of it.
    """
    working = timeline.steps.filter((RAN > 0) & (pl.col("busy_us") > 0))
    steps = waits.steps.filter((RAN > 0) & (pl.col("busy_us") > 0))
    busy_us = mean(steps, pl.col("busy_us"))
    if busy_us is None:
        return None
    least = SIMILAR_FRAC * median(steps["used_tokens"])
    model = fit_step_time(working.filter(pl.col("used_tokens") >= least))
    if model is None:
        return None
    host = host_us(timeline) / working.height
    step_us = busy_us + host
    high = min(1.0, (model.most_base_us + host) / step_us)
    return FixedShare(min(high, model.least_base_us / step_us), high, step_us)


def throughput_counts(timeline: Timeline) -> bool:
    """Return whether requests are sent at once or follow answers: more throughput then ends them sooner."""
    return offered_load(timeline).pace in ("at_once", "answers")


def shows_fuller(timeline: Timeline, waits: Charged) -> bool:
    """Return whether fuller steps are shown to shorten latencies, however little throughput rises.

    This is about requests that arrive at times of their own.
    """
    if throughput_counts(timeline):
        return False
    share = fixed_share(timeline, waits)
    return share is not None and share.favours_fuller


def unless_shown(timeline: Timeline, waits: Charged, advice: list[Advice]) -> list[Advice]:
    """Return the advice, with larger limits as values to replay unless fuller steps shorten the latency.

    Where throughput counts, fuller steps raise it, and no such proof is needed.

    Args:
        timeline: The engine's trace.
        waits: Waits for the limit.
        advice: Advice of the finding.
    """
    settings = {piece.setting for piece in advice if piece.value is not None}
    if not settings & {*LIMITS, RESERVE} or throughput_counts(timeline):
        return advice
    share = fixed_share(timeline, waits)
    shown = share is not None and share.favours_fuller
    unshown = {RESERVE} if shown else {*LIMITS, RESERVE}
    return [
        _to_replay(piece, None if piece.setting == RESERVE else share)
        if piece.setting in unshown and piece.value is not None
        else piece
        for piece in advice
    ]


def _to_replay(advice: Advice, share: FixedShare | None) -> Advice:
    """Return advice whose value only a replay can justify."""
    message = say(
        "{advice}, if a replay of this load shows that it helps ({command:code}){reason}",
        advice=advice.message,
        command="schedtrace analyze --predict",
        reason=_reason(share),
    )
    return msgspec.structs.replace(advice, message=message, setting=None, value=None)


def _reason(share: FixedShare | None) -> Message:
    if share is None:
        return NOTHING
    return say(
        ": by the step times seen, {low:%}[{wide:?} to {high:%}] of the time of these steps does not depend "
        "on their requests, so fuller steps may lengthen latencies more than they shorten waits",
        low=share.low_frac,
        high=share.high_frac,
        wide=share.high_frac - share.low_frac >= 0.01,  # noqa: PLR2004  # else both are printed alike
    )


def budget_times(timeline: Timeline, waits: Charged, share: FixedShare) -> float | None:
    """Return the factor on the token budget, 2 or a half, that shortens latencies by the share's bounds.

    A step less saves its fixed time for every request present, and costs each decoding request a token, which
    a later step computes. A step more does the opposite. None: the bounds favour neither.

    Args:
        timeline: The engine's trace.
        waits: Waits for the token budget.
        share: Fixed share of the steps with these waits.
    """
    decode_only = timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("prefill_tokens") == 0))
    if decode_only.is_empty():
        return None
    decoding = mean(waits.steps, pl.min_horizontal("decode_tokens", RAN)) or 0.0
    tokens_us = decoding * median(decode_only["busy_us"].drop_nulls())
    present_us = (mean(waits.steps, THERE) or 0.0) * share.step_us
    if share.favours_fuller and share.low_frac * present_us > tokens_us:
        return 2.0
    if not throughput_counts(timeline) and share.high_frac * present_us < tokens_us:
        return 0.5
    return None
