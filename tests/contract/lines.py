"""Hears of every line of one function right before it runs, and of its return; in two ways."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

RETURN = 0
"""Told in place of a line."""

Told = Callable[[int, FrameType], Any]


@contextmanager
def by_settrace(code: CodeType, told: Told) -> Iterator[None]:
    """Any Python; every function that is called meanwhile costs a little time."""

    def of_any_call(frame: FrameType, *_: Any) -> Any:
        return of_our_call if frame.f_code is code else None

    def of_our_call(frame: FrameType, event: str, _: Any) -> Any:
        if event in {"line", "return"}:
            told(RETURN if event == "return" else frame.f_lineno, frame)
        return of_our_call

    before = sys.gettrace()
    sys.settrace(of_any_call)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def by_monitoring(code: CodeType, told: Told) -> Iterator[None]:
    """Python 3.12 and newer."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # Python 3.12 and newer
    lines, returns = monitoring.events.LINE, monitoring.events.PY_RETURN
    tool = next(number for number in range(6) if monitoring.get_tool(number) is None)
    monitoring.use_tool_id(tool, __name__)
    monitoring.register_callback(tool, lines, lambda _, line: told(line, sys._getframe(1)))
    monitoring.register_callback(tool, returns, lambda *_: told(RETURN, sys._getframe(1)))
    monitoring.set_local_events(tool, code, lines | returns)
    try:
        yield
    finally:
        monitoring.set_local_events(tool, code, 0)
        monitoring.register_callback(tool, lines, None)
        monitoring.register_callback(tool, returns, None)
        monitoring.free_tool_id(tool)


WAYS = [by_settrace, by_monitoring] if hasattr(sys, "monitoring") else [by_settrace]
