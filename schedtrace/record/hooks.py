"""Wrappers around methods of vLLM's classes, installed once per process and marked as schedtrace's."""

import functools
from collections.abc import Callable
from typing import Any

MARK = "_schedtrace_wrapped"
"""Attribute of a wrapper with the names of all functions around the original."""

INHERITED = "_schedtrace_inherited"
"""Attribute of a wrapper that states whether its class had inherited the original."""

Method = Callable[..., Any]


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` with a wrapper that calls ``around(original, self, ...)``.

    A second call with the same function does nothing; a different function is wrapped around the first one. A
    method that this release of vLLM lacks is not added.
    """
    original: Method | None = getattr(owner, name, None)
    inside: tuple[str, ...] = getattr(original, MARK, ())
    called = f"{around.__module__}.{around.__qualname__}"
    if original is None or called in inside:
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: object, **kwargs: object) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapped, MARK, (*inside, called))
    setattr(wrapped, INHERITED, name not in vars(owner))
    setattr(owner, name, wrapped)


def unwrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Remove the wrapper with ``around``, unless another wrapper has been installed around it."""
    wrapped = vars(owner).get(name)
    if getattr(wrapped, MARK, ())[-1:] != (f"{around.__module__}.{around.__qualname__}",):
        return
    if getattr(wrapped, INHERITED):
        delattr(owner, name)
    else:
        setattr(owner, name, wrapped.__wrapped__)  # functools.wraps has set it
