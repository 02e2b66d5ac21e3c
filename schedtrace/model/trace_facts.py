"""Facts in a trace line other than decisions: KV block holders, cache hits, prefixes, controls, times.

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
    """A group of layers that share a block table: ``kv_cache_config.kv_cache_groups``."""

    kind: str
    """vLLM's class of the group's spec, without ``Spec``: FullAttention, SlidingWindow, Mamba, ..."""
    block_size: int
    """Tokens in a block of this group."""
    layers: int
    """Layers in it; their names are not recorded."""
    window: int | None = None
    """Sliding window, or attention chunk, in tokens."""
    speculative_blocks: int | None = None
    """Mamba: state blocks kept for drafts."""
    cache_mode: str | None = None
    """Mamba: ``none``, ``all`` or ``align``."""
    admission_cap: int | None = None
    """Maximum number of blocks that admission counts for one request (windowed groups, vLLM 0.20 and newer).
    """
    retained_tokens: int | None = None
    """Sliding window: tokens before the window that are kept for drafts; null: none."""
    checkpoint_blocks: int | None = None
    """Mamba: blocks for a checkpoint in the middle of a prefill; 0 if this vLLM has none."""


class Admission(msgspec.Struct, omit_defaults=True):
    """Cache hits of a request when it was first scheduled."""

    request_id: str
    local_tokens: int | None = None
    """Tokens found in this engine's prefix cache (``Request.prefill_stats``, vLLM 0.20 and newer)."""
    external_tokens: int | None = None
    """Tokens loaded by a KV connector (``Request.prefill_stats``, vLLM 0.20 and newer)."""
    full_blocks: int | None = None
    """Full blocks of the prompt that can be looked up; null without prefix caching and before vLLM 0.10.2."""
    salted: bool = False
    """Whether it has a cache salt: only prompts with the same salt can share blocks with it."""
    miss: Miss | None = None
    """Reason for a miss. ``skipped``: vLLM does not look for such a request (prompt logprobs, some pooling);
    ``short``: it is no longer than one block; ``not_cached``: its first block is in no cache group;
    ``other_group``: its first block is in some cache groups only; null: found, or no prefix caching.
    """
    longest_tokens: int | None = None
    """Tokens that one of the cache groups had while another had fewer: a hit is as long as the shortest.
    Null: all groups had the same number, or vLLM is older than 0.32 and does not report it.
    """


class HeadRefusal(msgspec.Struct, omit_defaults=True):
    """Another request than before was refused KV blocks at the head of the waiting queue."""

    request_id: str
    blocks_needed: list[int] = []
    """Blocks by cache group that the request needs according to vLLM's cache managers; empty if unknown."""
    blocks_free: int | None = None
    holders: list[str] = []
    """The 16 requests that hold the most blocks, those with the most first."""
    held: list[list[int]] = []
    """Blocks by cache group, then in the order of ``holders``, without null blocks. A block that several
    requests share counts for each. An empty list: the group has too many blocks to count.
    """
    finished_holders: list[str] = []
    """Holders that have finished, but whose blocks a KV transfer or a batch in flight keeps."""
    other_holders: int = 0
    """Number of further requests that hold blocks."""
    other_held: list[int] = []
    """Blocks by cache group of the further holders."""


class KvLoad(msgspec.Struct, omit_defaults=True):
    """An event of a KV load from elsewhere, which parks its request."""

    request_id: str
    event: KvLoadEvent
    """``begun`` (only if exits have ``via`` ``source``); ``arrived``; ``failed``: it is computed here after
    all, or the request ends in an error, as ``kv_load_failure_policy`` says.
    """
    at_us: int
    """End of the step for ``begun``; otherwise the time at which the scheduler learned of the event."""
    blocks: list[int] | None = None
    """Blocks that the request holds while it waits, by cache group; a windowed group's null blocks count."""


class KvSend(msgspec.Struct, omit_defaults=True):
    """An event of the KV blocks that a finished request keeps until a KV connector has sent them."""

    request_id: str
    event: KvSendEvent
    """``begun``: the request is finished, and its blocks stay; ``ended``: vLLM is about to free them."""
    at_us: int
    """Time of the event, as the scheduler sees it."""
    blocks: list[int] | None = None
    """Blocks that it keeps, by cache group; a windowed group's null blocks count."""


class Grammar(msgspec.Struct, omit_defaults=True):
    """The compilation of a structured output's grammar; the grammar itself is not recorded."""

    request_id: str
    started_us: int
    """Time at which a thread began to compile it."""
    compiled_us: int
    """Time at which the compilation was done."""
    submitted_us: int | None = None
    """Time at which the engine's input thread asked for it."""
    failed: bool = False
    """Whether the compilation failed, so that the request ends in an error."""


class DummyBatch(msgspec.Struct, omit_defaults=True):
    """A batch that a data-parallel rank in lock-step ran because another rank had work."""

    began_us: int
    """Time at which ``EngineCore.execute_dummy_batch`` was called."""
    took_us: int
    """Time until it returned. On a GPU this is the launch, which waits for the other ranks' launches."""
    wave: int | None = None
    """Wave, as in ``Step``."""
    step_counter: int | None = None
    """Step counter of its pass, as in ``Step``."""


