"""Figures of a run beside its findings: latency by class, caches, drafts, outcomes, durations, engines."""

import msgspec


class Percentiles(msgspec.Struct, kw_only=True):
    """A distribution, in milliseconds: over requests, or over what its field says."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


class Distribution(Percentiles, kw_only=True):
    """Linearly interpolated percentiles, in milliseconds."""

    max: float
    """Largest value."""


class ClassLatency(msgspec.Struct, kw_only=True):
    """Requests of one class over all engines."""

    by: str
    """``all``, ``priority`` or ``lora``."""
    name: str
    """The priority (vLLM serves lower numbers first), or the adapter; empty: all, or the base model."""
    requests: int
    """That arrived."""
    finished: int
    """With what they asked for."""
    without_first_token: int = 0
    """Aborted before they had one, or without one when the trace ended: no time is theirs but the queue's."""
    waiting_frac: float | None
    """Of their time in the scheduler: in the waiting queue, unfinished requests included."""
    queue_ms: Distribution | None
    """Arrival at the scheduler to the first step that scheduled it; unfinished requests included."""
    ttft_ms: Distribution | None
    """Arrival at the front end to the first token's output in the engine, of all that had a first token:
    aborted and unfinished ones count."""
    tpot_ms: Distribution | None
    """Time per output token after the first, of those that finished."""
    e2e_ms: Distribution | None
    """Arrival at the front end to the last token's output in the engine, of those that finished."""


class PrefixCacheUse(msgspec.Struct, kw_only=True):
    """What requests found in a cache when they were first scheduled."""

    requests: int
    """That were scheduled."""
    requests_with_hit: int
    """Of them: found at least one block."""
    prompt_tokens: int
    """Theirs, together."""
    hit_tokens: int
    """Of these: found in a cache."""
    hit_frac: float | None
    """Of the prompt tokens."""
    local_tokens: int | None
    """Of the hits: in the engine's own prefix cache (vLLM 0.20 and newer)."""
    external_tokens: int | None
    """Brought by a KV connector (likewise)."""


class DraftUse(msgspec.Struct, kw_only=True):
    """Speculative tokens of the requests that ended."""

    drafts: int
    """Scheduled."""
    accepted: int
    """Of ``drafts``: accepted and delivered."""
    invalid: int | None
    """Forbidden by a grammar (vLLM 0.14 and newer)."""
    accepted_frac: float
    """Of ``drafts``."""
    wasted_frac: float | None
    """Rejected drafts as a share of all scheduled tokens; unfinished requests by the same acceptance."""


class Outcomes(msgspec.Struct, kw_only=True):
    """How requests ended."""

    arrived: int
    """At the scheduler."""
    finished: int
    """With what they asked for."""
    aborted: int
    """By the client."""
    errored: int
    """Any other end, such as an error."""
    unfinished: int
    """Still in the scheduler when the trace ended."""
    unrecorded: int | msgspec.UnsetType = msgspec.UNSET
    """Left where steps are missing, or may have: nothing is known of them afterwards; absent if none did."""
    by_scheduler: int = 0
    """Of ``errored``: the scheduler itself ended them, which vLLM's own does not."""
    present: int | msgspec.UnsetType = msgspec.UNSET
    """There when the trace began, and not among ``arrived``; absent where nobody was."""


class Durations(msgspec.Struct, kw_only=True):
    """How long steps took, and how far a request's outputs were apart."""

    device_ms: Distribution | None
    """From when a step with tokens could begin on the device to its output."""
    start_to_start_ms: Distribution | None
    """From the start of a step with tokens to that of the next, while requests were there."""
    inter_token_ms: Distribution | None
    """Between two outputs of a request; an output with accepted drafts counts once, a preemption in between
    counts as time."""


class EngineFigures(msgspec.Struct, kw_only=True):
    """One data-parallel engine, or all of them."""

    engine_rank: int | None
    """None: all engines."""
    steps: int
    """``schedule()`` calls, those without tokens included."""
    requests_finished: int | None
    """With what they asked for; None: not recorded."""
    output_tokens_per_s: float | None
    """By the trace, over the ``throughput_s`` of all trials, which is that of all engines together."""
    total_tokens_per_s: float | None
    """Prompt tokens included."""
    preemptions: int | None
    """None: this scheduler cannot be asked for them."""
    mean_running: float | None
    """Requests that ran at a time, over the engine's busy time; of several engines over the time in which any
    of them had a request."""
    mean_waiting: float | None
    """Likewise, in the waiting queue; of several engines only those that were refused."""
    dummy_batches: int | None
    """Only to keep other ranks company. Of ranks in lock-step: between the first and the last common step of
    a wave in which any rank computed something; else all that steps report. None: not recorded."""
    dummy_ms: float | None
    """Time that these took."""
    kv_used_frac: float | None = None
    """Mean share of the KV blocks in use after a step, over all engines' steps; None: not recorded."""
    stalled_ms: float | None = None
    """Time that it only decoded and waited for prefills of other ranks in lock-step; of all ranks: added up.
    None: not in lock-step, or not known."""


class Statistics(msgspec.Struct, kw_only=True):
    """All of a run without its warm-up."""

    latency: list[ClassLatency]
    """All requests; then by priority and by adapter, where there are several."""
    prefix_cache: PrefixCacheUse | None
    """None: no prefix caching, or not recorded."""
    drafts: DraftUse | None
    """None: no speculative decoding, or not recorded."""
    outcomes: Outcomes | None
    """None: not recorded."""
    durations: Durations
    """Of steps, and between tokens."""
    engines: list[EngineFigures]
    """One per engine and, of several, the last for all of them."""
