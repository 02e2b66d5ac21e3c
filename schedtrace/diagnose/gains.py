"""Gains from a changed setting on this load, as far as the trace bounds them.

A higher limit does not reduce the work for any token. It reduces the number of steps in which requests wait,
and so saves the fixed cost of these steps. The waiting requests bound how many steps are saved, and the
recorded steps bound the cost of a step. If the bounds are far apart, no gain is stated, and a replay must
measure it.

Without such bounds, the fixed share of a step's time shows whether fuller or smaller steps shorten latencies.
A step takes ``fixed + work``; the work grows with its requests and tokens. Equal batches that run one after
the other take ``fixed + work`` each, and a single step that holds ``m`` of them takes ``fixed + m * work``.
The mean time until a batch is done is shorter in the single step exactly if ``fixed > work``, for any ``m``.
Requests of unequal length gain more from running together, so half of a step's time is a safe threshold.
"""

from typing import NamedTuple

import msgspec
import polars as pl

from schedtrace.diagnose.offered_load import LEAST_IDLE_FRAC, offered_load
from schedtrace.diagnose.waits import Charged, mean
from schedtrace.model.message import NOTHING
from schedtrace.model.report import Advice, Gain
from schedtrace.model.say import say
from schedtrace.timeline.frames import NOT_RECORDED
from schedtrace.timeline.spans import total_us
from schedtrace.timeline.step_time import fit_step_time, median
from schedtrace.timeline.timeline import Timeline
from schedtrace.workloads.clients import AT_ONCE_FRAC

WIDEST_FRAC = 0.25
"""Maximum distance between the bounds at which a gain is stated; the midpoint is off by at most half of it.
"""

RAN = pl.col("total_requests")
"""Number of requests that got tokens in a step."""
THERE = pl.col("num_running_after") + pl.col("num_waiting_after").fill_null(0)
"""Number of requests that ran or waited after a step, and so could have got tokens in it."""


def throughput_gain(timeline: Timeline, least_us: float, most_us: float) -> Gain | None:
    """Return the gain in output tokens/s from saving between ``least_us`` and ``most_us`` of busy time."""
    busy_us = timeline.busy_us
    if not 0 < most_us < busy_us:
        return None
    low, high = (busy_us / (busy_us - saved_us) - 1 for saved_us in (least_us, most_us))
    return _gain("output_tokens_per_s", low, high, saved_frac=(least_us + most_us) / 2 / busy_us)


def _gain(metric: str, low: float, high: float, *, saved_frac: float) -> Gain | None:
    """Return the gain; None if its bounds are further apart than ``WIDEST_FRAC``, or include a loss."""
    if high - low > WIDEST_FRAC or low <= 0 <= high:
        return None
    return Gain(
        metric=metric,
        change_frac=(low + high) / 2,
        low_frac=low,
        high_frac=high,
        saved_frac=saved_frac,
        method="step_time",
    )


def host_gain(timeline: Timeline, least_us: float, most_us: float) -> Gain | None:
    """Estimate the gain from hiding this much of the time in which the device waits for the host.

    If the engine does not set the pace, the gain is a shorter time per output token. The upper bound counts a
    second effect: requests that leave sooner make later steps smaller (Little's law).
    """
    busy_us, fixed_us = timeline.busy_us, most_step_us(timeline)
    if sets_pace(timeline):
        return throughput_gain(timeline, least_us, most_us)
    if fixed_us is None or not busy_us:
        return None
    fixed_frac = min(1.0, fixed_us * timeline.steps.filter(RAN > 0).height / busy_us)
    low, high = -min(1.0, most_us / busy_us / fixed_frac), -least_us / busy_us
    return _gain("tpot_p50_ms", low, high, saved_frac=-(low + high) / 2)


def with_more_running(
    timeline: Timeline, waits: Charged, most: pl.Expr, *, recomputed_tokens: int = 0
) -> Gain | None:
    """Estimate the gain if more of the waiting requests had run, up to a higher limit.

    Args:
        timeline: The engine's trace.
        waits: Waits for the limit.
        most: Expression for the number of requests that could run at once, in a step of ``waits``.
        recomputed_tokens: Recomputed tokens that a higher limit may save.
    """
    model, steps, fixed_us = timeline.step_time, waits.steps.filter(RAN > 0), most_step_us(timeline)
    if model is None or fixed_us is None or steps.is_empty() or not sets_pace(timeline):
        return None
    together = pl.max_horizontal(pl.min_horizontal(most, THERE), RAN)
    seen = pl.col("used_tokens") * together / RAN <= timeline.steps["used_tokens"].max()
    fewer = 1 - RAN / together  # steps, for each of these
    # The least fixed cost of a step is its time without its work, at most the model's base. A device may hide
    # the work of few decodes, so each decode is assumed to cost as much as a prefill token.
    decode_us = max(model.per_prefill_token_us, model.per_decode_token_us)
    work_us = (
        model.per_prefill_token_us * pl.col("prefill_tokens")
        + decode_us * pl.col("decode_tokens")
        + model.per_context_token_us * pl.col("context_tokens")
    )
    alike_us = pl.when(seen).then((pl.col("busy_us") - work_us).clip(0, model.base_us)).otherwise(0)
    waited, least_us, widest = steps.select(
        waited=fewer.sum(), least_us=(fewer * alike_us).sum(), widest=together.max()
    ).row(0)
    if not waited:
        return None
    least, most_saved = steps_saved(timeline, waited, widest)
    again_us = recomputed_tokens * model.per_prefill_token_us
    return throughput_gain(timeline, least_us * least / waited, most_saved * fixed_us + again_us)


