"""Facts other than decisions in a trace's lines: KV block holders, cache hits, prefixes, controls, times.

A field is absent where the running vLLM does not have the fact; a count of 0 is written as such.
"""

from bisect import bisect_right
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

import msgspec

Miss = Literal["skipped", "short", "not_cached", "other_group", "unknown"]
KvLoadEvent = Literal["begun", "arrived", "failed"]
KvSendEvent = Literal["begun", "ended"]
RemoteSide = Literal["prefill", "decode"]
"""Work that another engine does for a request in disaggregated prefill."""
ControlKind = Literal["pause_state", "reset_prefix_cache", "sleep", "wake_up", "collective_rpc", "add_lora"]
Role = Literal["engine", "worker", "front_end"]


class CacheGroup(msgspec.Struct, omit_defaults=True):
    """Group of layers that share a block table: ``kv_cache_config.kv_cache_groups``."""

    kind: str
    """vLLM's class of the group's spec, without ``Spec``: FullAttention, SlidingWindow, Mamba, ..."""
    block_size: int
    """Number of tokens in a block of this group."""
    layers: int
    """Number of layers in the group; their names are not recorded."""
    window: int | None = None
    """Length of the sliding window, or of the attention chunk, in tokens."""
    speculative_blocks: int | None = None
    """Number of state blocks that a Mamba group keeps for drafts."""
    cache_mode: str | None = None
    """Cache mode of a Mamba group: ``none``, ``all`` or ``align``."""
    admission_cap: int | None = None
    """Maximum number of blocks that admission counts for one request (windowed groups, vLLM 0.20 and newer).
    """
    retained_tokens: int | None = None
    """Number of tokens before a sliding window that are kept for drafts; null: none."""
    checkpoint_blocks: int | None = None
    """Number of blocks for a checkpoint in the middle of a Mamba group's prefill; 0 if this vLLM has none."""


class Admission(msgspec.Struct, omit_defaults=True):
    """Cache hits of a request when it was first scheduled."""

    request_id: str
    local_tokens: int | None = None
    """Number of tokens found in this engine's prefix cache (``Request.prefill_stats``, vLLM 0.20 and newer).
    """
    external_tokens: int | None = None
    """Number of tokens loaded by a KV connector (``Request.prefill_stats``, vLLM 0.20 and newer)."""
    full_blocks: int | None = None
    """Number of full blocks of the prompt that can be looked up; null without prefix caching and before vLLM
    0.10.2."""
    salted: bool = False
    """Whether the request has a cache salt: only prompts with the same salt can share blocks with it."""
    miss: Miss | None = None
    """Reason for a miss. ``skipped``: vLLM does no look-up for such a request (prompt logprobs, some
    pooling); ``short``: the prompt is no longer than one block; ``not_cached``: no cache group has the
    first block; ``other_group``: only some cache groups have the first block; null: a hit, or no prefix
    caching."""
    longest_tokens: int | None = None
    """Largest number of cached tokens in a cache group, if another group had fewer: a hit is as long as the
    shortest. Null: all groups had the same number, or vLLM is older than 0.32 and does not report it."""


class HeadRefusal(msgspec.Struct, omit_defaults=True):
    """Refusal of KV blocks to the head of the waiting queue, if that is not the request refused last."""

    request_id: str
    blocks_needed: list[int] = []
    """Number of blocks, by cache group, that the request needs according to vLLM's cache managers; empty if
    unknown."""
    blocks_free: int | None = None
    holders: list[str] = []
    """The 16 requests that hold the most blocks, in descending order."""
    held: list[list[int]] = []
    """Number of held blocks by cache group, then in the order of ``holders``, without null blocks. A block
    that several requests share counts for each. An empty list: the group has too many blocks to count."""
    finished_holders: list[str] = []
    """Holders that have finished, but whose blocks a KV transfer or a batch in flight keeps."""
    other_holders: int = 0
    """Number of further requests that hold blocks."""
    other_held: list[int] = []
    """Number of blocks that the holders counted in ``other_holders`` hold, by cache group."""


