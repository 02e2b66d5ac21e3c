"""Whether a cache manager only computes when it is asked for its need: told from its methods' byte code.

Anything that is not recognised counts as an effect: then the manager is copied before it is asked, which
costs more and is right as well.
"""

import dis
import inspect
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

_EFFECTS = frozenset(
    {"STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_DEREF"}
    | {"DELETE_ATTR", "DELETE_SUBSCR", "DELETE_GLOBAL", "IMPORT_NAME"}
)
_FUNCTIONS = frozenset({"cdiv", "max", "min", "sum", "len", "int", "bool", "isinstance", "AssertionError"})
_READ = frozenset({"get", "ref_cnt", "is_null"})
"""Attributes of blocks, and the one method of a dict that does not make an entry."""


def only_computes(manager: Any) -> bool:
    """Whether ``manager.get_num_blocks_to_allocate`` surely leaves everything as it is."""
    plain = frozenset(name for name, value in vars(manager).items() if not callable(value))
    if len(plain) < len(vars(manager)):
        return False  # somebody has put a method on the object itself
    kind: Any = type(manager)  # hashable, as every class
    return _only_computes(kind, plain)


@cache
def _only_computes(kind: type, attributes: frozenset[str]) -> bool:
    try:
        return _pure(kind, "get_num_blocks_to_allocate", attributes, set())
    except Exception:  # whatever it is, it is not known to be harmless
        return False


def _pure(kind: type, name: str, attributes: frozenset[str], seen: set[str]) -> bool:
    if name in seen:
        return True
    seen.add(name)
    member = inspect.getattr_static(kind, name)
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    if not isinstance(function, types.FunctionType):
        return False
    for code in _codes(function.__code__):
        if not _harmless(code):
            return False
        for used in code.co_names:
            if used in attributes or used in _READ or used in _FUNCTIONS:
                continue
            if not hasattr(kind, used) or not (_is_value(kind, used) or _pure(kind, used, attributes, seen)):
                return False
    return True


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _harmless(code: types.CodeType) -> bool:
    """No store, and no subscript but slices: a subscript makes an entry in a ``defaultdict``."""
    before = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _EFFECTS:
            return False
        if instruction.opname == "BINARY_SUBSCR" and before != "BUILD_SLICE":
            return False
        before = instruction.opname
    return True


def _is_value(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name), bool | int | str | type(None))
