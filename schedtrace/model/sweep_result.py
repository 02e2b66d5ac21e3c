"""Document of ``sweep``, and the lines of ``sweep.jsonl`` from which it resumes; ``docs/sweep.md``."""

from typing import Any, Literal

import msgspec

from schedtrace.model.message import Message
from schedtrace.model.statistics import Percentiles

SWEEP_SCHEMA_VERSION = 2
Latency = Literal["ttft", "tpot", "e2e"]
"""Latency of a request: time to first token, time per output token after it, and end-to-end latency."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A bound of a service level objective: a latency's limit at a percentile of the requests."""

    latency: Latency
    """Bounded latency."""
    percentile: float
    """Percentile, 0 to 100."""
    limit_ms: float
    """Limit in milliseconds."""

    @property
    def name(self) -> str:
        """Name of the bound on the command line: ``ttft_p99``."""
        return f"{self.latency}_p{self.percentile:g}"


class ReplayOutcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A configuration, replayed: a line of ``sweep.jsonl``."""

    key: str
    """Digest of load, engine, changes, step times and versions: the same key would have the same outcome."""
    changes: dict[str, Any]
    """Settings that differ from those of the engine that the sweep starts from."""
    refused: str | None = None
    """Reason why figures are absent; None if they are present."""
    requests: int = 0
    """Requests of the load."""
    too_long: int = 0
    """Requests that vLLM's front end rejects because their prompt fills ``max_model_len``."""
    steps: int = 0
    """``schedule()`` calls."""
    preemptions: int | None = None
    """Preemptions in ``schedule()``; None if not recorded."""
    extrapolated_steps: int | None = None
    """Steps outside the range that the step times were fitted to; None if they were not fitted."""
    fitted_max_model_len: int | None = None
    """Tokens that the KV cache holds, if this decided ``max_model_len``; otherwise None."""
    duration_s: float = 0.0
    """Time from first arrival to last token, summed over trials."""
    counted_s: float | None = None
    """Part of that time with requests, over which throughput is computed if a server's load is replayed; null
    for all of it.
    """
    output_tokens: int = 0
    """Output tokens of finished requests."""
    ttft_ms: list[float] = []
    """Time to first token of each finished request."""
    tpot_ms: list[float | None] = []
    """Time per output token of each finished request; null for a request with a single output token."""
    e2e_ms: list[float] = []
    """End-to-end latency of each finished request."""


class SweepRow(msgspec.Struct, kw_only=True):
    """A configuration and the load's figures under it."""

    settings: dict[str, Any]
    """Every setting that was varied or set; null: vLLM's default, which the trace does not name."""
    recorded: bool
    """Whether this is the recorded configuration."""
    refused: str | None
    """Reason why figures are absent; null if they are present."""
    requests: int
    """Requests of the load."""
    finished: int
    """Requests that ended by themselves."""
    too_long: int
    """Requests that vLLM's front end rejects because their prompt fills ``max_model_len``."""
    steps: int
    """``schedule()`` calls."""
    preemptions: int | None
    """Preemptions in ``schedule()``; null if not recorded."""
    extrapolated_frac: float | None
    """Share of the steps outside the range that the step times were fitted to; null: not fitted."""
    output_tokens_per_s: float | None
    """Output tokens over the time from first arrival to last token, summed over trials; for a server's load
    only time with requests counts. Null: no request finished."""
    requests_per_s: float | None
    """Finished requests over the same time."""
    ttft_ms: Percentiles | None
    """Time to first token; null if no request finished."""
    tpot_ms: Percentiles | None
    """Time per output token after the first; null if no request had two."""
    e2e_ms: Percentiles | None
    """Time from arrival to last token."""
    bounds_ms: list[float | None]
    """Values of the latencies that ``slo`` bounds, in its order."""
    meets_slo: bool | None
    """Whether every bound holds; null without bounds or figures."""
    goodput_requests_per_s: float | None
    """Requests per second that meet every bound, from the first arrival to the last token; null without
    bounds or figures.
    """
    pareto: bool
    """Whether no other configuration is better in one of ``objectives`` and at least as good in the
    others."""


class Sweep(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace sweep``."""

    schema_version: int = SWEEP_SCHEMA_VERSION
    """Version of this format; 2."""
    label: str
    """Label of the run or the workload."""
    requests: int
    """Requests of all trials."""
    prompt_tokens: int
    """Prompt tokens of all trials."""
    output_tokens: int
    """Output tokens asked for, or recorded."""
    loads: int
    """Trials, replayed in sequence."""
    step_times: str
    """Source of the step times, as a sentence."""
    vllm_version: str
    """Release of vLLM whose scheduler decided."""
    slo: list[Bound]
    """Bounds as given on the command line."""
    objectives: list[str]
    """Dimensions of the Pareto front: ``output_tokens_per_s``, and latencies such as ``ttft_p99``."""
    rows: list[SweepRow]
    """Configurations by throughput, the highest first; refused ones last."""
    notes: list[Message]
    """Notes on facts missing in the load, and the assumptions in their place."""
