"""Lines of ``engine-<rank>.jsonl``; ``docs/trace-format.md`` describes the format.

Every line is one of the tagged structs below (key ``type``). Names of times and durations end in ``_us``
(microseconds). A time counts from the moment when the header was written, by the engine's monotonic clock, so
the time of an arrival at the front end may be negative. Fields at their default are left out of the line.
Evolution: fields are added with a default, never renamed or retyped.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from schedtrace.model.trace_facts import (
    Admission,
    CacheGroup,
    Control,
    DummyBatch,
    Grammar,
    HeadRefusal,
    KvLoad,
    KvSend,
    RankSync,
    RemoteSide,
    SetAside,
    Stalled,
    ThreadTime,
)

SCHEMA_VERSION = 4
"""Version of the format, raised only if an older reader would misread a newer trace; added fields do not
raise it."""

Via = Literal["source", "inferred"]
Loop = Literal["running", "waiting"]
ExitKind = Literal["break", "continue", "condition", "gate"]
Phase = Literal["running", "new", "resumed"]


class Line(msgspec.Struct, omit_defaults=True, tag_field="type"):
    """Base of all lines."""


class Header(Line, tag="header", kw_only=True):
    """First line, which makes the file readable on its own.

    A field without a default is null only if the header was made for a log in another format.
    """

    schema_version: int
    schedtrace_version: str
    vllm_version: str
    torch_version: str | None = None
    python_version: str
    host: str
    device: str
    pid: int | None
    first_step: int = 0
    """Number of the first step. If it is not 0, the recorder began this file during the recording, and
    earlier steps are in another file, or lost."""
    engine_rank: int
    """Data-parallel rank of this engine."""
    wall_anchor_us: int
    """Unix time in microseconds at which the trace's clock read 0; aligns ranks on several hosts."""
    wall_uncertainty_us: int | None = None
    """Uncertainty of ``wall_anchor_us``, because the two clocks are read a moment apart."""
    wall_max_error_us: int | None = None
    """Maximum error of the host's wall clock, according to the kernel's NTP state; null: no NTP, or unknown.
    """
    monotonic_anchor_us: int | None = None
    """Time of the machine's monotonic clock at which the trace's clock read 0; aligns ranks on one host
    exactly.
    """
    clock_id: str | None = None
    """Hash of the machine's boot and time namespace; traces with the same hash share a monotonic clock."""
    clock: Literal["monotonic", "virtual"] = "monotonic"
    """``virtual``: the clock of a simulation, in which a model sets the durations of steps."""
    scheduler_class: str
    """Class that vLLM chose, before schedtrace wrapped it."""
    async_scheduling: bool | None = None
    exits_via: Via = "inferred"
    """``source``: all code of ``schedule()`` that runs is instrumented; otherwise ``notices`` name the parts
    that are not."""
    exit_sites: int = 0
    """Number of places in ``schedule()`` at which an exit or a cap is recorded."""
    unknown_guards: list[str] = []
    """Guards whose cause this version cannot name: ``file:line: guard``."""
    registered_causes: dict[str, str] = {}
    """Causes that another package has defined for its scheduler's guards, with their meaning."""
    foreign_queues: list[str] = []
    """Classes of waiting queues that are not vLLM's: their order is unknown, and the recorder never calls
    them.
    """
    model: str
    max_model_len: int | None = None
    token_budget: int | None
    max_num_running_reqs: int | None
    block_size: int | None = None
    kv_blocks_total: int | None = None
    kv_block_bytes: int | None = None
    """Memory of one KV block on each device, for all layers of the pipeline's first stage."""
    device_memory_bytes: int | None = None
    """Memory of a GPU, as reported by vLLM's platform; null on a CPU and for a simulated device."""
    enable_prefix_caching: bool | None = None
    scheduler_config: dict[str, Any] = {}
    """Every field of vLLM's ``SchedulerConfig``."""
    cache_groups: list[CacheGroup] = []
    """KV cache groups of the layers, in vLLM's order; all lists by cache group are in this order."""
    batches_in_flight: int | None = None
    """Maximum number of ``schedule()`` calls before the first output comes back (``max_concurrent_batches``).
    """
    pipeline_parallel_size: int | None = None
    """Number of pipeline stages."""
    data_parallel_size: int | None = None
    """Number of ranks in lock-step; 1 if this engine is independent. From vLLM 0.14 on, every rank of a dense
    model is."""
    grammar_threads: int | None = None
    """Number of threads that compile grammars; null if there are none."""
    settings: dict[str, Any] = {}
    """Further settings, without names, paths and addresses: all of vLLM's cache, parallel and speculative
    configuration, and some of the LoRA, KV transfer, compilation and model configuration. Settings that this
    vLLM lacks are absent.
    """
    attached: bool = False
    """Whether recording began while the engine ran, so that its earlier work is unknown."""
    trial_ids: bool = False
    """Whether request ids contain the trial (``t<trial>-<n>``), because ``schedtrace run`` made them."""
    hashed_ids: bool = False
    preemptions_recorded: bool = True
    """Whether preemptions are recorded; false if this scheduler does not report them."""
    notices: list[str] = []
    """Facts that could not be recorded, with the reason."""


