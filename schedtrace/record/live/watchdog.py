"""Watchdog, which logs when an engine stops making progress, why, and when it continues.

A separate thread looks at the engine once a second and adds nothing to the path of a step. Only to describe a
stall does it collect more: the exits of a call during the stall (if the engine is recorded, or if
``SCHEDTRACE_WATCHDOG=explain`` permits a brief recording, ``attachment.py``), then the holders, then the
stacks. See ``docs/watchdog.md``.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from schedtrace.model.live import socket_of
from schedtrace.model.printable import visible
from schedtrace.model.trace import Exit
from schedtrace.model.trace_facts import Stalled
from schedtrace.record import queues
from schedtrace.record.live.control_socket import worker_stacks
from schedtrace.record.live.engine_progress import Calls, Movement, has_work
from schedtrace.record.live.stall_causes import (
    StallCause,
    ThreadPlace,
    holders,
    is_paused,
    stacks_here,
    stall_cause,
    thread_place,
)
from schedtrace.record.log import logger
from schedtrace.record.processes import (
    ProcessorWaits,
    Threads,
    children,
    own_wait_s,
    thread_states,
    threads_of,
)
from schedtrace.record.queues import Queues
from schedtrace.record.settings import hides_ids
from schedtrace.record.switches import NO, YES, environment_value
from schedtrace.record.written_ids import WrittenIds

VARIABLE = "SCHEDTRACE_WATCHDOG"
EXPLAIN = "explain"
AFTER_S = 10.0
EVERY_S = 1.0
END_S = 1.0
"""Seconds to wait for a check in progress when the engine ends."""
ABSENT_S = 3 * EVERY_S
"""Delay of a check, in seconds, above which the whole process counts as having been stopped."""
MOST_FAILED = 60
"""Number of consecutive failed checks after which the watchdog gives up."""
STACKS_EVERY_S = 600.0
"""Minimum seconds until a process's stacks are written again for the same kind of stall at the same place,
because an engine may stall with every long prompt."""
STARVED_EVERY_S = 600.0
"""Minimum seconds until the log repeats that the engine waits for a processor."""
SAME_FRAMES = 3
"""Number of innermost functions of a process's main thread by which places are distinguished."""
MOST_STACK_LINES = 400
"""Maximum number of lines of stacks in a trace."""
HELD_UP = ("worker", "ranks", "engine")
"""Kinds of stalls during which no step ends."""
MORE = f"schedtrace queue {{pid}} names the limit; with {VARIABLE}={EXPLAIN} the watchdog does so itself"
log = logging.getLogger("vllm.schedtrace")
"""Logger that has vLLM's handlers, level and format."""

_T = TypeVar("_T")
Causes = Callable[[], list[Exit]]
Ids = Callable[[], WrittenIds]
"""Function that returns the current written form of request ids."""
Snapshot = Callable[[str], str]
"""Function that saves the data from before a stall, given the stall's kind; returns a line about the saved
data, or an empty text."""
Note = Callable[[Stalled], None]
"""Function that writes a stall into the trace if there is one; times are microseconds of the monotonic clock.
"""


def after_s() -> float | None:
    """Return the seconds without progress that count as a stall; None if the watchdog is off.

    Raises:
        ValueError: If the variable contains anything but ``on``, ``off``, ``explain`` and one time.
    """
    text, *more = [part for part in _asked() if part != EXPLAIN] or ["on"]
    if more:
        msg = f"{text},{','.join(more)}: one time at most"
        raise ValueError(msg)
    if text in NO:
        return None
    if text in YES - {"1"}:
        return AFTER_S
    seconds = float(text.removesuffix("s"))
    if not seconds >= EVERY_S:
        msg = f"{text}: at least {EVERY_S:g} s"
        raise ValueError(msg)
    return seconds


def explains() -> bool:
    """Return whether the watchdog may make a brief recording in order to explain a stall."""
    return EXPLAIN in _asked()


def _asked() -> list[str]:
    return [part.strip() for part in environment_value(VARIABLE).lower().split(",") if part.strip()]


