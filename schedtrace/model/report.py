"""Report of ``analyze``; ``docs/report-format.md`` describes its JSON form."""

from enum import IntEnum
from typing import Any, Literal

import msgspec

from schedtrace.model.message import NOTHING, Message
from schedtrace.model.statistics import Percentiles, Statistics
from schedtrace.model.what_if import Replays

Origin = Literal["given", "default", "derived", "overridden", "reduced", "unknown"]
"""``given``: set by the user. ``default``: vLLM's default, which for some settings depends on the usage
context. ``derived``: vLLM chose it for this model, platform or other settings. ``overridden``: the user set
another value. ``reduced``: lowered by the share that speculative decoding takes. ``unknown``: no front end
recorded what the user set."""

SettingValue = bool | int | float | str | list[int]


class EffectiveSetting(msgspec.Struct, kw_only=True):
    """Setting that affects scheduling, with the value that the engine used."""

    name: str
    """vLLM's name of the engine argument, or of the configuration field if there is no such argument."""
    value: SettingValue
    """Value as the scheduler uses it."""
    origin: Origin
    context: str | None = None
    """Usage context of this run, if vLLM's default depends on it and the user set no value."""
    given: SettingValue | None = None
    """Value that the user set, if a different value is in effect (``overridden``)."""
    inert: bool = False
    """Whether the user set the value although it has no effect in this release or configuration."""
    explanation: Message = NOTHING
    """Phrases about the origin of the value, about why the value has no effect (if it has none), and about
    how close this run came to the limit."""


REPORT_SCHEMA_VERSION = 5


class Severity(IntEnum):
    """Importance of a finding; ``--fail-on`` compares by this order."""

    INFO = 1
    WARNING = 2
    CRITICAL = 3


class Evidence(msgspec.Struct, kw_only=True):
    """Figures behind a finding; each rule has its own struct."""


class Advice(msgspec.Struct, kw_only=True):
    """Action to take about a finding."""

    message: Message
    """Text of the advice: the setting with its present value, or another action."""
    setting: str | None = None
    """Field of vLLM's ``EngineArgs``; None if the advice is not a setting."""
    value: int | float | bool | str | None = None
    """Proposed value, which vLLM accepts in this configuration; None if no particular value is proposed."""
    costs: Message = NOTHING
    """Sentence about what the advice costs elsewhere."""
    proven: bool = False
    """Whether a contract test runs vLLM's scheduler with this advice and verifies that the wait becomes
    shorter."""
    tested: Message = NOTHING
    """Result of the advice in a replay of this load (``analyze --predict``)."""


class Gain(msgspec.Struct, kw_only=True):
    """Gain that a finding's first piece of advice would bring on this load, estimated from the trace."""

    metric: str
    """``output_tokens_per_s``, ``ttft_p50_ms`` or another figure of the report."""
    change_frac: float
    """Relative change of the metric: 0.86 is 86 % more."""
    low_frac: float | None = None
    high_frac: float | None = None
    """Interval of the change, from ``low_frac`` to ``high_frac``; None if not known."""
    before: float | None = None
    after: float | None = None
    """Value of the metric with the advice, in the metric's unit; ``before``: without the advice."""
    saved_frac: float
    """Share of the requests' time on all engines that the advice saves; findings are ranked by it."""
    method: str
    """Method of the estimate: ``step_time`` (bounds from the model of step times) or ``replay`` (the load was
    replayed with the advice)."""