class ScheduledRequest(msgspec.Struct, omit_defaults=True):
    """Tokens that a request got in a step."""

    request_id: str
    computed_tokens: int
    """Tokens computed before this step; for a new request, tokens taken from the prefix cache or a KV
    connector.
    """
    scheduled_tokens: int
    phase: Phase = "running"
    draft_tokens: int = 0


class AlsoSkipped(msgspec.Struct, array_like=True, gc=False):
    """Further request with the same exit: ``[request_id, budget_left]``."""

    request_id: str | None
    budget_left: int


class Exit(msgspec.Struct, omit_defaults=True):
    """Place at which ``schedule()`` stopped, or skipped a request."""

    loop: Loop
    kind: ExitKind
    cause: str
    """A ``Cause``; newer versions may use causes that this version does not know."""
    request_id: str | None = None
    budget_left: int = 0
    """Token budget left when the exit was taken."""
    detail: str | None = None
    guard: str | None = None
    """Guard of an exit with cause ``other``: the condition, or its decisive part, and the values of its
    flags; or the reason why they are unknown."""
    location: str | None = None
    """``file:line`` of the exit in the installed vLLM (only if ``via`` is ``source``)."""
    via: Via = "inferred"
    count: int = 1
    """Number of exits that this entry stands for: after 64 exits with the same cause and place in a call, the
    rest share one entry."""
    blocks_needed: int | None = None
    """Number of blocks that the refused allocation asked for, at an exit with cause ``kv_blocks``; None if
    unknown."""
    blocks_free: int | None = None
    """Number of free blocks, at an exit with cause ``kv_blocks``."""
    values: str | None = None
    """Values that the condition compared, for cause ``other``: ``len(self.running) = 3; cap = 3``."""
    also: list[AlsoSkipped] = []
    """Requests that took the same exit right after this one, in order: each is a separate exit that differs
    only in ``request_id`` and ``budget_left``.
    """


def one_by_one(exits: Sequence[Exit]) -> list[Exit]:
    """Return every exit of a step as a separate entry, in the order in which the exits were taken."""
    separate = []
    for exit_ in exits:
        if not exit_.also:
            separate.append(exit_)
            continue
        alone = msgspec.structs.replace(exit_, also=[])
        separate.append(alone)
        separate += [
            msgspec.structs.replace(alone, request_id=skipped.request_id, budget_left=skipped.budget_left)
            for skipped in exit_.also
        ]
    return separate


