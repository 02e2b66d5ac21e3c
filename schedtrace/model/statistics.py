"""Further figures of a run: latency by class, caches, drafts, outcomes, durations, engines."""

import msgspec


class Percentiles(msgspec.Struct, kw_only=True):
    """Distribution in milliseconds, over requests unless the field states otherwise."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


class Distribution(Percentiles, kw_only=True):
    """Linearly interpolated percentiles, in milliseconds."""

    max: float
    """Largest of all values."""


class ClassLatency(msgspec.Struct, kw_only=True):
    """Latencies of the requests of one class over all engines."""

    by: str
    """``all``, ``priority`` or ``lora``."""
    name: str
    """Priority (vLLM serves lower numbers first) or adapter; empty for the class of all requests, or for the
    base model."""
    requests: int
    """Number of requests that arrived."""
    finished: int
    """Number of requests that finished normally."""
    without_first_token: int = 0
    """Number of requests that were aborted before their first token, or had none when the trace ended; only
    their queue times count."""
    waiting_frac: float | None
    """Share of their time in the scheduler that the requests spent in the waiting queue; unfinished requests
    count, too."""
    queue_ms: Distribution | None
    """Time from arrival at the scheduler to the first step that scheduled the request, including unfinished
    requests.
    """
    ttft_ms: Distribution | None
    """Time from arrival at the front end to the first token's output in the engine, over all requests with a
    first token, including aborted and unfinished ones.
    """
    tpot_ms: Distribution | None
    """Time per output token after the first, over finished requests."""
    e2e_ms: Distribution | None
    """Time from arrival at the front end to the last token's output in the engine, over finished requests."""


class PrefixCacheUse(msgspec.Struct, kw_only=True):
    """Cache hits of requests when they were first scheduled."""

    requests: int
    """Number of requests that were scheduled."""
    requests_with_hit: int
    """Number of requests that found at least one cached block."""
    prompt_tokens: int
    """Prompt tokens of the scheduled requests."""
    hit_tokens: int
    """Prompt tokens found in a cache."""
    hit_frac: float | None
    """``hit_tokens`` as a share of ``prompt_tokens``."""
    local_tokens: int | None
    """Hits in the engine's own prefix cache (vLLM 0.20 and newer)."""
    external_tokens: int | None
    """Hits brought by a KV connector (vLLM 0.20 and newer)."""


class DraftUse(msgspec.Struct, kw_only=True):
    """Speculative tokens of the requests that ended."""

    drafts: int
    """Number of draft tokens scheduled."""
    accepted: int
    """Number of draft tokens that were accepted and delivered."""
    invalid: int | None
    """Number of draft tokens that a grammar rejected (vLLM 0.14 and newer)."""
    accepted_frac: float
    """``accepted`` as a share of ``drafts``."""
    wasted_frac: float | None
    """Rejected drafts as a share of all scheduled tokens; unfinished requests are assumed to have the same
    rate of acceptance."""


class Outcomes(msgspec.Struct, kw_only=True):
    """Numbers of requests by the way in which they ended."""

    arrived: int
    """Number of requests that reached the scheduler."""
    finished: int
    """Number of requests that finished normally."""
    aborted: int
    """Number of requests aborted by the client."""
    errored: int
    """Number of requests that ended in any other way, such as with an error."""
    unfinished: int
    """Number of requests still in the scheduler when the trace ended."""
    unrecorded: int | msgspec.UnsetType = msgspec.UNSET
    """Number of requests that left, or may have left, during missing steps and were not seen afterwards.
    Absent if there are none."""
    by_scheduler: int = 0
    """Number of the ``errored`` requests that the scheduler itself ended, which vLLM's own scheduler never
    does."""
    present: int | msgspec.UnsetType = msgspec.UNSET
    """Number of requests in the scheduler when the trace began; ``arrived`` does not include them. Absent if
    there are none."""


class Durations(msgspec.Struct, kw_only=True):
    """Durations of steps, and times between a request's outputs."""

    device_ms: Distribution | None
    """Time from the moment when the device could begin a step with tokens until the step's output."""
    start_to_start_ms: Distribution | None
    """Time from the start of a step with tokens to the start of the next, while there were requests."""
    inter_token_ms: Distribution | None
    """Time between two outputs of a request, including time lost to a preemption; an output with accepted
    drafts counts once."""


class EngineFigures(msgspec.Struct, kw_only=True):
    """Figures of a data-parallel engine, or of all engines."""

    engine_rank: int | None
    """Data-parallel rank; None: all engines."""
    steps: int
    """Number of ``schedule()`` calls, including those without tokens."""
    requests_finished: int | None
    """Number of requests that finished normally; None if not recorded."""
    output_tokens_per_s: float | None
    """Output tokens in the trace, per second of the ``throughput_s`` of all trials, counted over all engines
    together."""
    total_tokens_per_s: float | None
    """Prompt and output tokens per second."""
    preemptions: int | None
    """Number of preemptions; None if this scheduler does not report them."""
    mean_running: float | None
    """Mean number of running requests over the engine's busy time or, with several engines, over the time in
    which any of them had a request."""
    mean_waiting: float | None
    """Mean number of requests in the waiting queue; with several engines, only refused requests."""
    dummy_batches: int | None
    """Number of batches run only because another rank had work. With ranks in lock-step: between the first
    and the last common step of a wave in which any rank computed; otherwise all that the steps report. None:
    not recorded."""
    dummy_ms: float | None
    """Time of the dummy batches."""
    kv_used_frac: float | None = None
    """Mean share of the KV blocks in use after a step, over all engines' steps; None if not recorded."""
    stalled_ms: float | None = None
    """Time that the engine, while it only decoded, waited for prefills of other ranks in lock-step; for all
    ranks, the sum. None if not in lock-step, or not known."""


class Statistics(msgspec.Struct, kw_only=True):
    """All figures of a run without its warm-up."""

    latency: list[ClassLatency]
    """Latencies of all requests; then by priority and by adapter, if there are several."""
    prefix_cache: PrefixCacheUse | None
    """Use of the prefix cache; None if there is no prefix caching, or its use is not recorded."""
    drafts: DraftUse | None
    """Use of drafts; None if there is no speculative decoding, or its drafts are not recorded."""
    outcomes: Outcomes | None
    """Numbers of requests by the way in which they ended; None if not recorded."""
    durations: Durations
    """Durations of steps, and times between tokens."""
    engines: list[EngineFigures]
    """Figures of each engine; with several engines, the last entry covers all of them."""
