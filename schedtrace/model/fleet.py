"""Summaries of engines, and the report of ``schedtrace fleet``; ``docs/fleet.md`` describes both."""

from typing import Literal

import msgspec

from schedtrace.model.disaggregated import Disaggregated, SummaryTransfer
from schedtrace.model.message import NOTHING, Message

FLEET_SCHEMA_VERSION = 1
SUMMARY_VERSION = 2
"""Version of ``EngineSummary``; raise it when a field or the meaning of a figure changes."""


class SummaryTime(msgspec.Struct, kw_only=True):
    """Time that one engine's requests spent in one part of ``time_split``."""

    part: str
    """Part of the requests' time, as in ``time_split`` of a report."""
    cause: str | None
    """Cause of a wait; null for the other parts."""
    us: int
    """Total over the requests, in microseconds."""


class SummaryState(msgspec.Struct, kw_only=True):
    """Time that the engine itself spent in one state."""

    state: str
    """State, as in ``engine_time`` of a report."""
    us: int
    """Total time in this state, in microseconds."""


class SummarySketch(msgspec.Struct, kw_only=True):
    """Sketch of a latency (DDSketch); sketches of several engines are merged by adding up equal bins."""

    metric: str
    """``queue``, ``ttft``, ``tpot`` or ``e2e``."""
    keys: list[int]
    """Numbers of the bins that are not empty. Bin ``k`` holds the values in ms above ``gamma ** (k - 1)`` and
    up to ``gamma ** k``, where ``gamma = (1 + error) / (1 - error)``."""
    counts: list[float]
    """Number of values in each bin of ``keys``."""
    zeros: float
    """Number of values that are 0."""
    sum_ms: float
    """Sum of all values."""
    max_ms: float
    """Largest value, exactly."""


class SummaryFinding(msgspec.Struct, kw_only=True):
    """Root cause that an engine's own report contains."""

    code: str
    """Code of the finding."""
    severity: str
    """``info``, ``warning`` or ``critical``."""
    leads: bool
    """Whether the engine's own verdict is about this root cause."""
    share_frac: float | None
    """Share of this engine's request time that the root cause explains."""
    saved_frac: float | None
    """Estimated share of this engine's request time that the first piece of advice saves."""
    title: str
    """Title, as JSON of a message (``schedtrace.model.message``)."""
    holder: str
    """Sentence about the holder of the resource, as JSON of a message."""


class SummaryPace(msgspec.Struct, kw_only=True):
    """Times of an engine's steps with about the same work."""

    work: str
    """Class of the work: tokens of prefill, of decode and of context, each within a factor of about 1.4."""
    steps: int
    """Number of steps."""
    median_us: float
    """Median time of the steps on the device."""


class SummaryTenant(msgspec.Struct, kw_only=True):
    """Time, tokens and device time of one tenant's requests on one engine."""

    tenant: str
    """Name of the tenant; names in parentheses mean no tenant, an unknown one, or all the rest."""
    requests: int
    """Number of requests that arrived."""
    waiting_us: int
    """Time that the tenant's requests spent in the queue, or running without getting tokens."""
    running_us: int
    """Time that the tenant's requests spent in prefill, decode and recomputation."""
    front_end_us: int
    """Time that the tenant's requests spent on the way to the scheduler."""
    prompt_tokens: int
    """Prompt tokens of the requests that arrived."""
    output_tokens: int
    """Output tokens of the requests that left."""
    recomputed_tokens: int
    """Tokens that were computed again after a preemption."""
    device_us: int
    """The tenant's part of the device time."""


class SummaryTenantWait(msgspec.Struct, kw_only=True):
    """Time that one tenant's requests waited for a resource held by the same or another tenant's requests."""

    waiter: str
    """Tenant of the waiting requests."""
    holder: str
    """Tenant that held the resource; ``(nobody)`` for waits for no shared resource."""
    us: int
    """Time in microseconds, added up over the requests."""


