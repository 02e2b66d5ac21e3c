"""What ``sweep`` finds out, and the lines of ``sweep.jsonl`` that it goes on from; ``docs/sweep.md``."""

from typing import Any, Literal

import msgspec

from schedtrace.model.message import Message
from schedtrace.model.statistics import Percentiles

SWEEP_SCHEMA_VERSION = 2
Latency = Literal["ttft", "tpot", "e2e"]
"""Of a request: time to its first token, per output token after that, and from arrival to its last token."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """One bound of a service level objective: so long at most, for this percentile of the requests."""

    latency: Latency
    """What is bounded."""
    percentile: float
    """0 to 100."""
    limit_ms: float
    """The most that it may be."""

    @property
    def name(self) -> str:
        """As it is typed: ``ttft_p99``."""
        return f"{self.latency}_p{self.percentile:g}"


class Outcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One configuration, replayed: a line of ``sweep.jsonl``."""

    key: str
    """Digest of load, engine, changes, step times and versions: the same key would have the same outcome."""
    changes: dict[str, Any]
    """Settings that differ from those of the engine that the sweep starts from."""
    refused: str | None = None
    """Why there are no figures; None: there are."""
    requests: int = 0
    """Of the load."""
    too_long: int = 0
    """Requests that vLLM's front end refuses, since their prompt fills ``max_model_len``."""
    steps: int = 0
    """``schedule()`` calls."""
    preemptions: int | None = None
    """In ``schedule()``; None: not recorded."""
    extrapolated_steps: int | None = None
    """Steps outside the range that the step times were fitted to; None: they were not fitted."""
    fitted_max_model_len: int | None = None
    """Tokens that the KV cache holds, where that decided ``max_model_len``; None: it did not."""
    duration_s: float = 0.0
    """From the first arrival to the last token, summed over trials."""
    counted_s: float | None = None
    """The time of it with requests, which throughput is over where a server's load is replayed; null: all."""
    output_tokens: int = 0
    """Of finished requests."""
    ttft_ms: list[float] = []
    """Of each finished request."""
    tpot_ms: list[float | None] = []
    """Likewise; null for a request with one output token."""
    e2e_ms: list[float] = []
    """Likewise."""


class SweepRow(msgspec.Struct, kw_only=True):
    """One configuration and what the load would do under it."""

    settings: dict[str, Any]
    """Every setting that was varied or set; null: vLLM's default, which the trace does not name."""
    recorded: bool
    """The configuration that was recorded."""
    refused: str | None
    """Why there are no figures; null: there are."""
    requests: int
    """Of the load."""
    finished: int
    """Requests that ended by themselves."""
    too_long: int
    """Requests that vLLM's front end refuses, since their prompt fills ``max_model_len``."""
    steps: int
    """``schedule()`` calls."""
    preemptions: int | None
    """In ``schedule()``; null: not recorded."""
    extrapolated_frac: float | None
    """Share of the steps outside the range that the step times were fitted to; null: not fitted."""
    output_tokens_per_s: float | None
    """From the first arrival to the last token, summed over trials; of a server's load over the time of it in
    which there were requests. Null: no request finished."""
    requests_per_s: float | None
    """Finished requests over the same time."""
    ttft_ms: Percentiles | None
    """Time to first token; null: no request finished."""
    tpot_ms: Percentiles | None
    """Time per output token after the first; null: no request had two."""
    e2e_ms: Percentiles | None
    """From arrival to the last token."""
    bounds_ms: list[float | None]
    """What ``slo`` bounds, in its order."""
    meets_slo: bool | None
    """Whether every bound holds; null without bounds or figures."""
    goodput_requests_per_s: float | None
    """Requests a second that meet every bound themselves, from the first arrival to the last token; null
    without bounds or figures."""
    pareto: bool
    """No other configuration is better in one of ``objectives`` and at least as good in the others."""


class Sweep(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace sweep``."""

    schema_version: int = SWEEP_SCHEMA_VERSION
    """Version of this format; 2."""
    label: str
    """Of the run or the workload."""
    requests: int
    """Of all trials, like the tokens."""
    prompt_tokens: int
    """Prompts added up."""
    output_tokens: int
    """Asked for, or recorded."""
    loads: int
    """Trials, which are replayed one after the other."""
    step_times: str
    """Where step times come from, in a sentence."""
    vllm_version: str
    """Whose scheduler decided."""
    slo: list[Bound]
    """As given."""
    objectives: list[str]
    """What the Pareto front is about: ``output_tokens_per_s``, and latencies as ``ttft_p99``."""
    rows: list[SweepRow]
    """By throughput, the highest first; refused ones last."""
    notes: list[Message]
    """What the load does not say, and what was assumed."""
