"""Statements of ``schedtrace analyze`` about records with less data than a trace: vLLM's log and metrics.

Such a record contains snapshots and totals but no steps. Each statement therefore gives its own certainty
and the number of snapshots behind it; none contains shares of time or gains. A fact that the record lacks is
null.
"""

from typing import Literal

import msgspec

from schedtrace.model.message import NOTHING, Message

RECORDS_SCHEMA_VERSION = 1

Certainty = Literal["recorded", "likely", "possible"]
"""``recorded``: the record itself contains the statement. ``likely``: nothing in the record contradicts it.
``possible``: other causes would look the same."""


class Range(msgspec.Struct, frozen=True):
    """Smallest and largest of several values."""

    low: float
    """Smallest of the values."""
    high: float
    """Largest of the values."""


class ServerStart(msgspec.Struct, kw_only=True):
    """Facts that a server printed when it started, or exports with its metrics."""

    vllm_version: str | None = None
    """Release of vLLM."""
    model: str | None = None
    """Name of the model."""
    arguments: dict[str, str] = {}
    """Arguments that differ from vLLM's defaults, as printed, with secrets hidden."""
    max_num_seqs: int | None = None
    """Limit on running requests; null if it is vLLM's default, which only a debug log shows."""
    token_budget: int | None = None
    """``max_num_batched_tokens``."""
    max_model_len: int | None = None
    """Maximum number of tokens of a request."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache in tokens."""
    kv_blocks: int | None = None
    """Number of KV blocks."""
    max_concurrency: float | None = None
    """Number of requests of ``max_model_len`` tokens that fit into the KV cache."""


class ConsoleSnapshots(msgspec.Struct, kw_only=True):
    """Summary of the periodic lines of one engine."""

    engine_rank: int | None
    """Rank of the engine; null: each line is an aggregate over all engines."""
    engines: int = 1
    """Number of engines that each line aggregates."""
    snapshots: int
    """Number of lines."""
    span_s: float | None = None
    """Time from the first line to the last; null: the lines have no times."""
    running: Range
    """Number of running requests."""
    waiting: Range
    """Number of waiting requests, including deferred ones."""
    deferred: Range | None = None
    """Number of waiting requests that more capacity would not help; null: no line reports them."""
    kv_cache_usage_frac: Range | None = None
    """Lowest and highest KV cache usage in the lines."""
    prompt_tokens_per_s: Range
    """Prompt tokens per second. vLLM counts a prompt when its last token is computed."""
    generation_tokens_per_s: Range
    """Output tokens per second."""
    prefix_cache_hit_frac: float | None = None
    """Share of prompt tokens found in the prefix cache, from the last line, which covers the latest 1,000
    requests.
    """
    external_hit_frac: float | None = None
    """Hit rate of an external KV cache."""
    preemptions: int | None = None
    """Sum of the preemptions that the lines report; null: no line reports any, which does not prove that
    there were none.
    """
    acceptance_frac: Range | None = None
    """Share of draft tokens that were accepted."""


class DumpedRequest(msgspec.Struct, kw_only=True):
    """Request of a dumped step."""

    request_id: str
    """Id of the request."""
    scheduled_tokens: int
    """Tokens that the step computes for the request."""
    computed_tokens: int | None
    """Tokens computed before the step."""
    prompt_tokens: int | None
    """Length of the prompt; null if the request is not new, because the dump omits it."""
    draft_tokens: int
    """Draft tokens among those scheduled."""
    is_new: bool
    """Whether the request is scheduled for the first time."""
    is_resumed: bool
    """Whether the request had been preempted and continues in this step."""


class DumpedStep(msgspec.Struct, kw_only=True):
    """The step that vLLM dumped when it failed: its ``SchedulerOutput`` and ``SchedulerStats``."""

    scheduled_tokens: int | None = None
    """Tokens of the step; null: the log has only the step's statistics, or a part of the dump."""
    requests: list[DumpedRequest] = []
    """Requests of the step; empty if their tokens do not add up to ``scheduled_tokens``."""
    preempted_requests: list[str] | None = None
    """Requests that the step preempted; null: this release does not dump them."""
    running: int | None = None
    """Number of running requests."""
    waiting: int | None = None
    """Number of waiting requests."""
    kv_cache_usage_frac: float | None = None
    """KV cache usage when vLLM dumped the step."""


class Failure(msgspec.Struct, kw_only=True):
    """End of a server, or failure of its start."""

    stage: Literal["start", "serving"]
    """Whether the server failed while it started or while it served."""
    reason: str
    """Error that caused the failure, with secrets hidden; without one, the most specific text in the log."""
    line: int
    """Number of the line with this error; without one, of the line that announces the failure."""
    worker_died: str | None = None
    """Worker process that died, according to the log; null: the log reports none."""