class EngineSummary(msgspec.Struct, kw_only=True):
    """Data of one engine that the fleet's report needs; a row of the Parquet file."""

    summary_version: int = SUMMARY_VERSION
    """Version of these columns; 2."""
    content: str
    """Hash of the content that was read, the window and schedtrace's version."""
    window: str
    """Part of the recording, such as ``--last 600s``; empty for all of it."""
    host: str
    """Host in the trace's header."""
    pid: int | None
    """Id of the engine's process."""
    engine_rank: int
    """Data-parallel rank."""
    model: str
    """Model that the engine served."""
    device: str
    """Kind of device, such as the name of a GPU."""
    role: str
    """Role in disaggregated prefill (``kv_producer``, ``kv_consumer``, ``kv_both``); empty without KV
    transfer."""
    vllm_version: str
    """Release of vLLM."""
    clock: str
    """``monotonic``, or ``virtual`` for a simulation."""
    clock_id: str | None
    """Identity of the machine's monotonic clock."""
    begin_unix_us: int
    """Unix time at which the first step began, by the host's wall clock."""
    monotonic_begin_us: int | None = None
    """Time at which the first step began, by the machine's monotonic clock; null if not recorded."""
    clock_error_us: int | None
    """Maximum error of ``begin_unix_us``: the error from reading two clocks plus that of the host's NTP; null
    if unknown."""
    token_budget: int | None
    """Token budget of a step."""
    max_num_seqs: int | None
    """Maximum number of running requests."""
    max_model_len: int | None
    """Maximum number of tokens of a request."""
    kv_blocks: int | None
    """Number of blocks in the KV cache."""
    block_size: int | None
    """Number of tokens per block."""
    steps: int
    """Number of steps."""
    length_us: int
    """Time from the first step to the end of the recording."""
    busy_us: int
    """Time of the engine without idle time."""
    missing_us: int
    """Time for which nothing is recorded."""
    requests_us: int
    """Total time of all requests; shares refer to it."""
    requests: int
    """Number of requests that arrived."""
    finished: int | None
    """Number of requests that finished normally."""
    arrived_tokens: int
    """Prompt tokens of the requests that arrived."""
    output_tokens_per_s: float | None
    """Throughput, as in the engine's own report."""
    arrivals_us: int
    """Time from the first arrival to the last."""
    quiet_us: int
    """Longest time between two arrivals."""
    quiet_begin_us: int
    """Beginning of the longest time between two arrivals, counted from the beginning of the first step."""
    arrivals: list[int]
    """Arrivals in each of 40 equal parts of the recording."""
    times: list[SummaryTime]
    """Time of the requests by part and cause."""
    states: list[SummaryState]
    """Time of the engine by state."""
    sketches: list[SummarySketch]
    """Latencies of the engine's requests."""
    findings: list[SummaryFinding]
    """Root causes in the engine's own report."""
    paces: list[SummaryPace]
    """Times of steps by their work."""
    lacks: list[str]
    """Kinds of facts that the record lacks."""
    problems: list[str]
    """Problems of the trace, each as JSON of a message."""
    gpus: int | None = None
    """Number of the engine's GPUs, according to its parallel settings; null if these are not recorded."""
    tenant_key: str = ""
    """Property that names the tenants (``--tenant``); empty if the figures are not divided by tenant."""
    divided_by: str = ""
    """Weights by which a step's device time was shared out among the tenants: ``step-time model`` or
    ``scheduled tokens``."""
    tenants: list[SummaryTenant] = []
    """Usage of the engine by tenant."""
    tenant_waits: list[SummaryTenantWait] = []
    """Waiting time by tenant of the waiting requests and tenant of the holders."""
    transfers: list[SummaryTransfer] = []
    """Requests whose KV cache goes to another engine or comes from one."""
    transfers_below: int | None = None
    """Limit: only requests whose id has a hash below it are in ``transfers``; null: all requests are."""


FaultKind = Literal[
    "interrupted", "slow-steps", "slow-host-work", "smaller-limit", "more-load", "no-arrivals", "unexplained"
]
"""``interrupted``: the engine was paused, hung or did something else. ``slow-steps``: its device takes longer
for the same work. ``slow-host-work``: processes on its host take longer. ``smaller-limit``: one of its
settings is lower than its peers', and its requests wait for this limit. ``more-load``: the router sends it
more. ``no-arrivals``: no request arrived for a long time. ``unexplained``: its requests wait longer, and
nothing else differs."""


class PeerMeasure(msgspec.Struct, kw_only=True):
    """Measure in which an engine differs from its peers."""

    name: str
    """Measure: ``share of <part> <cause>``, ``step time``, ``requests/s``, ``tokens/s`` or ``arrivals``."""
    value: float
    """Value of this engine."""
    median: float
    """Median of its peers."""
    deviations: float
    """Distance from the median in robust standard deviations (1.4826 times the median absolute deviation,
    with a floor that ``docs/fleet.md`` states)."""