class Finding(msgspec.Struct, kw_only=True):
    """Finding about a run: a root cause, or a symptom of one."""

    code: str
    """Name of the finding's page in ``docs/findings/``."""
    severity: str
    """``info``, ``warning`` or ``critical``: by gain, or by share if no gain can be estimated."""
    title: Message = NOTHING
    """Title of a few words; empty for a symptom."""
    verdict: Message = NOTHING
    """First sentence about the run if this finding leads: what limited the run, and by how much."""
    share_frac: float | None = None
    """Share of the requests' time on all engines that the finding explains; None if the finding is not about
    the requests' time."""
    holder: Message = NOTHING
    """Sentence about the holder of the resource or, for some findings, about the circumstances; empty if
    there is none."""
    gain: Gain | None = None
    """Estimated gain; None if the trace allows no estimate."""
    leads: bool = False
    """Whether the finding comes before all findings that are ranked by gain, because requests can never run
    or make no progress."""
    cause: str | None
    """A word of ``docs/causes.md``; None if the finding is not about an exit."""
    via: str
    """Source of the cause: ``recorded`` for a fact; for an exit, ``source`` or ``inferred``."""
    location: str | None = None
    """``file:line`` of the exit in the installed vLLM, if all counted exits were taken at one place."""
    engine_rank: int
    """Data-parallel rank to which the listed steps and all figures except shares belong."""
    engine_ranks: list[int] = []
    """All ranks that show the finding."""
    of_ranks: bool = False
    """Whether the finding and its figures are about all ranks together."""
    count: int
    """Number of steps that show the finding (for ``preemption``: of preemptions)."""
    trials: list[int]
    """Trials that show the finding; empty for a trace without trials."""
    steps: list[int]
    """Numbers of the steps that show the finding, at most the first ``MAX_STEPS``."""
    tokens: int
    """Number of tokens, as defined on the finding's page."""
    message: Message
    """Sentence with the evidence in figures."""
    advice: list[Advice] = []
    """Pieces of advice, the best first; empty for a symptom, because its root cause has the advice."""
    refuted: list[Message] = []
    """Withdrawn advice: it did not help in a replay of this load, or vLLM overrode it."""
    evidence: Evidence
    example: Message | None = None
    """Sentence about one case: the longest, the largest or the first."""
    cost_ms: float | None = None
    """Estimated cost in time; None if the trace allows no estimate, or the cost is within the model's error.
    """
    cost_frac: float | None = None
    """``cost_ms`` as a share of ``cost_of``."""
    cost_of: str = "busy time"
    """``busy time`` (the engine's time without idle time) or ``run`` (from its first step to its last)."""
    tail: Message = NOTHING
    """Comparison of the latency of slowed requests with that of others; empty below a factor of three.

    If there is a tail, the finding is on the first screen, however small its share.
    """
    cost_error_frac: float | None = None
    """Typical relative error of the step-time model behind the estimate; None if no model is used."""
    symptoms: "list[Finding]" = []
    """Effects of this root cause."""

    @property
    def is_root(self) -> bool:
        """Whether the finding is a root cause: only root causes have a title."""
        return bool(self.title)

    @property
    def weight(self) -> float:
        """Weight for ranking: the share of the requests' time that the advice saves or the finding explains.

        Without an estimated gain, a finding that lengthens the run has its share of the run as its weight, if
        that is larger: a tail costs little of the requests' time.
        """
        if self.gain:
            return self.gain.saved_frac
        of_run = self.cost_frac if self.cost_of == "run" else None
        return max(self.share_frac or 0.0, of_run or 0.0)

    @property
    def place(self) -> tuple[bool, bool, float]:
        """Sort key of findings: root causes before symptoms, leading findings first, then by weight."""
        return not self.is_root, not self.leads, -self.weight


MAX_STEPS = 100
"""Maximum number of step numbers that a finding lists."""


class TrialReport(msgspec.Struct, kw_only=True):
    """Report of one trial on one engine, or of the whole of a trace without trials."""

    trial: int | None
    engine_rank: int
    complete: bool
    """Whether the trial is complete; false if the run ended during it."""
    steps: int
    """Number of ``schedule()`` calls, including those without tokens."""
    duration_s: float | None
    """Time from the start of the first step to the last output."""
    first_step_requests: int | None
    first_step_tokens: int | None
    """Number of tokens in the first step that scheduled anything; ``first_step_requests``: number of its
    requests."""
    new_per_step: list[int] | None
    """Number of new requests in each step that scheduled any, in order; None if not recorded."""
    budget_use_frac: float | None
    """Mean share of the token budget used, over steps that scheduled anything."""
    budget_use_waiting_frac: float | None
    """Mean share of the token budget used, over steps after which requests still waited; None if there were
    no such steps."""
    preemptions: int | None
    """Number of preemptions; None if they cannot be recorded for this scheduler."""
    requests_finished: int | None
    requests_aborted: int | None
    """Number of requests that did not finish normally: aborted, ignored, or ended with an error."""
    requests_per_s: float | None
    total_tokens_per_s: float | None
    output_tokens_per_s: float | None
    throughput_from: str | None
    """Source of the throughput. ``front_end``: measured by ``schedtrace run``; ``trace``: from the engine's
    times."""
    throughput_over: Literal["trial", "requests"] | None
    """Time over which throughput is computed. ``trial``: all of the trial's time, including idle time;
    ``requests``: the time in which there were requests, used for a server and for a part of a trace."""
    throughput_s: float | None
    """Length of the time of ``throughput_over``. For several engines it is their common time, so that their
    throughputs add up."""
    queue_ms: Percentiles | None = None
    """Time from a request's arrival at the scheduler to the first step that scheduled it, over all scheduled
    requests."""
    ttft_ms: Percentiles | None
    """Time from arrival at the front end to the first token's output in the engine, over all requests with a
    first token, including aborted and unfinished ones.
    """
    tpot_ms: Percentiles | None
    """Time per output token after the first, over finished requests."""
    e2e_ms: Percentiles | None
    """Time from arrival at the front end to the last token's output in the engine, over finished requests."""
    iteration_ms: Percentiles | None = None
    """vLLM's own "iteration elapsed time" of the steps: mostly time spent waiting for the model's result.
    Only vLLM's iteration lines contain it."""
    kv_cache_usage_max_frac: float | None = None
    """Highest KV cache usage in an iteration line (vLLM 0.26 and newer)."""