class ChunkCap(msgspec.Struct, omit_defaults=True):
    """Limit that reduced the tokens of one request in one step, without being an exit."""

    request_id: str | None
    cap: str
    """A ``Cap``; newer versions may use caps that this version does not know."""
    wanted_tokens: int
    """Number of tokens before this limit was applied."""
    capped_tokens: int
    """Number of tokens after this limit was applied; another limit may follow, and the allocation may still
    fail."""
    location: str | None = None
    """``file:line`` in the installed vLLM."""
    statement: str | None = None
    """Source text of the statement that cut the chunk, for the cap ``other``."""


class Preemption(msgspec.Struct, omit_defaults=True):
    """A request that lost its KV blocks."""

    request_id: str
    lost_tokens: int
    """Number of computed tokens that have to be computed again, unless the prefix cache still has them."""
    for_request_id: str | None = None
    """Request whose allocation failed; None if not visible."""
    num_preemptions: int | None = None
    """Number of this request's preemptions so far, including this one."""
    in_schedule: bool = True
    """Whether ``schedule()`` preempted the request; false if a reset of the prefix cache did."""
    blocks_needed: int | None = None
    """Number of new blocks that the failed allocation asked for."""
    blocks_freed: int | None = None
    """Number of blocks that became free immediately; shared blocks, and blocks that are freed later, do not
    count."""
    policy: str | None = None
    """``fcfs`` or ``priority``."""


class Arrival(msgspec.Struct, omit_defaults=True):
    """Request that reached the scheduler."""

    request_id: str
    arrived_us: int | None
    """Time of arrival at the front end (vLLM's ``arrival_time``, a wall clock)."""
    queued_us: int
    """Time of ``Scheduler.add_request``."""
    prompt_tokens: int
    max_tokens: int | None = None
    priority: int = 0
    lora: str | None = None
    streaming_update: bool = False
    """Whether the id arrived before: this is another part of a streaming session, not a new request."""
    received_us: int | None = None
    """Time at which the engine's input thread began to prepare the request: block hashes, grammar (vLLM
    0.10.2 and newer). Null outside an engine.
    """
    input_queue_us: int | None = None
    """Time at which the prepared request entered the input queue, which the engine empties between steps."""
    client_index: int | None = None
    """Index of the API server that sent the request; 0 if there is a single server."""
    pinned_rank: int | None = None
    """Data-parallel rank that the client asked for."""
    logprobs: int | None = None
    """Number of log-probabilities wanted per output token; -1: for the whole vocabulary."""
    prompt_logprobs: int | None = None
    """Number of log-probabilities wanted per prompt token; such a request does not read the prefix cache."""
    structured: bool = False
    """Whether the output has to follow a grammar."""
    min_tokens: int = 0
    """Minimum number of tokens to generate."""
    logit_bias: int = 0
    """Number of tokens whose logits the request shifts."""
    sibling_index: int | None = None
    """Number of this request among the children of a request with ``n`` > 1, from its id
    ``<number>_<parent>``."""
    parent: str | None = None
    """Hash of the parent's id, salted per trace: equal for the children of one request."""
    remote: RemoteSide | None = None
    """Work that another engine does for the request (``kv_transfer_params``). ``prefill``: its KV cache comes
    from that engine; ``decode``: this engine only prefills it. Null: none, or the connector does not state
    any."""
    remote_request_id: str | None = None
    """Id of the request on the other engine (``remote_request_id`` in ``kv_transfer_params``)."""
    transfer_id: str | None = None
    """Id of the transfer, equal on both engines (``transfer_id`` in ``kv_transfer_params``)."""
    prefix_hashes: str | None = None
    """Marks of the prompt's prefix, 4 characters each. Each of the first 256 full blocks has a mark, then
    every 2nd up to block 512, every 4th up to block 1,024, and so on. Two prompts begin alike up to mark k if
    these texts share their first 4 * k characters. A mark is a hash of vLLM's block hashes or, if vLLM makes
    none (without prefix caching and KV connector), of the blocks' tokens, salted with random bytes per trace
    that are written nowhere. Null before vLLM 0.10.2, and for an image or embeddings without prefix caching.
    """