class MetricsWindow(msgspec.Struct, kw_only=True):
    """Requests and tokens of one engine since its start, or between two dumps."""

    finished_requests: int | None = None
    """Number of requests that finished."""
    preemptions: int | None = None
    """Number of preemptions."""
    prompt_tokens: int | None = None
    """Number of prompt tokens, whether computed or cached."""
    generation_tokens: int | None = None
    """Number of output tokens."""
    ttft_mean_ms: float | None = None
    """Mean time to first token."""
    tpot_mean_ms: float | None = None
    """Mean time per output token after the first."""
    e2e_mean_ms: float | None = None
    """Mean end-to-end latency of finished requests."""
    queue_mean_ms: float | None = None
    """Mean time that finished requests waited before they were first scheduled."""
    queue_frac: float | None = None
    """Time in the queue as a share of the finished requests' end-to-end latencies, both summed by vLLM."""
    prefill_mean_ms: float | None = None
    """Mean time from the first scheduling to the first token."""
    decode_mean_ms: float | None = None
    """Mean time from the first token to the last."""
    prefix_cache_hit_frac: float | None = None
    """Share of prompt tokens found in the prefix cache."""
    tokens_per_step: float | None = None
    """Mean number of tokens in a step that computed any."""
    window_s: float | None = None
    """Length of the window; null: it begins with the engine, or lies between files, which have no times."""


class EngineMetrics(msgspec.Struct, kw_only=True):
    """Metrics of one engine of one model."""

    engine: str
    """Value of the label ``engine``, followed by the labels that identify the server, if any."""
    model: str | None
    """Value of the label ``model_name``."""
    running: int | None = None
    """Number of running requests at the latest dump."""
    waiting: int | None = None
    """Number of waiting requests at the latest dump, including deferred ones."""
    waiting_for_capacity: int | None = None
    """Number of waiting requests that need capacity; null: older releases do not export it."""
    kv_cache_usage_frac: float | None = None
    """KV cache usage at the latest dump."""
    totals: MetricsWindow
    """Counts and means since the engine's start."""
    window: MetricsWindow | None = None
    """Counts and means between two dumps; null: there is only one dump, or the server restarted in between.
    """


class ClientLatency(msgspec.Struct, kw_only=True):
    """Latency as a benchmark's client measured it."""

    metric: Literal["ttft", "tpot", "e2e"]
    """Kind of latency: time to first token, time per output token after it, or end-to-end latency."""
    mean_ms: float | None = None
    """Mean of the latency."""
    p50_ms: float | None = None
    """Median of the latency."""
    p99_ms: float | None = None
    """99th percentile of the latency."""
    engine_p50_ms: float | None = None
    """Median of the same latency in the engine's trace, for text and Markdown; null in JSON, because
    ``--format json`` accepts no trace beside a benchmark's result.
    """
    engine_p99_ms: float | None = None
    """99th percentile in the engine's trace; null in JSON for the same reason."""


class Statement(msgspec.Struct, kw_only=True):
    """Statement that a record supports."""

    code: str
    """Name of the kind of statement."""
    certainty: Certainty
    """Certainty of the statement."""
    at: int | None = None
    """Number of snapshots that support it; null: the statement does not rest on snapshots."""
    snapshots: int | None = None
    """Number of snapshots that could have supported it."""
    engine_rank: int | None = None
    """Engine that the statement is about; null: all engines, or the only one."""
    text: Message
    """Text of the statement, with its evidence."""
    advice: Message = NOTHING
    """Action that the statement suggests."""


class WeakRecord(msgspec.Struct, kw_only=True):
    """Record with less data than a trace, and every statement that it supports."""

    path: str
    """File, ``-`` for standard input, or address of a server."""
    kind: str
    """Kind of record: ``vLLM's console log``, ``vLLM's metrics`` or ``a result of`` a benchmark program."""
    source: str | None = None
    """Container, pod or front end's process that wrote the lines; null: the file has a single source."""
    server: ServerStart | None = None
    """Facts about the server; null: the record has none."""
    engines: list[ConsoleSnapshots] = []
    """Periodic lines of a console log, one entry per engine."""
    step: DumpedStep | None = None
    """Dumped step; null: the record contains none."""
    failure: Failure | None = None
    """Failure of the server; null: the record shows none."""
    metrics: list[EngineMetrics] = []
    """Metrics, with one entry per engine."""
    requests: int | None = None
    """Number of requests that a benchmark's client counted as finished; null: not a benchmark's result."""
    latencies: list[ClientLatency] = []
    """Latencies that a benchmark's client measured."""
    statements: list[Statement] = []
    """Statements that the record supports, with the most useful first."""
    cannot_tell: Message
    """Facts that a record of this kind never shows."""
    commands: list[str]
    """Commands that would show the missing facts."""
    notices: list[Message] = []
    """Caveats about the file."""


class Records(msgspec.Struct, kw_only=True):
    """Document that ``analyze`` prints for records with less data than a trace."""

    schema_version: int = RECORDS_SCHEMA_VERSION
    """Version of this format; 1."""
    records: list[WeakRecord]
    """The records, in the order of the command line."""