class KvLoad(msgspec.Struct, omit_defaults=True):
    """Event of a KV load from elsewhere, during which the request is parked."""

    request_id: str
    event: KvLoadEvent
    """``begun`` (only if exits have ``via`` ``source``); ``arrived``; ``failed``: this engine computes the
    tokens after all, or the request ends in an error, depending on ``kv_load_failure_policy``."""
    at_us: int
    """End of the step for ``begun``; otherwise the time at which the scheduler learned of the event."""
    blocks: list[int] | None = None
    """Number of blocks that the request holds while it waits, by cache group, including the null blocks of a
    windowed group."""


class KvSend(msgspec.Struct, omit_defaults=True):
    """Event that concerns the KV blocks that a finished request keeps until a KV connector has sent them."""

    request_id: str
    event: KvSendEvent
    """``begun``: the request has finished, and its blocks stay; ``ended``: vLLM is about to free the blocks.
    """
    at_us: int
    """Time of the event, as the scheduler sees it."""
    blocks: list[int] | None = None
    """Number of blocks that the request keeps, by cache group, including the null blocks of a windowed group.
    """


class Grammar(msgspec.Struct, omit_defaults=True):
    """Compilation of a structured output's grammar; the grammar itself is not recorded."""

    request_id: str
    started_us: int
    """Time at which a thread began to compile the grammar."""
    compiled_us: int
    """Time at which the compilation was done."""
    submitted_us: int | None = None
    """Time at which the engine's input thread asked for the grammar."""
    failed: bool = False
    """Whether the compilation failed, so that the request ends in an error."""


class DummyBatch(msgspec.Struct, omit_defaults=True):
    """Batch that a data-parallel rank in lock-step ran because another rank had work."""

    began_us: int
    """Time at which ``EngineCore.execute_dummy_batch`` was called."""
    took_us: int
    """Time until the call returned. On a GPU, the call launches the batch and waits for the other ranks'
    launches."""
    wave: int | None = None
    """Wave, as in ``Step``."""
    step_counter: int | None = None
    """Step counter of the batch's pass, as in ``Step``."""


class RankSync(msgspec.Struct, omit_defaults=True):
    """All-reduce in which ranks agree on whether any has unfinished requests; each waits for the others."""

    began_us: int
    """Time at which this rank entered the all-reduce."""
    took_us: int
    """Time until all ranks had entered it and the result was available."""
    wave: int
    """Wave, as in ``Step``."""
    step_counter: int
    """Step counter of the pass that ended with this all-reduce, as in ``Step``."""
    wave_ended: bool = False
    """Whether no rank had requests, so that all ranks become idle and the next wave begins with counter 0."""


class ThreadTime(msgspec.Struct, omit_defaults=True, gc=False):
    """Processor time of a thread since it began."""

    role: Role
    """``engine``: the scheduler's thread; ``worker``: main thread of a process that the engine started;
    ``front_end``: main thread of the process that started the engine."""
    pid: int
    """Id of the process."""
    tid: int
    """Id of the thread."""
    ran_us: int
    """Time on a processor."""
    waited_us: int
    """Time in which the thread was ready to run but no processor was free."""


class Control(msgspec.Struct, omit_defaults=True):
    """Operation other than a request that an operator or a client asked the engine to perform."""

    control: ControlKind
    """``pause_state``: the scheduler was paused or resumed; ``reset_prefix_cache``; ``sleep`` and
    ``wake_up``; ``collective_rpc``: the workers were called, as a weight update does; ``add_lora``."""
    at_us: int
    """Time at which the operation began."""
    took_us: int = 0
    """Time that the call took on the engine's thread."""
    detail: str | None = None
    """``pause_state``: the new state; ``collective_rpc``: the workers' method."""
    running: int | None = None
    """Number of requests that were running at the time of the operation; a reset of the prefix cache may
    preempt them (see ``preempted``)."""
    prefix_keys: int | None = None
    """Number of block hashes in the cache before a ``reset_prefix_cache``; null without prefix caching."""
    failed: bool = False
    """Whether the operation raised an error, or a reset of the prefix cache was refused because requests held
    blocks."""