class Finish(msgspec.Struct, omit_defaults=True):
    """Request that left the scheduler, finished or aborted."""

    request_id: str
    status: str
    """``RequestStatus`` name without ``FINISHED_``: STOPPED, LENGTH_CAPPED, ABORTED, ERROR, ... UNKNOWN: the
    request left the scheduler without a call of ``_free_request``, which would have shown the status."""
    finished_us: int
    prompt_tokens: int
    output_tokens: int
    num_preemptions: int | None = None
    arrived_us: int | None = None
    queued_us: int | None = None
    scheduled_us: int | None = None
    """Start of the first step that scheduled the request."""
    first_token_us: int | None = None
    """Time at which the output with the request's first token came back."""
    last_token_us: int | None = None
    cached_tokens: int = 0
    """Prompt tokens found in a cache when the request was first scheduled."""
    abort_us: int | None = None
    """Time at which the engine's input thread received the client's abort (before vLLM 0.13: time at which
    the engine acted on it). The scheduler acted on it at ``finished_us``."""
    drafts: int | None = None
    """Number of speculative tokens scheduled for the request; null without speculative decoding."""
    drafts_accepted: int | None = None
    """Number of ``drafts`` that were accepted and delivered."""
    drafts_invalid: int | None = None
    """Number of ``drafts`` that the grammar forbade (vLLM 0.14 and newer)."""
    in_schedule: bool = False
    """Whether the scheduler itself ended the request within ``schedule()``; no client aborted it."""


PresentState = Literal["waiting", "preempted", "running"]


class Present(msgspec.Struct, omit_defaults=True):
    """Request that the scheduler had when this file began; the trace lacks its arrival and earlier steps.

    A field is null if it cannot be known, because no recording ran at the time. Fields with the same name as
    in ``Arrival`` have the same meaning.
    """

    request_id: str
    state: PresentState
    """State of the request; ``preempted``: it waits and has run before."""
    arrived_us: int | None
    prompt_tokens: int
    queued_us: int | None = None
    scheduled_us: int | None = None
    """Start of the first step that scheduled the request."""
    first_token_us: int | None = None
    """Time of the first token; null also if there is none yet."""
    computed_tokens: int = 0
    """Number of tokens computed before the first step of this file."""
    output_tokens: int = 0
    """Number of tokens generated so far."""
    lost_tokens: int = 0
    """Number of tokens of a preempted request that have to be computed again; 0 also if unknown."""
    num_preemptions: int | None = None
    """Number of preemptions so far."""
    max_tokens: int | None = None
    priority: int = 0
    lora: str | None = None
    client_index: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: bool = False
    min_tokens: int = 0
    logit_bias: int = 0
    sibling_index: int | None = None
    parent: str | None = None
    prefix_hashes: str | None = None


class RowChange(msgspec.Struct, array_like=True, gc=False):
    """Request whose row is not the expected one: ``[place, computed, scheduled, drafts]``."""

    place: int
    """Place in the list of requests, counted from 0, after the requests in ``gone`` are removed."""
    computed_tokens: int
    scheduled_tokens: int
    draft_tokens: int = 0


class RowChanges(msgspec.Struct, omit_defaults=True, gc=False):
    """Differences between the requests of a step and those of the next.

    Every request is expected to keep its place and the phase ``running``, to have as many computed tokens as
    ``computed_tokens`` plus ``scheduled_tokens`` of the step before, and to get one token and no drafts.
    """

    gone: list[int] = []
    """Places in the previous step's list, counted from 0, in ascending order."""
    changed: list[RowChange] = []
    added: list[ScheduledRequest] = []
    """Requests added at the end of the list."""