class Watchdog:
    """Watchdog of one engine; ``check`` is called about once a second.

    Args:
        engine: vLLM's ``EngineCore``.
        place: Function that returns the place of the engine's thread.
        causes: Function that returns the exits of a ``schedule()`` call during the stall; if it raises, the
            exits are unknown.
        after_s: Seconds without progress after which a stall is reported.
        snapshot: See ``Snapshot``.
        stacks: Function that returns the stacks of this process and its workers, by the name of each process.
        ids: Written form of request ids; by default, the form that the server's settings state.
        note: See ``Note``.
        threads: Function that returns the states of the threads that a step needs, given the place of the
            engine's thread; none by default.
        own_wait_s: Function that returns how long the watchdog's thread has waited for a processor so far.
    """

    def __init__(
        self,
        engine: Any,
        place: Callable[[], ThreadPlace | None],
        causes: Causes,
        after_s: float = AFTER_S,
        snapshot: Snapshot | None = None,
        stacks: Callable[[], dict[str, list[str]]] | None = None,
        ids: Ids | None = None,
        note: Note | None = None,
        threads: Callable[[ThreadPlace | None], Threads] | None = None,
        own_wait_s: Callable[[], float] = own_wait_s,
    ) -> None:
        self._engine, self._place, self._causes = engine, place, causes
        self._after_s, self._snapshot = after_s, snapshot
        self._stacks = stacks or (lambda: {"engine": stacks_here().splitlines(), **worker_stacks()})
        self._note, self._threads = note, threads or (lambda _place: {})
        self._own_wait_s = own_wait_s
        self._waited_s = 0.0
        """Time that the watchdog's thread had waited for a processor at the latest check."""
        self._queues = Queues(engine.scheduler)
        self._movement = Movement()
        self._ids = ids or (lambda: WrittenIds(hash_ids=hides_ids()))
        self._places: list[ThreadPlace] = []
        """Places of the engine's thread at each check since the latest progress."""
        self._calls = Calls()
        self._waits: ProcessorWaits | None = None
        """Waits for a processor since the latest progress; None if the latest check saw progress."""
        self._starved_said_s = -STARVED_EVERY_S
        self._moved_s: float | None = None
        self._looked_s = 0.0
        self._paused = False
        self._reported: StallCause | None = None
        self._reported_since_s = 0.0
        self._reported_hashed = False
        """Whether the ids in the reported sentence are hashes."""
        self._unexplained = False
        """Whether calls of ``schedule()`` schedule nothing, and none of these calls has been examined yet."""
        self._stacks_s: dict[tuple[str, ...], float] = {}
        """Times at which stacks were written, by kind of stall, process and place."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="schedtrace-watchdog", daemon=True)

    def start(self) -> None:
        """Start checking once a second, on a separate thread that never raises an error into its process."""
        self._thread.start()

    def close(self) -> None:
        """Stop checking; wait briefly for a check in progress."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(END_S)

    def _watch(self) -> None:
        failed = 0
        while not self._closed.wait(EVERY_S):
            try:
                self.check(time.monotonic())
                failed = 0
            except Exception as error:  # a container changed while it was read, or this vLLM is another
                failed += 1
                logger.trace("schedtrace: the watchdog could not look: {!r}", error)
                if failed == MOST_FAILED:
                    logger.warning("schedtrace: the watchdog gives up: {!r}", error)
                    return

    @property
    def stalled_s(self) -> float | None:
        """Seconds that the reported stall has lasted; None if there is none, or the engine is paused."""
        return None if self.stall is None else self._looked_s - self._reported_since_s

    @property
    def stall(self) -> StallCause | None:
        """Reported stall; None if there is none, or the engine is paused."""
        reported = self._reported
        return None if reported is None or reported.kind == "paused" else reported

    @property
    def progress_age_s(self) -> float | None:
        """Seconds from the last check that saw progress or no work to the latest check; None before any."""
        return None if self._moved_s is None else self._looked_s - self._moved_s

    @property
    def starvation(self) -> str | None:
        """Sentence about an engine that is slow because it waits for a CPU; None if it is not."""
        age_s = self.progress_age_s
        if self._reported is not None or self._waits is None or age_s is None or age_s < self._after_s:
            return None
        return f"waits for a processor ({self._waits.waited_s:,.0f} of the last {age_s:,.0f} s)"

    def check(self, now_s: float) -> None:
        """Compare the engine with its state at the last check; report the beginning and end of stalls.

        Args:
            now_s: Time of a monotonic clock in seconds.
        """
        scheduler = self._engine.scheduler
        paused = is_paused(self._engine)
        moved = self._movement.has_progressed(scheduler, now_s) or paused != self._paused
        self._paused = paused
        working = has_work(self._engine, self._queues)
        interval_s, self._looked_s = now_s - self._looked_s, now_s
        own_wait_s, self._waited_s = (total_s := self._own_wait_s()) - self._waited_s, total_s
        self._calls.count_calls(scheduler, now_s)
        if moved or not working or self._moved_s is None:
            self._moved_s, self._waits = now_s, None
            self._calls.note_progress()
            self._places.clear()
        else:
            # Time in which the whole process was stopped; in other time, a thread can wait for a processor.
            late_s = interval_s - EVERY_S - own_wait_s
            absent_s = late_s if late_s > ABSENT_S else 0.0
            self._moved_s += absent_s
            self._look_at_threads(now_s, interval_s - absent_s)
        waited_s = 0.0 if self._waits is None else self._waits.waited_s
        circling = self._movement.circling(now_s, self._after_s)
        if now_s - self._moved_s - waited_s >= self._after_s:
            since_s, cause = self._moved_s, self._cause
        elif circling is not None and working:
            request_id, circle = circling
            since_s, cause = circle.since_s, lambda: circle.livelock(self._ids()[request_id])
        else:
            self._ended(now_s, working=working)
            starved = self.starvation
            if starved is not None and now_s - self._starved_said_s >= STARVED_EVERY_S:
                self._starved_said_s = now_s
                begin = f"schedtrace: no step has made progress for {self.progress_age_s:.0f} s"
                log.warning("%s: the engine %s", begin, starved)
            return
        if self._reported is None:
            self._reported_hashed = self._ids().hash_ids
            self._reported, self._reported_since_s = cause(), since_s
            self._report(self._reported, now_s)

    def _look_at_threads(self, now_s: float, interval_s: float) -> None:
        """Note where the engine's thread is, and whether threads that its step needs wait for a processor.

        If calls of ``schedule()`` continue but schedule nothing, a wait for a processor is not the reason.
        """
        place = self._place()
        if place is not None:
            self._places.append(place)
        if self._waits is None:
            self._waits = ProcessorWaits(lambda: self._threads(self._places[-1] if self._places else None))
        self._waits.look(now_s, interval_s, counts=not self._steps)

    @property
    def _steps(self) -> bool:
        """Whether ``schedule()`` is called repeatedly."""
        if self._calls.number is not None:
            return self._calls.goes_on
        places = {place.at for place in self._places}
        return len(places) > 1 or "between" in places

    def _cause(self) -> StallCause:
        calls, steps = self._calls, self._steps
        exits: list[Exit] = []
        if steps:
            try:
                exits = self._causes()
            except Exception as error:
                logger.trace("schedtrace: the causes of a stall are not known: {!r}", error)
        self._unexplained = steps and not exits
        return stall_cause(
            self._engine,
            self._places,
            calls=calls.since_progress if steps else None,
            call_s=calls.still_s(self._looked_s),
            steps=steps,
            exits=exits,
            ids=self._ids(),
        )

    def _report(self, stall: StallCause, now_s: float) -> None:
        begin = f"schedtrace: no step has made progress for {now_s - self._reported_since_s:.0f} s: "
        if stall.kind == "paused":
            log.info("%s", visible(f"{begin}{stall.sentence}"))
            return
        held: list[str] = _attempt(lambda: holders(self._engine, self._ids()), [], "this")
        stacks: dict[str, list[str]] = _attempt(self._stacks, {}, "stacks")
        if self._note is not None:
            with suppress(Exception):  # the log has it
                scheduler = self._engine.scheduler
                sentence, noted_holders = self._as_now_asked(stall, held)
                self._note(
                    Stalled(
                        kind=stall.kind,
                        since_us=int(self._reported_since_s * 1e6),
                        sentence=sentence,
                        running=len(scheduler.running),
                        waiting=self._queues.num_waiting_seen_from_outside(scheduler),
                        input_requests=queues.num_in_input_queue(self._engine),
                        holders=noted_holders,
                        stacks=[line for stack in stacks.values() for line in stack][:MOST_STACK_LINES],
                    )
                )
        lines = [f"{begin if stall.kind != 'livelock' else 'schedtrace: '}{stall.sentence} [{stall.kind}]"]
        if self._unexplained and stall.kind == "scheduler":
            lines.append(MORE.format(pid=os.getpid()))
        lines += held
        if self._snapshot is not None:
            take = self._snapshot
            lines += _attempt(lambda: [about] if (about := take(stall.kind)) else [], [], "this")
        for process, stack in stacks.items():
            key = (stall.kind, process, *_functions(stack))
            if now_s - self._stacks_s.get(key, -STACKS_EVERY_S) >= STACKS_EVERY_S:
                self._stacks_s[key] = now_s
                lines += stack
        log.warning("%s", "\n  ".join(map(visible, lines)))

    def _as_now_asked(self, stall: StallCause, held: list[str]) -> tuple[str, list[str]]:
        """Return the sentence and the holders, without ids that must be hashed by now but are not."""
        if self._ids().hash_ids and not self._reported_hashed:
            return f"no step makes progress ({stall.kind})", []
        return stall.sentence, held

    def _ended(self, now_s: float, *, working: bool) -> None:
        reported, self._reported = self._reported, None
        if reported is None:
            return
        how = "the engine goes on" if working else "nobody waits any more"
        if self._note is not None and reported.kind != "paused":
            with suppress(Exception):
                self._note(
                    Stalled(
                        kind=reported.kind,
                        since_us=int(self._reported_since_s * 1e6),
                        until_us=int((self._moved_s or now_s) * 1e6),
                        sentence=self._as_now_asked(reported, [])[0],
                    )
                )
        level = logging.INFO if reported.kind == "paused" else logging.WARNING
        log.log(level, "schedtrace: %s after %.0f s [%s]", how, now_s - self._reported_since_s, reported.kind)


