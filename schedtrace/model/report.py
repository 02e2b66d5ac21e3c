"""Report of ``analyze``; ``docs/report-format.md`` describes its JSON form."""

from enum import IntEnum
from typing import Any, Literal

import msgspec

from schedtrace.model.message import NOTHING, Message
from schedtrace.model.statistics import Percentiles, Statistics
from schedtrace.model.what_if import Replays

Origin = Literal["given", "default", "derived", "overridden", "reduced", "unknown"]
"""``given``: set by the user. ``default``: vLLM's default, which for some settings depends on the usage
context. ``derived``: vLLM chose it for this model, platform or other settings. ``overridden``: another value
was given. ``reduced``: by the share that speculative decoding takes. ``unknown``: no front end recorded what
was given.
"""

SettingValue = bool | int | float | str | list[int]


class EffectiveSetting(msgspec.Struct, kw_only=True):
    """Setting that decides scheduling, with the value that the engine used."""

    name: str
    """vLLM's name of the engine argument, or of the field if the figure is not an argument."""
    value: SettingValue
    """Value as the scheduler uses it."""
    origin: Origin
    context: str | None = None
    """Usage context of this run, if vLLM's default depends on it and no value was given."""
    given: SettingValue | None = None
    """The given value, if a different value is in effect (``overridden``)."""
    inert: bool = False
    """Whether it was set but has no effect in this release or configuration."""
    explanation: Message = NOTHING
    """Origin of the value, effects that the setting lacks, and how much of it this run used."""


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
    """The setting with its present value, or another action."""
    setting: str | None = None
    """Field of vLLM's ``EngineArgs``; None if the advice is not a setting."""
    value: int | float | bool | str | None = None
    """Proposed value, which vLLM accepts in this configuration; None if no particular value is proposed."""
    costs: Message = NOTHING
    """Cost elsewhere, as a sentence."""
    proven: bool = False
    """Whether a contract test runs vLLM's scheduler with this advice and verifies that the wait gets
    shorter.
    """
    tested: Message = NOTHING
    """Result of the advice in a replay of this load (``analyze --predict``)."""


class Gain(msgspec.Struct, kw_only=True):
    """Gain of a finding's first piece of advice on this load, estimated from the trace."""

    metric: str
    """``output_tokens_per_s``, ``ttft_p50_ms`` or another figure of the report."""
    change_frac: float
    """Relative change of the metric: 0.86 is 86 % more."""
    low_frac: float | None = None
    high_frac: float | None = None
    """Interval of the change; None if not known."""
    before: float | None = None
    after: float | None = None
    """Value of the metric with the advice, in its unit; ``before``: without it."""
    saved_frac: float
    """Share of the requests' time on all engines that it saves, by which findings are ranked."""
    method: str
    """Method of the estimate: ``step_time`` (bounds by the model of step times) or ``replay`` (the load was
    replayed with it)."""


