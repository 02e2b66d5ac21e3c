"""What would be gained on this load if a limit were wider, estimated from the model of step times.

Work is conserved: a wider limit saves no token's time, only steps, and so what each step costs besides its
tokens (``StepTime.base_us`` and the host's time between steps). How much of a step that is, a trace of one
load tells roughly; so the interval goes from the model's base alone to all of an average step.
"""

import math

import polars as pl

from schedtrace.diagnose.waits import Charged
from schedtrace.model.report import Gain
from schedtrace.timeline.timeline import Timeline

BURST_FRAC = 0.9
"""Nine tenths of a trial's requests came before a tenth of its steps was done: all of them at once."""
DONE_FRAC = 0.1
IDLE_FRAC = 0.05
"""An engine that is idle for more than a twentieth of the time could have taken more work."""


def throughput_gain(
    timeline: Timeline, saved_us: float, least_us: float | None = None, most_us: float | None = None
) -> Gain | None:
    """The gain in output tokens per second if this much of the engine's busy time is saved.

    Args:
        timeline: The engine's trace.
        saved_us: Of ``timeline.busy_us``.
        least_us: At least so much; None: just ``saved_us``.
        most_us: At most so much; likewise.
    """
    busy_us = timeline.busy_us
    if not busy_us or saved_us <= 0:
        return None

    def change(saved: float) -> float:
        saved = min(saved, 0.95 * busy_us)  # nothing is free: a run always takes time
        return busy_us / (busy_us - saved) - 1

    return Gain(
        metric="output_tokens_per_s",
        change_frac=change(saved_us),
        low_frac=change(saved_us if least_us is None else least_us),
        high_frac=change(saved_us if most_us is None else most_us),
        saved_frac=min(1.0, saved_us / busy_us),
        method="step_time",
    )


def host_gain(timeline: Timeline, *, least_us: float, most_us: float) -> Gain | None:
    """If the device no longer waited for the host.

    Args:
        timeline: The engine's trace.
        least_us: Of its busy time, what asynchronous scheduling hides for sure.
        most_us: All that it waited. Between the two is work of unknown place: the middle is stated.
    """
    gain = throughput_gain(timeline, (least_us + most_us) / 2, least_us, most_us)
    return gain if gain is None or came_at_once(timeline) else _as_latency(gain)


def _as_latency(gain: Gain) -> Gain:
    """Where the client sets the pace, a faster engine does not produce more, but sooner."""
    sooner = [1 / (1 + frac) - 1 for frac in (gain.change_frac, gain.low_frac or 0.0, gain.high_frac or 0.0)]
    gain.metric, (gain.change_frac, gain.high_frac, gain.low_frac) = "tpot_p50_ms", sooner
    return gain


def with_more_running(timeline: Timeline, waits: Charged, *, at_most: float | None = None) -> Gain | None:
    """If the requests that waited had run, too: the same tokens in fewer steps, or an earlier first token.

    Args:
        timeline: The engine's trace.
        waits: For the limit.
        at_most: Requests that could run at once; None: all.
    """
    if not saturated(timeline):
        return ttft_gain(timeline, waits)
    waited_us = waits.time_us
    states = timeline.request_states
    length = pl.col("end_us") - pl.col("begin_us")
    ran = states.filter(pl.col("state").is_in(["prefill", "decode", "recompute"]))
    ran_us = int(ran.select(length.sum()).item())
    if not ran_us:
        return None
    # Of a burst that runs in k rounds, requests wait (k - 1) / 2 rounds on average.
    rounds = 2 if came_at_once(timeline) else 1
    together = 1 + rounds * waited_us / ran_us
    if at_most is not None:
        together = min(together, at_most / _running(timeline))
    if together <= 1:
        return None
    steps = timeline.steps.filter(pl.col("total_requests") > 0).height
    return fewer_steps(
        timeline,
        (1 - 1 / together) * steps,
        at_most_us=rounds * waited_us / timeline.requests_us * timeline.busy_us,
    )


def fewer_steps(timeline: Timeline, steps: float, *, at_most_us: float = math.inf) -> Gain | None:
    """If the same tokens took so many steps less: None without a model of step times.

    Args:
        timeline: The engine's trace.
        steps: That are saved.
        at_most_us: No more can be saved than this, whatever a step costs.
    """
    fixed_us, model = per_step_us(timeline), timeline.step_time
    if fixed_us is None or model is None:
        return None
    working = timeline.steps.filter(pl.col("total_requests") > 0).height
    costs = (fixed_us, model.base_us * (1 - model.error_frac), timeline.busy_us / working)
    saved_us, least_us, most_us = (min(steps * cost, at_most_us) for cost in costs)
    return throughput_gain(timeline, saved_us, min(least_us, saved_us), max(most_us, saved_us))


def ttft_gain(timeline: Timeline, waits: Charged) -> Gain | None:
    """The median time to first token of those who waited, as it was and without this wait.

    None where the trace has the first token of none of them.
    """
    each = waits.rows.group_by("request_id").agg(pl.col("time_us").sum())
    first = timeline.finishes.select(
        "request_id", ttft_us=pl.col("first_token_us") - pl.coalesce("arrived_us", "queued_us")
    ).drop_nulls()
    known = each.join(first, on="request_id")
    if known.is_empty():
        return None
    now, without = known.select(
        now=pl.col("ttft_us").median(), without=(pl.col("ttft_us") - pl.col("time_us")).clip(0).median()
    ).row(0)
    if not now:
        return None
    return Gain(
        metric="ttft_p50_ms",
        change_frac=without / now - 1,
        before=now / 1e3,
        after=without / 1e3,
        requests=known.height,
        saved_frac=waits.share_frac,
        method="waits",
    )


def saturated(timeline: Timeline) -> bool:
    """Whether the engine had work nearly all the time: else its clients set the throughput."""
    idle = timeline.engine_states.filter(pl.col("state") == "idle")
    idle_us = int(idle.select((pl.col("end_us") - pl.col("begin_us")).sum()).item())
    return came_at_once(timeline) or idle_us <= IDLE_FRAC * (idle_us + timeline.busy_us)


def per_step_us(timeline: Timeline) -> float | None:
    """What a step costs whatever it computes: the model's base, and the host's time between steps."""
    model = timeline.step_time
    steps = timeline.steps.filter(pl.col("total_requests") > 0).height
    if model is None or not steps:
        return None
    host = timeline.engine_states.filter(~pl.col("state").is_in(["device", "idle"]))
    host_us = host.select((pl.col("end_us") - pl.col("begin_us")).sum()).item()
    return float(model.base_us + host_us / steps)


def came_at_once(timeline: Timeline) -> bool:
    """Whether nearly all requests of each trial came before its work had really begun."""
    came = timeline.arrivals.filter(~pl.col("streaming_update"))
    early = []
    for trial in timeline.trials():
        steps, arrivals = timeline.of_trial(timeline.steps, trial), timeline.of_trial(came, trial)
        if steps.is_empty() or arrivals.is_empty():
            continue
        done = steps["start_us"][int(DONE_FRAC * (steps.height - 1))]
        early.append(float((arrivals["queued_us"] <= done).mean() or 0.0))
    return bool(early) and min(early) >= BURST_FRAC


def _running(timeline: Timeline) -> float:
    working = timeline.steps.filter(pl.col("total_requests") > 0)
    return float(working["total_requests"].mean() or 1.0)  # type: ignore[arg-type]  # a column of integers


def peak_requests(timeline: Timeline) -> int:
    """Most requests in the scheduler after a step."""
    return timeline.demand.requests or 1