def steps_saved(timeline: Timeline, waited: float, widest: float) -> tuple[float, float]:
    """Return the smallest and the largest number of steps saved if up to ``widest`` requests share a step.

    Jobs that share ``widest`` places take at least as long as the longest job, and as all jobs in full steps,
    and at most the sum of both (Graham's bound for list scheduling).

    Args:
        timeline: The engine's trace.
        waited: Number of steps that are saved while requests wait.
        widest: Maximum number of requests in a step with the higher limit.
    """
    working = timeline.steps.filter(RAN > 0)
    of_trial = timeline.known_requests[["request_id", "trial"]]
    each = timeline.stretches.group_by("request_id").agg(
        (pl.col("last_step") - pl.col("step") + 1).sum().alias("steps")
    )
    most = each.collect().join(of_trial, on="request_id").group_by("trial").agg(pl.col("steps").max())
    # The request with the most steps of each trial needs them in any case.
    shared, longest = int(working["total_requests"].sum()) / widest, int(most["steps"].sum())
    least = max(0.0, min(waited, working.height - shared - longest))
    return least, max(waited, working.height - max(shared, longest))


def most_step_us(timeline: Timeline) -> float | None:
    """Return the maximum fixed cost of a step in microseconds: the largest base plus all host time."""
    model, steps = timeline.step_time, timeline.steps.filter(RAN > 0).height
    return model.most_base_us + host_time_us(timeline) / steps if model is not None and steps else None


def host_time_us(timeline: Timeline) -> int:
    """Return the time in which the device did not work although a request was present, in microseconds."""
    host = timeline.engine_states.filter(~pl.col("state").is_in(["device", "idle", NOT_RECORDED]))
    return total_us(host)


def sets_pace(timeline: Timeline) -> bool:
    """Return whether the engine sets the pace: requests come all at once, or right after answers.

    If the engine does not set the pace, the clients' timing determines the throughput, and a higher limit
    only brings answers sooner.
    """
    load = offered_load(timeline)
    if len(timeline.trials()) <= 1 and load.working_frac < 1 - LEAST_IDLE_FRAC:  # between trials it is usual
        return False
    return load.pace == "at_once" or load.thinks_frac <= AT_ONCE_FRAC


def peak_requests(timeline: Timeline) -> int:
    """Return the largest number of requests in the scheduler after a step."""
    return timeline.demand.requests or 1


SIMILAR_FRAC = 0.25
"""Minimum number of tokens in a similar step, as a share of the median of the steps with waiting requests. On
a device that computes while it reads its weights, the work of smaller steps does not show."""
NEARER_FRACS = (0.5, 0.75)
"""Higher values of ``SIMILAR_FRAC``, which show whether a result holds only for the smaller similar steps."""
BREAK_EVEN_FRAC = 0.5
"""Minimum fixed share of a step's time at which batches that run together end sooner on average than batches
that run one after the other."""
SAVED_AT_ONCE_FRAC = 0.05
"""Minimum share of the busy time that fewer steps must save if requests come all at once."""
LIMITS = frozenset({"max_num_seqs", "max_num_active_seqs", "num_gpu_blocks_override"})
"""Settings whose larger values put more requests into a step."""
RESERVE = "watermark"
"""Setting that admits requests later and saves preemptions; no step time shows which effect is larger."""


class FixedShare(NamedTuple):
    """Bounds of the fixed share of some steps' time, derived from recorded step times."""

    low_frac: float
    high_frac: float
    step_us: float
    """Mean time of the steps, including the host's time, in microseconds."""

    @property
    def favours_fuller(self) -> bool:
        """Whether fuller steps shorten the mean latency even at the lower bound."""
        return self.low_frac >= BREAK_EVEN_FRAC


