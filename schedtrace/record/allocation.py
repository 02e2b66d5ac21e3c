"""Reasons why ``allocate_slots`` returned None, found by running its own code up to the allocation.

The proven source of ``allocate_slots`` is cut after its last ``return None``, without the statements that
only have side effects. The remaining code is run once more, with the arguments of the failed call, and shows
where it returns and what it has computed by then.

The methods that this code calls may still change state: a Mamba group's ``get_num_blocks_to_allocate`` sets
or deletes a checkpoint. If any of the methods might do so, the code is run on a copy of the managers with
separate containers (``apart``), which costs more and gives the same answer.

When the head of the queue is refused blocks, the module also records which requests hold blocks, and how many
blocks the head needs in each cache group.
"""

import ast
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from schedtrace.model.trace_facts import HeadRefusal
from schedtrace.record.marks import syntax
from schedtrace.record.marks.source import Proven, UnprovableError, copy_of, prove
from schedtrace.record.vllms_own import is_own, is_tested, vllm_version


def managers_of(manager: Any) -> tuple[Any, ...]:
    """Return the managers of the cache groups, in order; empty if a ``KVCacheManager`` has no such parts."""
    coordinator = getattr(manager, "coordinator", None)
    return tuple(getattr(coordinator, "single_type_managers", ()))


def blocks_of(manager: Any, request_id: str) -> list[int]:
    """Return a request's blocks by cache group, including null blocks; empty if they cannot be read."""
    tables = [part.req_to_blocks for part in managers_of(manager)]
    if not all(isinstance(table, dict) for table in tables):
        return []
    return [len(dict.get(table, request_id, ())) for table in tables]


@cache
def _only_computes(kind: Any) -> bool:
    """Return whether ``get_num_blocks_to_allocate`` changes no state.

    In every tested release, the method of vLLM's base class changes no state. Other methods, such as Mamba's,
    may.
    """
    owner = next((owner for owner in kind.__mro__ if "get_num_blocks_to_allocate" in vars(owner)), kind)
    return owner.__name__ == "SingleTypeKVCacheManager" and is_tested(vllm_version())


class StandIn(msgspec.Struct, frozen=True):
    """Stand-in for ``allocate_slots`` without its side effects."""

    ask: Any = None
    """Function that takes a manager and the arguments of ``allocate_slots``. It returns whether the check
    of the whole sequence failed, and the local variables; if there is room, it returns None."""
    refused: str | None = None
    """Reason why there is no stand-in."""


class Refusal(msgspec.Struct, gc=False):
    """Failed allocation, in numbers of KV blocks."""

    limit: str | None
    """``free``: the chunk itself does not fit. ``reserved``, ``watermark``: the chunk would fit if no blocks
    had to stay free. ``full_sequence``: the chunk would fit, but the whole sequence does not. None: unknown.
    """
    needed: int | None
    """New blocks wanted, not counting blocks that had to stay free."""
    free: int


