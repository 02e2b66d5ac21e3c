"""Wrappers around methods of vLLM's classes, put in once a process and recognisable as ours."""

import functools
from collections.abc import Callable
from typing import Any

MARK = "_schedtrace_wrapped"

Method = Callable[..., Any]


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have ``around(original, self, ...)`` called in place of ``owner.name``; a second time does nothing.

    A method that this release of vLLM does not have stays away.
    """
    original: Method | None = getattr(owner, name, None)
    if original is None or hasattr(original, MARK):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapped, MARK, True)
    setattr(owner, name, wrapped)