class StripCell(msgspec.Struct):
    """Column of the strip that shows the use of the budget; all columns cover equal shares of the steps."""

    use_frac: float
    """Highest share of the budget that a step of the column used."""
    waiting_frac: float | None
    """Share of the column's steps after which requests waited; None if not recorded."""


class CauseRow(msgspec.Struct, kw_only=True):
    """Kind of exit, counted over the whole run."""

    loop: str
    kind: str
    cause: str
    """A word of ``docs/causes.md``."""
    detail: str | None
    location: str | None
    """``file:line`` in the installed vLLM; None for inferred exits."""
    via: str
    refusal: bool
    """Whether the exit refused or skipped a request; if not, no request was left, or an asynchronous KV load
    began."""
    exits: int
    """Number of times that the exit was taken."""
    steps: int
    """Number of steps in which the exit was taken."""
    requests: int
    """Number of different requests that the exit concerned, as far as recorded."""
    mean_budget_left: float
    """Mean token budget left when the exit was taken."""


class CapRow(msgspec.Struct, kw_only=True):
    """Limit that made chunks smaller, over the whole run."""

    cap: str
    """A word of ``docs/causes.md``."""
    location: str | None
    chunks: int
    """Number of chunks that the limit made smaller."""
    steps: int
    requests: int
    withheld_tokens: int
    """Total number of tokens that the limit withheld."""
    mean_budget_left: float
    """Mean token budget left after these steps."""


class RequestTime(msgspec.Struct, kw_only=True):
    """Time that one engine's requests spent in one state with one cause."""

    engine_rank: int
    state: str
    """``front_end``, ``waiting``, ``prefill``, ``decode``, ``recompute``, ``preempted``, ``set_aside``,
    ``stalled`` or ``interrupted``."""
    cause: str | None
    """Word of ``docs/causes.md``, or ``next_step`` (no step could see the requests yet); for ``interrupted``,
    the kind of the event. None for states without a cause.
    """
    time_ms: float
    """Total over the requests, in milliseconds."""
    share_frac: float
    """Share of all requests' time; the shares of an engine add up to 1."""
    requests: int
    strip: list[float]
    """Share of the requests' time spent in this state, for each of several equal parts of the run's steps."""


class EngineTime(msgspec.Struct, kw_only=True):
    """Time that one engine spent in one state."""

    engine_rank: int
    state: str
    """``device``, ``schedule``, ``update``, ``dummy``, ``host_gap``, ``idle`` or ``not_recorded``."""
    time_ms: float
    busy_frac: float | None
    """Share of the engine's time without ``idle`` and ``not_recorded``; None for these two states."""


class StepExcess(msgspec.Struct, kw_only=True):
    """Time that an engine's slow steps spent in one part beyond what their work explains."""

    engine_rank: int
    """Data-parallel rank."""
    part: str
    """``execution``, ``schedule`` (``schedule()``), ``update`` (``update_from_output()``) or ``between`` (two
    steps)."""
    steps: int
    """Number of examined steps: all steps, or those in evenly spaced blocks."""
    slow_steps: int
    """Number of examined steps that took far longer than their work explains."""
    excess_ms: float
    """Total excess of the slow steps; if only some blocks of steps were examined, scaled up to all steps."""
    unexplained_frac: float
    """Share of the excess that no feature in this trace explains."""
    model_error_frac: float
    """Typical relative error of the model that predicts step times from their work."""


class TimePart(msgspec.Struct, kw_only=True):
    """Part of the requests' time, over all engines; the parts add up to 1."""

    part: str
    """Parts on the client's side come first: ``front_end``; ``next_step`` (no step could see the requests
    yet); ``waiting`` and ``stalled`` with a cause; ``prefill``, ``decode``, ``recompute``; ``between_steps``
    (time in these three states while the device waited for the engine); ``interrupted`` (the engine was
    paused, did not step, or its processes lacked processors; the device's time lost to this is included)."""
    cause: str | None
    """A word of ``docs/causes.md``, for ``waiting`` and ``stalled``."""
    time_ms: float
    share_frac: float