class Finding(msgspec.Struct, kw_only=True):
    """Finding about a run: a root cause, or a symptom of one."""

    code: str
    """Name of the page in ``docs/findings/``."""
    severity: str
    """``info``, ``warning`` or ``critical``: by gain, or by share if no gain can be estimated."""
    title: Message = NOTHING
    """Title in a few words; empty for a symptom."""
    verdict: Message = NOTHING
    """First sentence about the run if this finding leads: what limited it, and by how much."""
    share_frac: float | None = None
    """Share of the requests' time on all engines that it explains; None if it is about something else."""
    holder: Message = NOTHING
    """Holder of the resource."""
    gain: Gain | None = None
    """Estimated gain; None if the trace allows no estimate."""
    leads: bool = False
    """Whether it comes before all findings that are ranked by gain: requests can never run, or make no
    progress.
    """
    cause: str | None
    """A word of ``docs/causes.md``; None if the finding is not about an exit."""
    via: str
    """Source of the cause: ``recorded`` for a fact; for an exit, ``source`` or ``inferred``."""
    location: str | None = None
    """``file:line`` of the exit in the installed vLLM, if all counted exits were taken at one place."""
    engine_rank: int
    """Data-parallel rank whose steps are listed and whose figures are given, except for shares."""
    engine_ranks: list[int] = []
    """All ranks that show the finding."""
    of_ranks: bool = False
    """Whether the finding and its figures are about all ranks together."""
    count: int
    """Steps that show it (for ``preemption``: preemptions)."""
    trials: list[int]
    """Trials that show it; empty for a trace without trials."""
    steps: list[int]
    """Numbers of these steps, the first ``MAX_STEPS``."""
    tokens: int
    """Number of tokens, as defined on the finding's page."""
    message: Message
    """The evidence in figures."""
    advice: list[Advice] = []
    """Advice, the best first; empty for a symptom, whose root cause has advice."""
    refuted: list[Message] = []
    """Withdrawn advice: it did not help in a replay of this load, or vLLM overrode it."""
    evidence: Evidence
    example: Message | None = None
    """Sentence about one case: the longest, the largest or the first."""
    cost_ms: float | None = None
    """Estimated cost in time; None if the trace allows no estimate, or the model does not resolve it."""
    cost_frac: float | None = None
    """``cost_ms`` as a share of ``cost_of``."""
    cost_of: str = "busy time"
    """``busy time`` (the engine's time without idle time) or ``run`` (from its first step to its last)."""
    tail: Message = NOTHING
    """Latency of the requests that it slows, and of comparable ones; empty if less than three times theirs.

    It is on the first screen however small the finding's share.
    """
    cost_error_frac: float | None = None
    """Typical relative error of the step-time model behind the estimate; None if no model is used."""
    symptoms: "list[Finding]" = []
    """Effects of this root cause."""

    @property
    def is_root(self) -> bool:
        """Whether it is a root cause: only these have a title."""
        return bool(self.title)

    @property
    def weight(self) -> float:
        """Weight by which it is ranked: the share of the requests' time that is gained, or else explained.

        If a finding lengthens the run, the share of the run counts if it is larger, because a tail costs
        little of the requests' time.
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
    """Whether it is complete; false if the run ended within this trial."""
    steps: int
    """``schedule()`` calls, including those without tokens."""
    duration_s: float | None
    """Time from the start of the first step to the last output."""
    first_step_requests: int | None
    first_step_tokens: int | None
    """Requests and tokens of the first step that scheduled anything."""
    new_per_step: list[int] | None
    """Requests newly scheduled in each successive step that scheduled any; None if not recorded."""
    budget_use_frac: float | None
    """Mean share of the token budget used, over steps that scheduled anything."""
    budget_use_waiting_frac: float | None
    """Mean share over steps after which requests still waited; None if there were none."""
    preemptions: int | None
    """Preemptions; None if they cannot be recorded for this scheduler."""
    requests_finished: int | None
    requests_aborted: int | None
    """Requests that ended in another way: aborted, ignored, with an error."""
    requests_per_s: float | None
    total_tokens_per_s: float | None
    output_tokens_per_s: float | None
    throughput_from: str | None
    """``front_end``: measured by ``schedtrace run``; ``trace``: from the engine's times."""
    throughput_over: Literal["trial", "requests"] | None
    """``trial``: over all of the trial's time, idle included; ``requests``: over the time in which there were
    requests, as of a server, and of a part of a trace."""
    throughput_s: float | None
    """Length of that time. For several engines it is their common time, so their figures add up."""
    queue_ms: Percentiles | None = None
    """Time from arrival at the scheduler to the first step that scheduled it, over all scheduled requests."""
    ttft_ms: Percentiles | None
    """Time from arrival at the front end to the first token's output in the engine, over all requests with a
    first token, including aborted and unfinished ones.
    """
    tpot_ms: Percentiles | None
    """Time per output token after the first, over finished requests."""
    e2e_ms: Percentiles | None
    """Time from arrival at the front end to the last token's output in the engine, over finished requests."""
    iteration_ms: Percentiles | None = None
    """vLLM's own "iteration elapsed time" over steps: mostly waiting for the model's result; only from
    its iteration lines."""
    kv_cache_usage_max_frac: float | None = None
    """Highest KV cache usage in an iteration line (vLLM 0.26 and newer)."""