class PeerDifference(msgspec.Struct, kw_only=True):
    """Engine that differs from its peers, and the cause of the difference."""

    engine: str
    """Name of the engine."""
    host: str
    """Host of the engine."""
    kind: FaultKind
    """Cause of the difference."""
    also: list[FaultKind] = []
    """Further causes that apply to the same engine."""
    where: Literal["host", "engine", "router", "client"]
    """Place to look at; ``host`` if the host has several engines and all of them are slow."""
    message: Message
    """Evidence in figures, as a sentence."""
    effect: Message = NOTHING
    """Share of the engine's request time that the cause takes, beyond its peers' share."""
    measures: list[PeerMeasure]
    """Measures that differ."""


class PeerGroup(msgspec.Struct, kw_only=True):
    """Engines that are compared with each other: same model, device and role."""

    model: str
    """Model that these engines serve."""
    device: str
    """Kind of device, such as the name of a GPU."""
    role: str
    """Role in disaggregated prefill; empty without KV transfer."""
    engines: int
    """Number of engines."""
    compared: bool
    """Whether the group has enough engines for a comparison."""
    requests_per_s: float | None
    """Median rate of arrivals; null if no engine has two arrivals."""
    busiest: str = ""
    """Engine with the highest rate of arrivals."""
    busiest_ratio: float | None = None
    """Ratio of the busiest engine's rate to the median."""
    even_load: bool | None = None
    """Whether no engine got significantly more than its peers; null if not compared."""
    even_capacity: bool | None = None
    """Whether no engine is slower or has smaller limits than its peers; null if not compared."""


class FleetTimePart(msgspec.Struct, kw_only=True):
    """Part of the time that the requests of all engines took."""

    part: str
    """Part, as in a report of one run."""
    cause: str | None
    """Cause of a wait."""
    time_ms: float
    """Total over all requests."""
    share_frac: float
    """Share of all requests' time."""
    engines: int
    """Number of engines in which the part takes 1 % of the requests' time or more."""
    most: str
    """Engine in which this part takes the largest share of the requests' time."""
    most_frac: float
    """Share that the part takes of the requests' time in ``most``."""


class FleetLatency(msgspec.Struct, kw_only=True):
    """Latency over the requests of all engines."""

    metric: str
    """``queue``, ``ttft``, ``tpot`` or ``e2e``."""
    count: int
    """Number of values."""
    mean_ms: float
    """Mean of all values, without a sketch's error."""
    p50_ms: float
    """Median, within ``error_frac``."""
    p90_ms: float
    """90th percentile, within ``error_frac``."""
    p99_ms: float
    """99th percentile, within ``error_frac``."""
    max_ms: float
    """Largest value, exactly."""
    error_frac: float
    """Relative error of the percentiles."""


class FleetRootCause(msgspec.Struct, kw_only=True):
    """Root cause over all engines."""

    code: str
    """Code of the finding."""
    engines: int
    """Number of engines whose own report contains the root cause."""
    leads: int
    """Number of engines whose verdict is about the root cause."""
    share_frac: float
    """Share of the whole fleet's request time that the root cause explains."""
    saved_frac: float | None
    """Estimated share of the whole fleet's request time that its advice saves; null without an estimate."""
    most: str
    """Engine on which the advice saves the most time; without an estimate, the engine on which the root cause
    explains the most of the requests' time."""
    title: Message
    """Title of the finding on that engine."""
    holder: Message
    """Holder of the resource on that engine."""


class FleetHost(msgspec.Struct, kw_only=True):
    """Host of one or several engines."""

    host: str
    """Name of the host."""
    engines: int
    """Number of engines on the host."""
    step_time_ratio: float | None
    """Median over the host's engines of the ratio of their step time to their peers', for the same work."""
    is_slow: bool
    """Whether all engines on the host are slow."""


class FleetEngine(msgspec.Struct, kw_only=True):
    """Engine in the table of a fleet."""

    engine: str
    """Name of the engine, for ``--engine``."""
    host: str
    """Host of the engine."""
    requests: int
    """Number of requests that arrived."""
    requests_per_s: float | None
    """Rate of arrivals."""
    output_tokens_per_s: float | None
    """Output tokens per second over the recording."""
    step_time_ratio: float | None
    """Ratio of the engine's step time to its peers', for the same work; null if no work is comparable."""
    waiting_frac: float
    """Share of the engine's request time spent waiting or stalled."""
    ttft_p99_ms: float | None
    """99th percentile of the engine's times to first token, within 1 %."""
    kinds: list[FaultKind]
    """Causes of the engine's differences from its peers; empty if there are none."""
    finding: str
    """Code of the finding that leads the engine's own verdict; empty: nothing limits the engine."""
    arrivals: list[int]
    """Arrivals in each of 40 equal parts of the engine's recording."""


