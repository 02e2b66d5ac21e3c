"""A load under other settings: the document of ``replay``, ``sweep``, ``advise`` and ``analyze --predict``.

``docs/what-if.md`` describes its JSON form, ``docs/sweep.md`` the lines of ``sweep.jsonl``.
"""

from enum import StrEnum
from typing import Any, Literal

import msgspec

from schedtrace.model.message import Message
from schedtrace.model.numbers import number

WHAT_IF_SCHEMA_VERSION = 3


class Objective(StrEnum):
    """Objective by which advice is chosen."""

    LATENCY = "latency"
    """Mean end-to-end latency."""
    MAKESPAN = "makespan"
    """Time until all requests are done."""
    THROUGHPUT = "throughput"
    """Output tokens per second."""


CONCURRENCY = "max_concurrency"
"""Setting for the number of clients in a closed loop, each with one open request; the name is that of vLLM's
benchmark client."""
OF_RANKS: dict[str, tuple[Any, ...]] = {
    "router": ("vllm", "round-robin", "least-running", "least-tokens"),
    "balance_ranks": (True, False),
}
"""Settings of data-parallel ranks that a replay accepts besides vLLM's own, with their values."""


Latency = Literal["ttft", "tpot", "e2e"]
"""Kind of latency: time to first token, time per output token after it, and end-to-end latency."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """Bound of a service level objective: the limit of a latency at a percentile of the requests."""

    latency: Latency
    """Latency to which the bound applies."""
    percentile: float
    """Percentile, 0 to 100."""
    limit_ms: float
    """Limit in milliseconds."""

    @property
    def name(self) -> str:
        """Name of the bound on the command line: ``ttft_p99``."""
        return f"{self.latency}_p{self.percentile:g}"


class LoadPart(msgspec.Struct, kw_only=True):
    """Part of a recorded load, replayed alone because the whole load would take too long."""

    requests: int
    """Number of requests that are replayed."""
    whole_requests: int
    """Number of requests in the whole load."""
    begin_s: float
    """Seconds into the recording at which the first replayed request arrived."""
    end_s: float
    """Seconds into the recording at which the part ends; most of its requests had been answered by then."""

    @property
    def words(self) -> str:
        """Phrase about the part, for use within a sentence."""
        seconds = f"{number(self.begin_s)} to {number(self.end_s)} s"
        return f"{self.requests:,} of this load's {self.whole_requests:,} requests ({seconds})"


class ReplayedLoad(msgspec.Struct, kw_only=True):
    """Load that every configuration gets."""

    label: str
    """Label of the run, or name of the workload."""
    path: str | None
    """Run folder; null: the load is not recorded."""
    recorded_version: str | None
    """Release of vLLM that was recorded; null: the load was simulated with ``--model`` and ``--gpu``."""
    trials: int
    """Number of trials, which are replayed in sequence."""
    requests: int
    """Number of requests in all trials."""
    prompt_tokens: int
    """Number of prompt tokens in all trials."""
    output_tokens: int
    """Number of output tokens, as requested or as recorded."""
    by_arrival: bool
    """Whether requests arrive while others run, so that decisions depend on the step times, too."""
    part: LoadPart | None = None
    """Part of the recorded load that is replayed; null: the whole load."""


class Baseline(msgspec.Struct, kw_only=True):
    """Comparison of the recording with its replay, whose figures are in the ``recorded`` configuration."""

    judged_by: str | None = None
    """Figure by which the replay is judged against the recording; null: not judged, as with step times from
    another source."""
    misfit_frac: float | None = None
    """Difference in the figure of ``judged_by``: 0.03 is 3 % more in the replay than recorded."""
    part: LoadPart | None = None
    """Part of the load by which the replay was judged; null: the whole load."""
    same_steps: int | None = None
    """Number of replayed steps with the same requests and tokens as recorded; null: not compared."""
    compared_steps: int | None = None
    """Number of steps that were compared."""


class Figure(msgspec.Struct, kw_only=True):
    """Figure of the load under a configuration."""

    name: str
    """Name of the figure, as in ``diff``."""
    unit: str
    """Unit; empty for a count."""
    higher_is_better: bool | None
    """Direction of improvement; null: neither direction is better."""
    decided: bool
    """Whether the figure depends on scheduling alone; otherwise it also depends on the step times."""
    value: float | None
    """Mean over the trials; for ``sweep``, over the requests of all trials together."""
    before: float | None = None
    """Value for the recorded configuration; for that configuration itself, the value in the recording."""
    change_frac: float | None = None
    """Relative change from ``before`` to ``value``."""
    low_frac: float | None = None
    """Lower end of the 90 % interval of ``change_frac``; null if the trace gives no basis for an interval."""
    high_frac: float | None = None
    """Upper end of the 90 % interval of ``change_frac``; null as for ``low_frac``."""


class Configuration(msgspec.Struct, kw_only=True):
    """Settings under which the load was replayed, and the outcome."""

    changes: dict[str, Any]
    """Settings that differ from the document's ``settings``, with their values."""
    recorded: bool = False
    """Whether this is the recorded configuration."""
    refused: str | None = None
    """Reason why figures are absent; null if they are present."""
    kv_blocks: int | None = None
    """Number of blocks in the KV cache."""
    figures: list[Figure] = []
    """Figures of the load; for ``advise``, only the proposals and the recorded configuration have them."""
    finished: int | None = None
    """Number of requests that finished without being aborted."""
    too_long: int | None = None
    """Number of requests that vLLM's front end rejects because their prompt fills ``max_model_len``."""
    steps: int | None = None
    """Number of ``schedule()`` calls in all trials."""
    preemptions: int | None = None
    """Number of preemptions in ``schedule()`` in all trials; null: not recorded."""
    extrapolated_frac: float | None = None
    """Share of the steps that lie outside the range to which the step times were fitted; null: not fitted."""
    bounds_ms: list[float | None] = []
    """Values of the latencies that ``slo`` bounds, in the order of ``slo``, over the requests of all trials.
    """
    meets_slo: bool | None = None
    """Whether every bound holds; null without bounds or figures."""
    goodput_requests_per_s: float | None = None
    """Requests per second that meet every bound, from the first arrival to the last token; null without
    bounds or figures.
    """
    pareto: bool | None = None
    """Whether no other configuration is better in one of ``objectives`` and at least as good in the others;
    null: not compared, as for all commands but ``sweep``."""
    place: int | None = None
    """Place among the advised configurations, where 1 is the best; null: not advised."""
    removed: list[str] | None = None
    """Codes of root causes that the replay of the recorded configuration has and this one lacks; null: not
    compared."""
    appeared: list[str] | None = None
    """Codes of root causes that this replay has and that of the recorded configuration lacks; null: not
    compared."""
    folder: str | None = None
    """Run folder of the replay, if it was kept."""

    def figure(self, name: str) -> Figure | None:
        """Return the figure with this name; None if the load has none."""
        return next((figure for figure in self.figures if figure.name == name), None)