def fixed_share(timeline: Timeline, shown: pl.DataFrame, *, at_budget: bool = False) -> FixedShare | None:
    """Return the fixed share of some steps' time; None if too few similar steps show it.

    The upper bound counts all of the host's time between steps as fixed, and the lower bound none of it.

    Args:
        timeline: The engine's trace.
        shown: Steps, for example those in which requests waited.
        at_budget: Whether the steps are the largest that the budget allows. The cost of a larger step shows
            in the steps nearest in size, so the lower bound is then at most their upper bound.
    """
    working = timeline.steps.filter((RAN > 0) & (pl.col("busy_us") > 0))
    steps = shown.filter((RAN > 0) & (pl.col("busy_us") > 0))
    busy_us = mean(steps, pl.col("busy_us"))
    if busy_us is None:
        return None
    usual, host = median(steps["used_tokens"]), host_time_us(timeline) / working.height
    similar, *nearer = (
        fit_step_time(working.filter(pl.col("used_tokens") >= least * usual))
        for least in (SIMILAR_FRAC, *(NEARER_FRACS if at_budget else ()))
    )
    if similar is None:
        return None
    step_us = busy_us + host
    high = min(1.0, (similar.most_base_us + host) / step_us)
    highs = [(model.most_base_us + host) / step_us for model in nearer if model is not None]
    return FixedShare(min(high, similar.least_base_us / step_us, *highs), high, step_us)


def throughput_counts(timeline: Timeline) -> bool:
    """Return whether higher throughput finishes requests sooner: they come all at once or follow answers."""
    return offered_load(timeline).pace in ("at_once", "answers")


def shows_fuller(timeline: Timeline, waits: Charged) -> bool:
    """Return whether the trace shows that fuller steps shorten latencies, however little throughput rises.

    False if requests come all at once or follow answers, because throughput counts for these.
    """
    if throughput_counts(timeline):
        return False
    share = fixed_share(timeline, waits.steps)
    return share is not None and share.favours_fuller


def unless_shown(timeline: Timeline, waits: Charged, advice: list[Advice]) -> list[Advice]:
    """Return the advice; unless fuller steps shorten latencies, higher limits only become values to replay.

    If higher throughput finishes requests sooner, no such proof is needed, because fuller steps raise it.
    """
    settings = {piece.setting for piece in advice if piece.value is not None}
    if not settings & {*LIMITS, RESERVE} or throughput_counts(timeline):
        return advice
    share = fixed_share(timeline, waits.steps)
    shown = share is not None and share.favours_fuller
    unshown = {RESERVE} if shown else {*LIMITS, RESERVE}
    pieces = []
    for piece in advice:
        if piece.setting not in unshown or piece.value is None:
            pieces.append(piece)
            continue
        reason = NOTHING
        if share is not None and piece.setting != RESERVE:
            reason = say(
                ": by the recorded step times, {low:%}[{wide:?} to {high:%}] of the time of these steps does "
                "not depend on their requests, so fuller steps may lengthen latencies more than they shorten "
                "waits",
                low=share.low_frac,
                high=share.high_frac,
                wide=share.high_frac - share.low_frac >= 0.01,  # noqa: PLR2004  # else both are printed alike
            )
        message = say(
            "{advice}. Change it only if a replay of this load shows that it helps ({command:code}){reason}",
            advice=piece.message,
            command="schedtrace analyze --predict",
            reason=reason,
        )
        pieces.append(msgspec.structs.replace(piece, message=message, setting=None, value=None))
    return pieces


def budget_times(timeline: Timeline, shown: pl.DataFrame, share: FixedShare) -> float | None:
    """Return the factor for the token budget (2, 4 or a half) that the bounds support; None if they do not.

    If all requests come at once, the time of the last one counts: half as many steps save at least half of
    their fixed time, and larger steps hardly lengthen the total. Otherwise, latencies count: one step less
    saves its fixed time for every request present, and costs each decoding request a token, which a later
    step computes. One step more does the opposite.
    """
    if offered_load(timeline).pace == "at_once":
        full_us = float(shown["busy_us"].sum())
        if share.low_frac / 2 * full_us / max(1, timeline.busy_us) < SAVED_AT_ONCE_FRAC:
            return None
        wanted = shown.select((pl.col("used_tokens") + pl.col("waiting_tokens_after")).max()).item()
        return 4.0 if wanted is not None and wanted >= 4 * shown["used_tokens"].max() else 2.0  # type: ignore[operator]  # integers
    decode_only = timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("prefill_tokens") == 0))
    if decode_only.is_empty():
        return None
    decoding = mean(shown, pl.min_horizontal("decode_tokens", RAN)) or 0.0
    tokens_us = decoding * median(decode_only["busy_us"].drop_nulls())
    present_us = (mean(shown, THERE) or 0.0) * share.step_us
    if share.favours_fuller and share.low_frac * present_us > tokens_us:
        return 2.0
    if not throughput_counts(timeline) and share.high_frac * present_us < tokens_us:
        return 0.5
    return None