def make_watchdog(
    engine: Any,
    thread: int,
    causes: Causes,
    snapshot: Snapshot | None = None,
    ids: Ids | None = None,
    note: Note | None = None,
) -> Watchdog | None:
    """Return a watchdog for an engine and its thread; None if it is switched off or impossible."""
    try:
        seconds = after_s()
        if seconds is None:
            return None
        own = next((each.native_id for each in threading.enumerate() if each.ident == thread), None)
        watchdog = Watchdog(
            engine,
            lambda: thread_place(thread),
            causes,
            seconds,
            snapshot,
            ids=ids,
            note=note,
            threads=partial(step_threads, own),
        )
        watchdog.start()
    except Exception as error:
        logger.warning("schedtrace: no watchdog ({}): {}", VARIABLE, error)
        return None
    return watchdog


def step_threads(own: int | None, place: ThreadPlace | None) -> Threads:
    """Return the states of the threads that a step needs.

    These are the engine's thread, all threads of its workers and, if the engine waits for other data-parallel
    ranks, all threads of the ranks that the same process started.

    Args:
        own: Id that Linux gives the engine's thread; None if it is not known.
        place: Place of the engine's thread.
    """
    pid = os.getpid()
    processes = children(pid)
    if place is not None and place.at == "ranks":
        for rank in children(os.getppid()):
            if rank != pid and socket_of(rank, os.geteuid()).exists():
                processes += [rank, *children(rank)]
    return thread_states([*([] if own is None else [(pid, own)]), *threads_of(processes)])


_LINE_NUMBER = re.compile(r", line \d+ ")


def _functions(stack: list[str]) -> list[str]:
    """Return the place of a process's main thread, without details that change between checks."""
    begin = next((at for at, line in enumerate(stack) if line.startswith("Thread 0x")), len(stack))
    main = takewhile(lambda line: not line.startswith("Thread 0x"), stack[begin + 1 :])
    return [_LINE_NUMBER.sub(" ", line) for line in main][:SAME_FRAMES] or stack[:1]


def _attempt(describe: Callable[[], _T], otherwise: _T, what: str) -> _T:
    """Return what a function returns; ``otherwise`` if it raises an error."""
    try:
        return describe()
    except Exception as error:
        logger.trace("schedtrace: a stall is described without {}: {!r}", what, error)
        return otherwise