class RankSync(msgspec.Struct, omit_defaults=True):
    """An all-reduce in which the ranks agree on whether any has unfinished requests; each waits for all."""

    began_us: int
    """Time at which this rank entered the all-reduce."""
    took_us: int
    """Time until all ranks had entered it and the result was available."""
    wave: int
    """Wave, as in ``Step``."""
    step_counter: int
    """Step counter of the pass that ended with it, as in ``Step``."""
    wave_ended: bool = False
    """Whether no rank had requests: all ranks become idle, and the next wave begins with counter 0."""


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
    """Time ready to run while no processor was free."""


class Control(msgspec.Struct, omit_defaults=True):
    """Operation other than a request that an operator or a client asked the engine to perform."""

    control: ControlKind
    """``pause_state``: the scheduler was paused or resumed; ``reset_prefix_cache``; ``sleep`` and
    ``wake_up``; ``collective_rpc``: the workers were called, as a weight update does; ``add_lora``."""
    at_us: int
    """Time at which it began."""
    took_us: int = 0
    """Time that the call took on the engine's thread."""
    detail: str | None = None
    """``pause_state``: the new state; ``collective_rpc``: the workers' method."""
    running: int | None = None
    """Requests that ran then: a reset of the prefix cache may preempt them, see ``preempted``."""
    prefix_keys: int | None = None
    """``reset_prefix_cache``: block hashes that the cache knew before; null without prefix caching."""
    failed: bool = False
    """Whether it raised, or a reset of the prefix cache was refused because requests held blocks."""


class SetAside(msgspec.Struct, omit_defaults=True):
    """A request that a scheduler other than vLLM's removed from the running list without preempting it.

    It waits from then on, until a step schedules it as ``resumed``.
    """

    request_id: str
    """Request that was removed."""
    wanted_tokens: int
    """Tokens of the request that are not computed."""
    blocks_held: int | None = None
    """KV blocks that it keeps, in all cache groups; null if the cache manager is not vLLM's."""


class Stalled(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Period without progress, as the engine's watchdog saw it from outside the engine's thread.

    It is written when it is noticed, and again with ``until_us`` when the engine continues.
    """

    kind: str
    """``scheduler``, ``worker``, ``ranks``, ``connector``, ``engine``, ``livelock``: ``docs/watchdog.md``."""
    since_us: int
    """Time of the latest progress before it."""
    until_us: int | None = None
    """Time of the next progress; null: there was none when the line was written."""
    sentence: str
    """Cause of the stall, as in vLLM's log."""
    running: int | None = None
    """Requests that ran when it was noticed."""
    waiting: int | None = None
    """Requests in the waiting queues then."""
    input_requests: int | None = None
    """Requests that the engine's process had received but its main thread had not taken: no step shows them.
    Null: unknown.
    """
    holders: list[str] = []
    """Lines that name the running and the waiting requests, and the holders of KV blocks."""
    stacks: list[str] = []
    """Lines of the stacks of engine and workers, without values of variables."""


class Fact(StrEnum):
    """A kind of facts that a record can hold, in the words in which a report names it where it is absent.

    ``Trace.facts`` has those of a record: every sentence, figure and exit code about it asks there.
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
"""Facts a record must hold to show where its requests' time went, and hence what limits an engine."""


def fact_names(facts: Iterable[Fact]) -> list[str]:
    """Return the names of facts, always in the same order."""
    wanted = {*facts}
    return [str(fact) for fact in Fact if fact in wanted]


# A prompt's prefix is recorded by marks (``Arrival.prefix_hashes``): each of the first blocks has one, and
# later blocks have marks at growing distances. A mark's hash covers its block and all earlier blocks. Two
# prompts share their prefix at least up to the last mark with equal hashes; the shared tokens beyond it are
# fewer than the distance to the next mark, at most 1/128 of the prefix.

FIRST_BLOCKS = 256
"""Number of blocks at the start of a prompt with a mark each: 4,096 tokens in blocks of 16."""
_PER_DOUBLING = 128
"""Number of marks each time the length of the prefix doubles."""
_DOUBLINGS = 16
"""Number of doublings beyond the first blocks that have marks."""
MARK_CHARACTERS = 4
"""Number of characters in ``Arrival.prefix_hashes`` per mark: three bytes in Base64."""


def _marked_blocks() -> tuple[int, ...]:
    marked = [*range(1, FIRST_BLOCKS + 1)]
    for doubling in range(_DOUBLINGS):
        step = (FIRST_BLOCKS << doubling) // _PER_DOUBLING
        marked += [marked[-1] + step * number for number in range(1, _PER_DOUBLING + 1)]
    return tuple(marked)


MARKED_BLOCKS = _marked_blocks()
"""Number of blocks up to and including each mark; the last mark is at block 16,777,216."""


def marks_within(blocks: int) -> int:
    """Count the marks of a prompt with this many full blocks."""
    return bisect_right(MARKED_BLOCKS, blocks)


def blocks_until(marks: int) -> int:
    """Return the number of blocks that this many marks cover, at most as many as the last mark covers."""
    return MARKED_BLOCKS[min(marks, len(MARKED_BLOCKS)) - 1] if marks else 0
