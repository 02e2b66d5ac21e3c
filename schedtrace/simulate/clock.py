"""A clock that vLLM and the recorder read, on which time passes only when a simulation says so."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

READERS = ("vllm.v1", "schedtrace.record")
"""Packages whose modules read the virtual clock: the engine's core and the recorder."""


class VirtualClock:
    """Stands in for the module ``time`` of ``READERS`` while it is entered; nothing sleeps.

    All its clocks read 0 at the start, the wall clock too: traces of several simulations line up.
    """

    virtual = True
    """Tells the recorder that these are not a machine's times."""

    def __init__(self) -> None:
        self.now_us: float = 0.0
        self._replaced: list[Any] = []

    def __enter__(self) -> Self:
        self._replaced = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith(READERS) and getattr(module, "__dict__", {}).get("time") is time
        ]
        for module in self._replaced:
            module.time = self
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._replaced:
            module.time = time
        self._replaced.clear()

    def __getattr__(self, name: str) -> Any:
        """What does not read a clock: ``strftime``, ..."""
        return getattr(time, name)

    def advance(self, us: float) -> None:
        """Let time pass."""
        self.now_us += us

    def sleep(self, seconds: float) -> None:
        """Let time pass; 0 only hands the interpreter over, and other threads may do so."""
        if seconds:
            self.advance(1e6 * seconds)
        else:
            time.sleep(0)

    def until(self, us: float) -> None:
        """Let time pass up to a moment; no time, if it is over."""
        self.now_us = max(self.now_us, us)

    @contextmanager
    def at(self, us: float) -> Iterator[None]:
        """Read this moment, for what another thread does while a step runs."""
        now, self.now_us = self.now_us, us
        try:
            yield
        finally:
            self.now_us = now

    def monotonic_ns(self) -> int:
        """Nanoseconds since the start."""
        return round(self.now_us * 1000)

    def monotonic(self) -> float:
        """Seconds since the start."""
        return self.now_us / 1e6

    time_ns = perf_counter_ns = monotonic_ns
    time = perf_counter = monotonic