class Replays(msgspec.Struct, kw_only=True):
    """Document of ``replay``, ``sweep`` and ``advise``: a load, replayed under several configurations."""

    schema_version: int = WHAT_IF_SCHEMA_VERSION
    """Version of this format; 3."""
    load: ReplayedLoad
    """Load that every configuration gets."""
    vllm_version: str
    """Release of vLLM whose scheduler was used."""
    step_times: str
    """Source of the step times, as a sentence."""
    settings: dict[str, Any]
    """Every setting that a configuration varies or sets, with its value before any change; null: vLLM's
    default, which the trace does not name."""
    baseline: Baseline | None = None
    """Replay of the recorded configuration, compared with the recording; null: none was recorded."""
    objective: str | None = None
    """Figure that ``analyze --predict`` improves; null for other commands."""
    no_advice: str | None = None
    """Reason why ``analyze --predict`` recommends no configuration; null: it recommends one, or this is
    another command's document."""
    slo: list[Bound] = []
    """Bounds as given on the command line."""
    objectives: list[str] = []
    """Dimensions of the Pareto front: ``output_tokens_per_s``, and latencies such as ``ttft_p99``."""
    configurations: list[Configuration]
    """Configurations: for ``sweep``, by throughput, the highest first and refused ones last; otherwise the
    recorded one first."""
    commands: list[str] = []
    """Commands that try the first proposal of ``advise`` on the real machine: a run and a comparison."""
    notes: list[Message] = []
    """Notes on facts that the load lacks, and on the assumptions made instead."""

    @property
    def recorded_configuration(self) -> Configuration | None:
        """Recorded configuration, as replayed; None if nothing was recorded."""
        return next((configuration for configuration in self.configurations if configuration.recorded), None)


class ReplayOutcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Result of replaying one configuration: a line of ``sweep.jsonl``."""

    key: str
    """Digest of load, engine, changes, step times and versions: configurations with the same key have the
    same outcome."""
    changes: dict[str, Any]
    """Settings that differ from those of the engine with which the sweep starts."""
    refused: str | None = None
    """Reason why figures are absent; None if they are present."""
    requests: int = 0
    """Number of requests in the load."""
    too_long: int = 0
    """Number of requests that vLLM's front end rejects because their prompt fills ``max_model_len``."""
    steps: int = 0
    """Number of ``schedule()`` calls."""
    preemptions: int | None = None
    """Number of preemptions in ``schedule()``; None if not recorded."""
    extrapolated_steps: int | None = None
    """Number of steps that lie outside the range to which the step times were fitted; None if the step times
    were not fitted."""
    kv_blocks: int | None = None
    """Number of blocks in the KV cache; None if an older release did not note it, or the configuration was
    refused."""
    fitted_max_model_len: int | None = None
    """Tokens that the KV cache holds, if they determined ``max_model_len``; otherwise None."""
    duration_s: float = 0.0
    """Time from first arrival to last token, summed over trials."""
    counted_s: float | None = None
    """Part of ``duration_s`` in which requests were present; a server's throughput is computed over it. Null
    for all of it."""
    output_tokens: int = 0
    """Output tokens of finished requests."""
    ttft_ms: list[float] = []
    """Time to first token of each finished request."""
    tpot_ms: list[float | None] = []
    """Time per output token of each finished request; null for a request with a single output token."""
    e2e_ms: list[float] = []
    """End-to-end latency of each finished request."""


def as_options(changes: dict[str, Any]) -> list[str]:
    """Return settings in the form of vLLM's command line: ``--max-num-seqs 64``, ``--no-async-scheduling``.

    A setting without a value is left out.
    """
    options: list[str] = []
    for name, value in changes.items():
        if name == "balance_ranks":
            options += ["--scheduler-cls", "schedtrace.balance.BalanceScheduler"] if value else []
            continue
        if value is None:  # vLLM's default, such as no speculation
            continue
        option = name.replace("_", "-")
        options += (
            [f"--{option}" if value else f"--no-{option}"]
            if isinstance(value, bool)
            else [f"--{option}", str(value)]
        )
    return options
