"""Which objects are vLLM's own: only of these it is known what a call on them does.

Recording may call nothing that has an effect. That was read in vLLM's source, release by release. A class
from elsewhere, or one of vLLM's with a method from elsewhere, may do anything when it is asked, so it is not.
"""

import sys
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

_BASES = frozenset({"abc", "builtins", "collections", "enum", "typing"})
"""Modules of Python whose classes vLLM's derive from."""
_PACKAGES = frozenset({"vllm", "schedtrace"})


def is_own(thing: Any) -> bool:
    """Whether its class is vLLM's or schedtrace's, and no method of it is replaced, nor put on the object."""
    kind: Any = type(thing)  # hashable, as every class
    return is_own_class(kind) and vars(thing).keys().isdisjoint(_methods(kind))


def is_own_class(kind: Any) -> bool:
    """Whether files of vLLM or schedtrace made a class, its bases and every method of them.

    Found out once for each class: what replaces a method later than that is not noticed.
    """
    return _is_own_class(kind)


@cache
def _is_own_class(kind: type) -> bool:
    homes = _homes()
    return all(_is_own_owner(owner, homes) for owner in kind.__mro__)


def is_own_function(function: Any) -> bool:
    """Whether it was compiled from a file of vLLM or schedtrace."""
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith(_homes())


@cache
def _methods(kind: Any) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def _is_own_owner(owner: type, homes: tuple[str, ...]) -> bool:
    if owner.__module__ in _BASES:
        return True
    return owner.__module__.partition(".")[0] in _PACKAGES and all(
        _is_own_member(member, homes) for member in vars(owner).values()
    )


def _is_own_member(member: Any, homes: tuple[str, ...]) -> bool:
    """Whether this is no function from another file; what Python itself generates has no file."""
    parts = (member, *(getattr(member, name, None) for name in ("__func__", "fget", "fset", "func")))
    files = (part.__code__.co_filename for part in parts if isinstance(part, FunctionType))
    return all(file.startswith((*homes, "<")) for file in files)


@cache
def _homes() -> tuple[str, ...]:
    """The folders of the packages, and the files of Python that give methods to other classes."""
    found = []
    for name in (*_PACKAGES, "abc", "dataclasses", "enum", "typing"):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            found.append(f"{Path(file).parent}/" if file.endswith("__init__.py") else file)
    return tuple(found)
