"""Progress of a run on stderr: bars on a terminal, plain lines elsewhere."""

import atexit
import threading
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from schedtrace.diagnose.serving_metrics import throughput
from schedtrace.model.printable import visible

if TYPE_CHECKING:  # reading a trace needs no engine
    from schedtrace.engine.plan import Plan
    from schedtrace.model.manifest import TrialResult

EVERY_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""
SOON_S = 1.0
"""Seconds of reading before a bar is shown."""
MB = 1_000_000


class _CountedBars:
    """Bars that show the number of finished items and the time taken; nothing without a terminal.

    Args:
        console: Console to print on.
        text: Text before each bar, in rich's format of a task.
        shown: Whether to show the bar in a terminal.
    """

    def __init__(self, console: Console, text: str, *, shown: bool = True) -> None:
        self._console = console
        self._start = time.monotonic()
        columns = (TextColumn(text, markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        disable = not (shown and console.is_terminal)
        self._bars = Progress(*columns, console=console, transient=True, disable=disable)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


class RunProgress(_CountedBars):
    """Observer of a run (``engine.execute.Observer``) that shows its progress to a user.

    Args:
        console: Console to print on; without a terminal, bars are left out.
        several: Whether there are several runs, so that each line must name its run.
    """

    def __init__(self, console: Console, *, several: bool) -> None:
        super().__init__(console, "{task.description}")
        self._several = several
        self._said = self._start
        self._tasks: dict[str, TaskID] = {}

    def phase(self, plan: "Plan", name: str) -> None:
        self._say(plan, name)

    def progress(self, plan: "Plan", trial: int, finished: int, total: int) -> None:
        task = self._tasks.get(plan.label)
        label = f"{plan.label}: " if self._several else ""
        text = visible(label + self._trial(plan, trial))
        if task is None:
            self._tasks[plan.label] = self._bars.add_task(text, total=total, completed=finished)
        else:
            self._bars.update(task, description=text, total=total, completed=finished)
        if not self._console.is_terminal and time.monotonic() - self._said >= EVERY_S:
            self._say(plan, f"{self._trial(plan, trial)}: {finished} of {total} requests")

    def trial_done(self, plan: "Plan", result: "TrialResult") -> None:
        elapsed = max(result.elapsed_s, 1e-9)
        rate, total, output = throughput(
            result.num_requests, result.input_tokens, result.output_tokens, elapsed
        )
        self._say(
            plan,
            f"{self._trial(plan, result.trial)}: {result.num_requests} requests in {result.elapsed_s:.2f} s, "
            f"{rate:.2f} requests/s, {total:,.0f} total tokens/s, {output:,.0f} output tokens/s",
        )

    def _say(self, plan: "Plan", text: str) -> None:
        self._said = time.monotonic()
        label = f"{plan.label}: " if self._several else ""
        print_elapsed(self._console, self._said - self._start, label + text)

    @staticmethod
    def _trial(plan: "Plan", trial: int) -> str:
        return "warm-up" if trial == 0 else f"trial {trial}/{plan.spec.trials}"


class CountBar(_CountedBars):
    """Progress of several items, with the time taken; to be called with the number done and the total.

    It shows a bar on a terminal, and elsewhere prints a line every ``EVERY_S`` seconds, even if no item is
    finished.

    Args:
        console: Console to print on.
        text: Text that names the work.
        counted: Whether the number is known; otherwise only the time is shown, without a bar.
    """

    def __init__(self, console: Console, text: str, *, counted: bool = True) -> None:
        super().__init__(console, text, shown=counted)
        self._text, self._count = text, ""
        self._task = self._bars.add_task("", total=None)
        self._over = threading.Event()
        self._lines = threading.Thread(target=self._say, daemon=True)

    def __enter__(self) -> Self:
        if not self._console.is_terminal:
            self._lines.start()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        super().__exit__()

    def __call__(self, done: int, total: int) -> None:
        self._count = f": {done} of {total}"
        self._bars.update(self._task, completed=done, total=total, refresh=True)

    def _say(self) -> None:
        while not self._over.wait(EVERY_S):
            print_elapsed(self._console, time.monotonic() - self._start, self._text + self._count)


def print_elapsed(console: Console, elapsed_s: float, text: str) -> None:
    """Print a line with the time taken so far: ``[  10.0 s] reading: 512 of 1,024 MB``."""
    console.print(f"[{elapsed_s:6.1f} s] {visible(text)}", soft_wrap=True)


class ReadingBar:
    """Bar for files that are read one after another; to be called with the bytes done and the total.

    Args:
        console: Console to print on; without a terminal, a line every ``EVERY_S``.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._said = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def __call__(self, done: int, total: int) -> None:
        """Show the progress; remove the bar when all is read, because other output may follow."""
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