class Step(Line, tag="step", kw_only=True):
    """A ``schedule()`` call, in full."""

    step: int
    """Number of the ``schedule()`` call of this engine, from 0."""
    trial: int | None = None
    """Trial of ``schedtrace run``; 0 is the warm-up; None outside ``schedtrace run``."""
    start_us: int
    schedule_us: int
    """Duration of ``schedule()``."""
    output_us: int | None = None
    """Time of ``update_from_output`` for this step; None if the output was not back when the line was
    written."""
    update_us: int | None = None
    """Duration of ``update_from_output``."""
    execute_after_us: int | None = None
    """Time from ``start_us`` until the worker that returns the output began to execute this batch, by the
    worker's clock (vLLM 0.12 and newer). Null outside an engine, or if that worker is on another host."""
    execute_us: int | None = None
    """Time from the beginning of the execution until the output was ready, including sampling. With
    asynchronous scheduling, it includes the wait for the previous batch, if the device still executes that.
    """
    token_budget: int
    remaining_budget: int
    """``token_budget`` minus the tokens scheduled in this step."""
    total_requests: int
    """Number of requests scheduled in this step."""
    max_num_running_reqs: int
    num_running_before: int
    num_running_after: int
    num_waiting_before: int
    num_waiting_after: int
    num_not_ready_after: int = 0
    """Number of waiting requests that vLLM keeps apart because they wait for something other than the
    scheduler (a grammar, a remote KV transfer) or, since vLLM 0.31, because they would exceed ``max_loras``.
    0 before vLLM 0.18, because those releases keep none apart."""
    waiting_tokens_after: int | None = None
    """Number of tokens that the waiting requests need; None if the recorder's own count disagrees with
    vLLM's."""
    kv_blocks_total: int | None = None
    kv_blocks_free_before: int | None = None
    kv_blocks_free_after: int | None = None
    num_new: int = 0
    num_resumed: int = 0
    num_continued: int = 0
    prefill_tokens: int = 0
    """Number of tokens at positions within the prompts."""
    decode_tokens: int = 0
    """Number of tokens that are neither prompt tokens nor recomputed."""
    recomputed_tokens: int = 0
    """Number of tokens at positions that a preemption had discarded; prompt positions also count in
    ``prefill_tokens``."""
    cached_tokens: int = 0
    """Number of tokens that new and resumed requests found in a cache."""
    draft_tokens: int = 0
    output_tokens: int | None = None
    """Number of tokens that this step sampled and that were accepted; None if the output has not come back.
    """
    finished_holding: int | None = None
    """Number of finished requests whose KV blocks the scheduler still keeps."""
    deferred_free_blocks: int | None = None
    """Number of blocks of finished or preempted requests that a batch in flight may still write (vLLM 0.24
    and newer)."""
    encoder_slots_free: int | None = None
    """Encoder cache space that is neither used nor cached, in embeddings (vLLM 0.10.2 and newer). Null
    without encoder.
    """
    encoder_slots_freeable: int | None = None
    """Encoder cache space that is free, or cached but unused."""
    sessions_paused: int | None = None
    """Number of streaming sessions that wait for input (vLLM 0.15 and newer); since 0.25.1 each occupies a
    seat."""
    prefix_keys: int | None = None
    """Number of block hashes in the prefix cache; null without prefix caching."""
    kv_loads_parked: int | None = None
    """Number of requests that wait for KV blocks from elsewhere; null without a KV connector."""
    wave: int | None = None
    """Number of the wave: the period of work that all data-parallel ranks in lock-step begin and end together
    (vLLM 0.10.2 and newer)."""
    step_counter: int | None = None
    """Number of passes of this wave so far, including dummy batches; the same on all ranks. A call that
    schedules nothing is followed by a dummy batch of the same pass or, after the end of a wave, belongs to no
    pass."""
    throttle_prefills: bool | None = None
    """Argument of this call: whether to hold back new prefills while any request decodes (vLLM 0.24 and
    newer). Ranks in lock-step pass true unless ``step_counter`` is a multiple of
    ``prefill_schedule_interval``."""
    requests: list[ScheduledRequest] = []
    exits: list[Exit] = []
    caps: list[ChunkCap] = []
    """Limits that made chunks smaller, in the order in which they were applied."""
    preempted: list[Preemption] = []
    arrived: list[Arrival] = []
    """Arrivals since the last line; all of them were in the queue when this step began."""
    finished: list[Finish] = []
    """Finished requests since the last line."""
    dummy_batches: int = 0
    """Number of dummy batches that this data-parallel rank executed since the last line."""
    dummy_us: int = 0
    """Total duration of the dummy batches since the last line, in microseconds."""
    dummies: list[DummyBatch] = []
    """Dummy batches since the last line, one entry each."""
    syncs: list[RankSync] = []
    """All-reduces among ranks in lock-step since the last line (vLLM 0.10.2 and newer)."""
    controls: list[Control] = []
    """Calls to the engine since the last line: pauses, cache resets, sleep, calls to the workers."""
    kv_sends: list[KvSend] = []
    """Events since the last line that concern the KV blocks that finished requests keep until these are sent.
    """
    admitted: list[Admission] = []
    """Cache hits of requests that were scheduled for the first time."""
    refusals: list[HeadRefusal] = []
    """Refusals of KV blocks to a request other than the one refused last, with the blocks that the request
    needs and the holders of blocks."""
    kv_loads: list[KvLoad] = []
    """Events of KV loads since the last line."""
    grammars: list[Grammar] = []
    """Grammars compiled since the last line."""
    set_aside: list[SetAside] = []
    """Requests that the scheduler took out of ``running`` since the last step without freeing their KV
    blocks.
    """
    changes: RowChanges | None = None
    """Differences that a delta would contain instead of ``requests``, for checking rebuilt steps; None if a
    delta cannot express them."""