class StripCell(msgspec.Struct):
    """Column of the budget-use strip: an equal share of the steps."""

    use_frac: float
    """Highest share of the budget that one of its steps used."""
    waiting_frac: float | None
    """Share of its steps after which requests waited; None if not recorded."""


class CauseRow(msgspec.Struct, kw_only=True):
    """Kind of exit over the whole run."""

    loop: str
    kind: str
    cause: str
    """A word of ``docs/causes.md``."""
    detail: str | None
    location: str | None
    """``file:line`` in the installed vLLM; None for inferred exits."""
    via: str
    refusal: bool
    """Whether a request was refused or skipped; if not, the loop ended because none was left."""
    exits: int
    """Number of times that it was taken."""
    steps: int
    """Steps in which it was taken."""
    requests: int
    """Number of different requests that it concerned, as far as recorded."""
    mean_budget_left: float
    """Token budget left when it was taken."""


class CapRow(msgspec.Struct, kw_only=True):
    """Limit that made chunks smaller, over the whole run."""

    cap: str
    """A word of ``docs/causes.md``."""
    location: str | None
    chunks: int
    """Number of chunks that it made smaller."""
    steps: int
    requests: int
    withheld_tokens: int
    """Total number of tokens that it withheld."""
    mean_budget_left: float
    """Token budget left after these steps."""


class RequestTime(msgspec.Struct, kw_only=True):
    """Time of one engine's requests in one state with one cause."""

    engine_rank: int
    state: str
    """``front_end``, ``waiting``, ``prefill``, ``decode``, ``recompute``, ``preempted``, ``set_aside``,
    ``stalled`` or ``interrupted``."""
    cause: str | None
    """Word of ``docs/causes.md``, or ``next_step`` (no step could see the requests yet); for ``interrupted``,
    the kind of the event. None for states without a cause.
    """
    time_ms: float
    """Total over the requests."""
    share_frac: float
    """Share of all requests' time; the shares of an engine add up to 1."""
    requests: int
    strip: list[float]
    """Shares of the requests' time in it, over equal parts of the run's steps."""


class EngineTime(msgspec.Struct, kw_only=True):
    """Time of one engine in one state."""

    engine_rank: int
    state: str
    """``device``, ``schedule``, ``update``, ``dummy``, ``host_gap``, ``idle`` or ``not_recorded``."""
    time_ms: float
    busy_frac: float | None
    """Share of the engine's time without ``idle`` and ``not_recorded``; None: for these two."""


class StepExcess(msgspec.Struct, kw_only=True):
    """Excess of one part of the slow steps of an engine: time beyond what the step's work explains."""

    engine_rank: int
    """Data-parallel rank."""
    part: str
    """``execution``, ``schedule`` (``schedule()``), ``update`` (``update_from_output()``) or ``between`` (two
    steps)."""
    steps: int
    """Steps that were examined: all, or evenly spaced blocks of them."""
    slow_steps: int
    """Steps among them that are far longer than their work explains."""
    excess_ms: float
    """Their excess, of all steps."""
    unexplained_frac: float
    """Share of it that goes with nothing in this trace."""
    model_error_frac: float
    """Typical relative error of the model."""


class TimePart(msgspec.Struct, kw_only=True):
    """Part of the requests' time, over all engines; the parts add up to 1."""

    part: str
    """``client``-side parts first: ``front_end``; ``next_step`` (no step could see them yet); ``waiting`` and
    ``stalled`` with a cause; ``prefill``, ``decode``, ``recompute``; ``between_steps`` (of these three, while
    the device waited for the engine); ``interrupted`` (the engine was paused, did not step, or its processes
    lacked processors: the device's time that this took is in it)."""
    cause: str | None
    """A word of ``docs/causes.md``, of ``waiting`` and ``stalled``."""
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
    """Share of the whole difference; parts of which the slowest had less are below 0."""