class FleetTenant(SummaryTenant, kw_only=True):
    """Time, tokens, device time and cost of one tenant over all engines."""

    device_frac: float
    """Share of the devices' time."""
    gpu_us: int | None
    """The tenant's device time on each engine times the engine's number of GPUs, added up over the engines;
    null if that number is unknown for any engine."""
    cost: float | None = None
    """``gpu_us`` at the price that the user stated; null without a price."""


class FleetTenants(msgspec.Struct, kw_only=True):
    """Usage of the fleet by tenant; all figures of the tenants add up to those of the whole fleet."""

    key: str
    """Property that names the tenants (``--tenant``)."""
    tenants: list[FleetTenant]
    """Tenants; those with the most device time come first."""
    waits: list[SummaryTenantWait]
    """Waiting time by tenant of the waiting requests and tenant of the holders, the longest first."""
    by_model: int
    """Number of engines whose device time a fitted step-time model shares out among the tenants; on all
    others, scheduled tokens do."""
    price_per_gpu_hour: float | None = None
    """Price per GPU and hour that the user stated."""
    gpu_us: int | None
    """Length of each engine's recording times the engine's number of GPUs, added up over the engines; null if
    that number is unknown for any engine."""
    idle_cost: float | None = None
    """Cost of the time in which the devices executed no batch; null without price."""


class ClockSpread(msgspec.Struct, kw_only=True):
    """Uncertainty of time differences between the engines."""

    hosts: int
    """Number of hosts in the fleet."""
    unknown: int
    """Number of engines whose clock error is not recorded."""
    apart_us: int | None
    """Maximum error of a time difference between two engines on different hosts; null if any error is
    unknown."""
    virtual: int
    """Number of engines with a simulation's virtual clock."""


class LeftOut(msgspec.Struct, kw_only=True):
    """Input that the figures do not include."""

    path: str
    """Path or address."""
    why: str
    """Reason why the input was left out."""


class EngineRead(msgspec.Struct, kw_only=True):
    """Engine that the figures include."""

    engine: str
    """Name of the engine."""
    path: str
    """Path or address of its trace."""
    files: int
    """Number of files that were read, or whose summary was in the cache."""
    size_bytes: int
    """Total size of the files."""
    cached: bool
    """Whether the engine's summary came from the cache."""
    problems: list[Message] = []
    """Problems of the trace; the rest of the trace is in the figures nevertheless."""


class FleetManifest(msgspec.Struct, kw_only=True):
    """Inputs that were read, and inputs that were left out."""

    engines: list[EngineRead]
    """Engines in the figures."""
    left_out: list[LeftOut]
    """Inputs that are not in the figures, with the reason."""
    redone: int = 0
    """Number of engines that were read a second time because the process that read them ended."""


class FleetReport(msgspec.Struct, kw_only=True):
    """Report of ``schedtrace fleet``."""

    schema_version: int = FLEET_SCHEMA_VERSION
    """Version of this format; 1."""
    paths: list[str]
    """Paths and addresses as on the command line."""
    window: str
    """Part of the recordings, such as ``--last 600s``; empty for all of them."""
    verdict: list[Message]
    """Statement in a few sentences about what is wrong with the fleet."""
    differences: list[PeerDifference]
    """Engines that differ from their peers, grouped by cause."""
    groups: list[PeerGroup]
    """Groups of peers."""
    time_split: list[FleetTimePart]
    """Parts of all requests' time, the largest first."""
    latencies: list[FleetLatency]
    """Latencies over all requests."""
    root_causes: list[FleetRootCause]
    """Root causes that the engines' own reports name, by share of the fleet's request time."""
    hosts: list[FleetHost]
    """Hosts, the slowest first."""
    engines: list[FleetEngine]
    """Engines: first those that differ from their peers, then by waiting share."""
    tenants: FleetTenants | None = None
    """Usage by tenant; null without ``--tenant``."""
    clocks: ClockSpread
    """Uncertainty of time differences between engines."""
    disaggregated: Disaggregated | None = None
    """Requests that one engine prefills and another decodes; null if there are none."""
    read: FleetManifest
    """Inputs that were read, and inputs that were left out."""