class SetAside(msgspec.Struct, omit_defaults=True):
    """Request that a scheduler other than vLLM's removed from the running list without preempting it.

    The request waits from then on, until a step schedules it as ``resumed``.
    """

    request_id: str
    """Request that was removed."""
    wanted_tokens: int
    """Number of tokens of the request that are not computed yet."""
    blocks_held: int | None = None
    """Number of KV blocks that the request keeps, in all cache groups; null if the cache manager is not
    vLLM's."""


class Stalled(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Period without progress, as the engine's watchdog saw it from outside the engine's thread.

    A line is written when the watchdog notices the stall, and again with ``until_us`` when the engine
    continues.
    """

    kind: str
    """Kind of stall (``docs/watchdog.md``): ``scheduler``, ``worker``, ``ranks``, ``connector``, ``engine``,
    ``livelock``."""
    since_us: int
    """Time of the latest progress before the stall."""
    until_us: int | None = None
    """Time of the next progress; null: there was none when the line was written."""
    sentence: str
    """Cause of the stall, as in vLLM's log."""
    running: int | None = None
    """Number of requests that were running when the watchdog noticed the stall."""
    waiting: int | None = None
    """Number of requests in the waiting queues when the watchdog noticed the stall."""
    input_requests: int | None = None
    """Number of requests that the engine's process had received but its main thread had not taken: no step
    shows them. Null: unknown."""
    holders: list[str] = []
    """Lines that name the running and the waiting requests, and the holders of KV blocks."""
    stacks: list[str] = []
    """Lines of the stacks of engine and workers, without values of variables."""


class Fact(StrEnum):
    """Kind of facts that a record can contain, in the words with which a report names missing facts.

    ``Trace.facts`` holds the kinds that a record contains; every sentence, figure and exit code about the
    record depends on them.
    """

    REQUESTS = "what each request got"
    TIMES = "when steps began and ended"
    QUEUE = "queue lengths"
    EXITS = "why a step stopped"
    BLOCKS = "KV blocks"
    LIVES = "when requests came and went"
    PREEMPTIONS = "preemptions"
    CACHE = "prefix-cache hits"
    CONFIG = "the engine's settings"


ALL_FACTS = frozenset(Fact)
SHOWS_LIMITS = frozenset({Fact.REQUESTS, Fact.TIMES, Fact.QUEUE, Fact.EXITS, Fact.LIVES})
"""Facts that a record must contain to show where its requests' time went, and thus what limits the engine."""


def fact_names(facts: Iterable[Fact]) -> list[str]:
    """Return the names of facts in a fixed order."""
    wanted = {*facts}
    return [str(fact) for fact in Fact if fact in wanted]


# A prompt's prefix is recorded by marks (``Arrival.prefix_hashes``): each of the first blocks has one, and
# later blocks have marks at growing distances. A mark's hash covers its block and all earlier blocks. Two
# prompts share their prefix at least up to the last mark with equal hashes; the shared tokens beyond it are
# fewer than the distance to the next mark, at most 1/128 of the prefix.

FIRST_BLOCKS = 256
"""Number of blocks at the start of a prompt that each have a mark: 4,096 tokens in blocks of 16."""
_PER_DOUBLING = 128
"""Number of marks for each doubling of the prefix's length."""
_DOUBLINGS = 16
"""Number of doublings of the prefix's length, beyond the first blocks, for which there are marks."""
MARK_CHARACTERS = 4
"""Number of characters in ``Arrival.prefix_hashes`` per mark: three bytes in Base64."""


MARKED_BLOCKS = (
    *range(1, FIRST_BLOCKS + 1),
    *(
        (FIRST_BLOCKS << doubling) * (_PER_DOUBLING + number) // _PER_DOUBLING
        for doubling in range(_DOUBLINGS)
        for number in range(1, _PER_DOUBLING + 1)
    ),
)
"""Number of blocks up to and including each mark; the last mark is at block 16,777,216."""


def marks_within(blocks: int) -> int:
    """Count the marks of a prompt with this many full blocks."""
    return bisect_right(MARKED_BLOCKS, blocks)


def blocks_until(marks: int) -> int:
    """Return the number of blocks that this many marks cover; marks beyond the last possible one add none."""
    return MARKED_BLOCKS[min(marks, len(MARKED_BLOCKS)) - 1] if marks else 0