class LatencyTail(msgspec.Struct, kw_only=True):
    """Reasons why the slowest requests of an engine are slow, if they take three times the median or more."""

    engine_rank: int
    """Data-parallel rank."""
    metric: str
    """``ttft_ms``, ``tpot_ms`` or ``e2e_ms``."""
    requests: int
    """Requests that have this latency."""
    slowest: int
    """The slowest hundredth of them, at least one."""
    slowest_request: str
    """The slowest of all."""
    slowest_ms: float
    """Mean of the slowest."""
    median_ms: float
    """Median of all of them."""
    parts: list[TailPart]
    """Parts of the latency in which the slowest requests spend more time than the tenth of the requests
    around the median, the largest first; parts under 1 % are left out."""
    first_step: int | None
    """First step in which the slowest requests spent time in the largest of these parts; null: they spent it
    in no step."""
    last_step: int | None
    """Last of these steps."""
    prefill_tokens: float | None
    """Mean prompt tokens of the slowest requests that no cache or KV connector had, so that they were
    computed."""
    usual_prefill_tokens: float | None
    """The same mean of the requests around the median latency."""
    output_tokens: float | None
    """Mean output length of the slowest requests."""
    usual_output_tokens: float | None
    """Mean output length of the requests around the median latency."""


class NotJudged(msgspec.Struct, kw_only=True):
    """Rule whose facts a record lacks."""

    code: str
    """Name of the page in ``docs/findings/``."""
    missing: list[str]
    """Facts that the rule needs and the record lacks."""


class RunReport(msgspec.Struct, kw_only=True):
    """Report of one run."""

    path: str
    label: str
    config: dict[str, Any]
    """Model, versions, limits and workload, as far as the run records them."""
    problems: list[Message]
    """Problems of the trace, and the recorder's notices."""
    verdict: list[Message]
    """Limits of this run, by how much, and who or what held it; at most three sentences."""
    time_split: list[TimePart]
    """Parts of the requests' time, the largest first."""
    tails: list[LatencyTail] = []
    """Reasons why the slowest requests are slow, for each engine and latency that has such a tail."""
    trials: list[TrialReport]
    findings: list[Finding]
    """Root causes by gain, each with its symptoms; then symptoms without a root cause."""
    lacks: list[str] = []
    """Kinds of facts that the record lacks, on which no figure, finding or sentence is based."""
    not_judged: list[NotJudged]
    """Rules that the record lacks facts for."""
    causes: list[CauseRow]
    """Every kind of exit: refusals first, then by frequency."""
    caps: list[CapRow]
    """Every limit that made chunks smaller, in descending order of withheld tokens."""
    request_time: list[RequestTime]
    """States and causes that took the requests' time, the largest share first."""
    engine_time: list[EngineTime]
    """States that took the engines' time."""
    step_excess: list[StepExcess] = []
    """Excess of slow steps by part, where it is a hundredth of the busy time or more."""
    strip: list[StripCell]
    statistics: Statistics | None = None
    """Latency by class, prefix cache, drafts, outcomes, durations, sums over engines."""
    warmup_steps: int
    """Number of warm-up steps, which are recorded but in no figure above."""
    requests_missing: bool = False
    """Whether the traces may lack requests; ``problems`` says why."""
    settings: list[EffectiveSetting] = []
    """Every setting that decides scheduling, with its origin."""
    tested: Replays | None = None
    """Replays on which the advice was tested (``--predict``); null: none."""
    not_tested: str = ""
    """Reason why ``--predict`` tested nothing; empty: there is none."""

    def every_finding(self) -> list[Finding]:
        """Return the root causes, each followed by its symptoms, and symptoms of none."""
        return [listed for finding in self.findings for listed in (finding, *finding.symptoms)]


class Report(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace analyze``."""

    schema_version: int = REPORT_SCHEMA_VERSION
    runs: list[RunReport]