class TailPart(msgspec.Struct, kw_only=True):
    """Part of the time by which the slowest requests exceed those around the median."""

    state: str
    """A state of ``request_time``; ``interrupted`` is also the part of a step in which the device took too
    long."""
    cause: str | None
    """Cause of a wait, as in ``request_time``; for ``interrupted``, the kind of the event."""
    time_ms: float
    """Mean of the slowest requests minus the mean of those around the median; for TPOT, per output token."""
    share_frac: float
    """Share of the whole difference; negative for parts in which the slowest requests spent less time."""


class LatencyTail(msgspec.Struct, kw_only=True):
    """Reasons why the slowest requests of an engine are slow, if they take three times the median or more."""

    engine_rank: int
    """Data-parallel rank."""
    metric: str
    """``ttft_ms``, ``tpot_ms`` or ``e2e_ms``."""
    requests: int
    """Number of requests that have this latency."""
    slowest: int
    """Number of slowest requests: a hundredth of all, at least one."""
    slowest_request: str
    """Id of the slowest request."""
    slowest_ms: float
    """Mean latency of the slowest requests."""
    median_ms: float
    """Median latency of all requests that have this latency."""
    parts: list[TailPart]
    """Parts of the latency in which the slowest requests spent more time than the tenth of the requests
    around the median, the largest first; parts under 1 % are left out."""
    first_step: int | None
    """First step in which the slowest requests spent time in the largest of these parts; null if they spent
    this time outside steps."""
    last_step: int | None
    """Last step in which the slowest requests spent time in the largest part; null as for ``first_step``."""
    prefill_tokens: float | None
    """Mean number of the slowest requests' prompt tokens that had to be computed, because no cache or KV
    connector had them."""
    usual_prefill_tokens: float | None
    """The same mean for the requests around the median latency."""
    output_tokens: float | None
    """Mean output length of the slowest requests."""
    usual_output_tokens: float | None
    """Mean output length of the requests around the median latency."""


class NotJudged(msgspec.Struct, kw_only=True):
    """Rule that could not be evaluated, because the record lacks facts."""

    code: str
    """Name of the rule's page in ``docs/findings/``."""
    missing: list[str]
    """Facts that the rule needs and the record lacks."""


class RunReport(msgspec.Struct, kw_only=True):
    """Report of one run."""

    path: str
    label: str
    config: dict[str, Any]
    """Configuration of the run: model, versions, limits and workload, as far as recorded."""
    problems: list[Message]
    """Problems of the trace, and the recorder's notices."""
    verdict: list[Message]
    """At most three sentences about what limited this run, by how much, and which requests held the resource.
    """
    time_split: list[TimePart]
    """Parts of the requests' time, the largest first."""
    tails: list[LatencyTail] = []
    """Reasons why the slowest requests are slow, for each engine and latency with such a tail."""
    trials: list[TrialReport]
    findings: list[Finding]
    """Root causes by gain, each with its symptoms; then symptoms without a root cause."""
    lacks: list[str] = []
    """Kinds of facts that the record lacks; no figure, finding or sentence is based on them."""
    not_judged: list[NotJudged]
    """Rules that could not be evaluated, because the record lacks facts."""
    causes: list[CauseRow]
    """Every kind of exit: refusals first, then by frequency."""
    caps: list[CapRow]
    """Every limit that made chunks smaller, in descending order of withheld tokens."""
    request_time: list[RequestTime]
    """States and causes in which the requests spent time, the largest share first."""
    engine_time: list[EngineTime]
    """States in which the engines spent time."""
    step_excess: list[StepExcess] = []
    """Excess of slow steps by part, for parts in which it exceeds a hundredth of the engine's busy time."""
    strip: list[StripCell]
    statistics: Statistics | None = None
    """Latency by class, prefix cache, drafts, outcomes, durations, sums over engines."""
    warmup_steps: int
    """Number of warm-up steps, which are recorded but not included in any figure above."""
    requests_missing: bool = False
    """Whether the traces may lack requests; ``problems`` states why."""
    settings: list[EffectiveSetting] = []
    """Every setting that affects scheduling, with its origin."""
    tested: Replays | None = None
    """Replays on which the advice was tested (``--predict``); null: none."""
    not_tested: str = ""
    """Reason why ``--predict`` tested no advice; empty: there is none."""

    def every_finding(self) -> list[Finding]:
        """Return the root causes, each followed by its symptoms, and then symptoms without a root cause."""
        return [listed for finding in self.findings for listed in (finding, *finding.symptoms)]


class Report(msgspec.Struct, kw_only=True):
    """Document that ``schedtrace analyze`` prints."""

    schema_version: int = REPORT_SCHEMA_VERSION
    runs: list[RunReport]