class Output(Line, tag="output", kw_only=True):
    """Output of a step whose line had to be written before the output came back."""

    step: int
    output_us: int
    update_us: int
    output_tokens: int
    execute_after_us: int | None = None
    execute_us: int | None = None


class Events(Line, tag="events", kw_only=True):
    """Events after the last step, written if no further step follows soon or the next steps are dropped."""

    at_us: int
    trial: int | None = None
    """Trial, as in ``Step``."""
    present: list[Present] = []
    """Requests in the scheduler when this file began: running ones first, then waiting ones, in the
    scheduler's order. Only a line before the first step has them."""
    arrived: list[Arrival] = []
    finished: list[Finish] = []
    dummy_batches: int = 0
    dummy_us: int = 0
    dummies: list[DummyBatch] = []
    syncs: list[RankSync] = []
    controls: list[Control] = []
    kv_sends: list[KvSend] = []
    dropped_steps: int = 0
    """Number of earlier steps without a line, because the disk was too slow; ``arrived`` and ``finished``
    hold the requests that arrived and left in them."""
    dropped_arrivals: int = 0
    """Number of requests that arrived in dropped steps but are not in ``arrived``, because there were too
    many."""
    dropped_finishes: int = 0
    """Number of requests that left in dropped steps but are not in ``finished``, because there were too
    many."""


class Cpu(Line, tag="cpu", kw_only=True):
    """Processor times of the threads of engine, workers and front end: running, and waiting for a processor.

    The times are read once a second from Linux's ``/proc/<pid>/task/<tid>/schedstat``.
    """

    at_us: int
    threads: list[ThreadTime] = []


class Notice(Line, tag="notice", kw_only=True):
    """Failure of the recorder; recording continues as far as possible."""

    at_us: int
    message: str
    stalled: Stalled | None = None
    """Period in which the engine made no progress; ``message`` is then a sentence about it."""


class End(Line, tag="end", kw_only=True):
    """Last line of a trace that was closed properly; without it, the engine was killed or still runs."""

    at_us: int
    steps: int
    """Number of ``schedule()`` calls; larger than the number of step lines if some were dropped."""
    dropped_steps: int = 0


AnyLine = Header | Step | Line | Output | Events | Cpu | Notice | End
