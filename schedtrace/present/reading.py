"""How far the reading of large traces is: a bar on a terminal, a line now and then elsewhere. On stderr."""

import atexit
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from schedtrace.present.progress import EVERY_S, print_elapsed

SOON_S = 1.0
"""What is read faster than this needs no bar."""
MB = 1_000_000


class ReadingBar:
    """A bar for one file after the other: called with the bytes done and those there are.

    Args:
        console: Where to; if it is no terminal, a line every ``EVERY_S``.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._said = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, done: int, total: int) -> None:
        """Tell how far a file is; at its end the bar goes, since what follows may be printed."""
        now = time.monotonic()
        if not self._console.is_terminal:
            if now - self._said >= EVERY_S:
                self._said = now
                how_far = f"reading: {done / MB:,.0f} of {total / MB:,.0f} MB"
                print_elapsed(self._console, now - self._began, how_far)
            return
        if now - self._began < SOON_S:
            return
        if self._bar is None:
            columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress("reading", *columns, console=self._console, transient=True)
            self._bar.add_task("")
            self._bar.start()
            atexit.register(self._stop)  # a terminal whose reading was interrupted wants its cursor back
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, refresh=True)
        if done >= total:
            self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