def why_refused(manager: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Refusal | None:
    """Return why ``manager.allocate_slots`` has just returned None; None if the reason cannot be found.

    Args:
        manager: vLLM's ``KVCacheManager``.
        arguments: Positional and keyword arguments of the failed call.

    Raises:
        Exception: Any error that vLLM's own code raises when it is called again.
    """
    if (ask := question(manager)) is None:
        return None
    positional, keywords = arguments
    managers = managers_of(manager)
    pure = managers and all(map(_only_computes, map(type, managers)))
    copied = manager if pure else apart(manager)
    refusal = _refusal(manager.block_pool, ask(copied, *positional, **keywords))
    if refusal is None or refusal.limit != "full_sequence":
        return refusal
    chunk_only = {**keywords, "full_sequence_must_fit": False}
    return _refusal(manager.block_pool, ask(copied, *positional, **chunk_only)) or refusal


def question(manager: Any) -> Any:
    """Return a cache manager's ``StandIn.ask``; None unless all code that it would call is vLLM's own."""
    kind: Any = type(manager)  # hashable, as every class
    return stand_in(kind).ask if not_own(manager) is None else None


def not_own(manager: Any) -> str | None:
    """Return the class of the first part of a cache manager that is not vLLM's own; None if all parts are."""
    coordinator = getattr(manager, "coordinator", None)
    pool = getattr(manager, "block_pool", None)
    parts = (manager, coordinator, *managers_of(manager), pool)
    foreign = (type(part) for part in parts if part is not None and not is_own(part))
    return next((f"{kind.__module__}.{kind.__qualname__}" for kind in foreign), None)


def apart(manager: Any) -> Any:
    """Return a copy of a KV cache manager on which methods can be called without changing ``manager``.

    Its coordinator and the coordinator's managers are copies, and each of their containers is copied when it
    is first read. The blocks and the pool are not copied.
    """
    managers = tuple(map(_copied, managers_of(manager)))
    if not managers:
        return _copied(manager)
    return _copied(manager, coordinator=_copied(manager.coordinator, single_type_managers=managers))


_CONTAINERS = (dict, list, set, defaultdict)


def _copied(original: Any, **instead: object) -> Any:
    """Return a copy of an object whose dicts, lists and sets are also copies."""
    kind: Any = type(original)  # hashable, as every class
    copied: Any = object.__new__(_copying(kind))
    vars(copied).update({_ORIGINAL: original}, **instead)
    for name in _values(kind):
        _from_original(copied, name)
    return copied


_ORIGINAL = "_schedtrace_original"


@cache
def _copying(kind: type) -> type:
    """Return a subclass whose objects copy each attribute from the original when it is first read."""
    return type(kind.__name__, (kind,), {"__getattr__": _from_original})


def _from_original(copied: Any, name: str) -> Any:
    value = getattr(vars(copied)[_ORIGINAL], name)
    vars(copied)[name] = value = value.copy() if type(value) in _CONTAINERS else value
    return value


@cache
def _values(kind: type) -> tuple[str, ...]:
    """Return the names of the class's plain attributes, which would hide those of the original."""
    names = (name for name in dir(kind) if name[:2] != "__")
    attributes = ((name, inspect.getattr_static(kind, name)) for name in names)
    return tuple(name for name, value in attributes if not callable(value) and not hasattr(value, "__get__"))


def _refusal(pool: Any, answer: tuple[bool, dict[str, Any]] | None) -> Refusal | None:
    """Return the refusal with its limit, which is the first that leaves no room; None if there is room."""
    if answer is None:
        return None
    full_sequence, computed = answer
    free = pool.get_num_free_blocks()
    needed = computed.get("num_blocks_to_allocate")
    if (
        needed is None or needed > pool.num_gpu_blocks
    ):  # more than there are: vLLM's word for "not in this step"
        return Refusal(None, None, free)
    if full_sequence:
        return Refusal("full_sequence", needed, free)
    reserved, watermark = computed.get("reserved_blocks", 0), computed.get("watermark_blocks", 0)
    if needed > free:
        return Refusal("free", needed, free)
    if needed + reserved > free:
        return Refusal("reserved", needed, free)
    return Refusal("watermark" if needed + reserved + watermark > free else None, needed, free)


@cache
def stand_in(manager: type) -> StandIn:
    """Return the stand-in for a cache manager class; it is cached, because parsing a module is slow."""
    try:
        return StandIn(ask=_ask(prove(getattr(manager, "allocate_slots", None))))
    except Exception as error:
        reason = error if isinstance(error, UnprovableError) else repr(error)
        return StandIn(refused=f"{manager.__module__}.{manager.__qualname__}.allocate_slots: {reason}")


def _ask(proven: Proven) -> Any:
    """Return the function cut after its last ``return None``.

    Raises:
        UnprovableError: If there is no such line, or the function's closure cannot be kept.
    """
    body = proven.node.body
    failing = [n for n, statement in enumerate(body) if any(map(_fails, ast.walk(statement)))]
    if not failing:
        msg = "it does not say in its own code when it fails"
        raise UnprovableError(msg)
    proven.node.body = [
        *_without_effects(body[: failing[-1] + 1], full_sequence=False),
        ast.Return(ast.Constant(None)),
    ]
    ast.fix_missing_locations(proven.module)
    return copy_of(proven.function, proven.compiled())


def _without_effects(statements: list[ast.stmt], *, full_sequence: bool) -> list[ast.stmt]:
    remaining: list[ast.stmt] = []
    for node in statements:
        if isinstance(node, ast.If):
            within = full_sequence or "full_sequence_must_fit" in syntax.names_in(node.test)
            node.body = _without_effects(node.body, full_sequence=within) or [ast.Pass()]
            node.orelse = _without_effects(node.orelse, full_sequence=full_sequence)
        if _fails(node):
            computed = ast.Call(ast.Name("locals", ast.Load()), [], [])
            remaining.append(ast.Return(ast.Tuple([ast.Constant(full_sequence), computed], ast.Load())))
        elif not isinstance(node, ast.Expr):
            remaining.append(node)
    return remaining


def _fails(node: ast.AST) -> bool:
    """Return whether the statement is ``return None``."""
    match node:
        case ast.Return(None | ast.Constant(None)):
            return True
        case _:
            return False


MOST_HOLDERS = 16
MOST_BLOCKS_LOOKED_AT = 4096
"""Maximum number of blocks to examine in a group whose tables contain null blocks; each takes about 30 ns on
the scheduler's path."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class RefusedHead(msgspec.Struct, gc=False):
    """Plain values about a refused head, captured on the scheduler's path; ``refusal_line`` converts them."""

    request_id: str
    needed: list[int]
    free: int | None
    groups: list[tuple[list[str], list[int]]]
    """Ids of requests and their numbers of blocks, for each group; empty lists for a group with too many
    blocks to examine."""
    finished: list[str]


def refused_head(scheduler: Any, request_id: str, arguments: Arguments) -> RefusedHead | None:
    """Return the state after a request was refused blocks; None if the managers are not vLLM's.

    Raises:
        Exception: Any error that vLLM's own code raises when it is called again.
    """
    manager = scheduler.kv_cache_manager
    managers = managers_of(manager)
    if not managers or not hasattr(manager, "block_pool") or not_own(manager) is not None:
        return None
    requests = scheduler.requests
    groups = [_held(part) for part in managers]
    gone: list[str] = []
    if getattr(scheduler, "connector", None) is not None:  # only a transfer keeps their blocks
        ids = {name for of_group, _ in groups for name in of_group}
        pairs = ((name, requests.get(name)) for name in ids)
        gone = [
            name for name, request in pairs if request is None or (is_own(request) and request.is_finished())
        ]
    free = manager.block_pool.get_num_free_blocks()
    return RefusedHead(request_id, needed_by_group(manager, arguments), free, groups, gone)


def needed_by_group(manager: Any, arguments: Arguments) -> list[int]:
    """Return the number of blocks that a request needs in each group; empty if it cannot be determined.

    vLLM's own ``allocate_slots`` calls copies of the managers, and their answers are noted. They are not
    called directly, because the arguments differ between releases.
    """
    if (ask := question(manager)) is None:
        return []
    copied = apart(manager)
    managers = managers_of(copied)
    answers: list[int] = []
    for part in managers:
        part.get_num_blocks_to_allocate = _noting(part.get_num_blocks_to_allocate, answers)
    positional, keywords = arguments
    ask(copied, *positional, **keywords)
    needed = answers[-len(managers) :]
    return [] if len(needed) < len(managers) or sum(needed) > manager.block_pool.num_gpu_blocks else needed


def _noting(ask: Callable[..., int], answers: list[int]) -> Callable[..., int]:
    def noted(*args: object, **kwargs: object) -> int:
        answers.append(ask(*args, **kwargs))
        return answers[-1]

    return noted


def _held(manager: Any) -> tuple[list[str], list[int]]:
    tables = manager.req_to_blocks
    ids, lengths = list(tables), list(map(len, tables.values()))
    if type(manager).__name__ == "FullAttentionManager":  # its tables hold no null block
        return ids, lengths
    if sum(lengths) > MOST_BLOCKS_LOOKED_AT:
        return [], []
    return ids, [sum(not block.is_null for block in blocks) for blocks in tables.values()]


def refusal_line(head: RefusedHead) -> HeadRefusal:
    """Convert a refused head to its struct in the trace (on the writer's thread)."""
    held = [dict(zip(ids, counts, strict=True)) for ids, counts in head.groups]
    totals: dict[str, int] = {}
    for group in held:
        for request_id, blocks in group.items():
            totals[request_id] = totals.get(request_id, 0) + blocks
    holders = sorted(
        (name for name, blocks in totals.items() if blocks), key=totals.__getitem__, reverse=True
    )
    largest, rest = holders[:MOST_HOLDERS], holders[MOST_HOLDERS:]
    return HeadRefusal(
        request_id=head.request_id,
        blocks_needed=head.needed,
        blocks_free=head.free,
        holders=largest,
        held=[[group.get(name, 0) for name in largest] if group else [] for group in held],
        finished_holders=[name for name in largest if name in head.finished],
        other_holders=len(rest),
        other_held=[sum(group.get(name, 0) for name in rest) for group in held] if rest else [],
    )


def held_blocks(manager: Any) -> Counter[str]:
    """Return each request's total number of blocks over the cache groups of a ``KVCacheManager``.

    The function reads copies, so any thread may call it while the engine runs.
    """
    tables = [part.req_to_blocks for part in managers_of(manager)]
    held: Counter[str] = Counter()
    for table in [dict.copy(table) for table in tables if isinstance(table, dict)]:
        held.update(dict(zip(table, map(len, table.values()), strict=True)))
    return held


def blocks_without_null(manager: Any) -> int | None:
    """Return the number of KV blocks without the null block; None if the pool is unknown."""
    pool = getattr(manager, "block_pool", None)
    return None if pool is None else int(pool.num_gpu_blocks) - 1


def free_blocks(manager: Any) -> int | None:
    """Return the number of free KV blocks; None if the pool is unknown."""
    pool = getattr(manager, "block_pool", None)
    return None if pool is None else int(pool.get_num_free_blocks())
