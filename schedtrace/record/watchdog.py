"""Says in vLLM's own log when an engine has stopped making progress, why, and when it goes on.

A thread beside the engine looks once a second (``movement.py``) and puts nothing on the path of a step. Only
when a stall is to be described does it ask more: first the exits of a late call, where the engine still makes
calls (``attachment.py``), then who holds what, then the stacks. See ``docs/watchdog.md``.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loguru import logger

from schedtrace.model.printable import visible
from schedtrace.model.trace import Exit
from schedtrace.record import engine_thread
from schedtrace.record.control_socket import stacks_of_workers
from schedtrace.record.engine_thread import Place, stacks_here
from schedtrace.record.movement import Movement, has_work
from schedtrace.record.queues import Queues
from schedtrace.record.settings import hashes_ids
from schedtrace.record.stall_causes import Stall, circle, holders, is_paused, stall
from schedtrace.record.step_lines import WrittenIds

VARIABLE = "SCHEDTRACE_WATCHDOG"
AFTER_S = 10.0
EVERY_S = 1.0
ABSENT_S = 3 * EVERY_S
"""Between two looks, from which on the watchdog itself was held up: the process was stopped, for instance."""
STACKS_EVERY_S = 600.0
"""Stacks of one kind of stall are not repeated before that: an engine may stall with every long prompt."""
log = logging.getLogger("vllm.schedtrace")
"""Has vLLM's handlers, level and format."""

Causes = Callable[[], list[Exit]]
Snapshot = Callable[[str], Path | None]
"""Keeps what is known of the time before a stall; is given its kind, returns where it lies."""


def after_s() -> float | None:
    """How long without progress is a stall; None: there is to be no watchdog.

    Raises:
        ValueError: the variable says neither ``off`` nor a number of seconds.
    """
    text = os.environ.get(VARIABLE, "").strip().lower()
    if not text:
        return AFTER_S
    if text in {"off", "0"}:
        return None
    seconds = float(text.removesuffix("s"))
    if not seconds >= EVERY_S:
        msg = f"{text}: at least {EVERY_S:g} s"
        raise ValueError(msg)
    return seconds


class Watchdog:
    """Of one engine; ``look`` is to be called about once a second.

    Args:
        engine: vLLM's ``EngineCore``.
        place: Where the engine's thread is.
        causes: The exits of a late call of ``schedule()``; what it raises counts as not known.
        after_s: A stall is said after so many seconds.
        snapshot: See ``Snapshot``.
        stacks: The stacks of this process and its workers.
    """

    def __init__(
        self,
        engine: Any,
        place: Callable[[], Place | None],
        causes: Causes,
        after_s: float = AFTER_S,
        snapshot: Snapshot | None = None,
        stacks: Callable[[], list[str]] | None = None,
    ) -> None:
        self._engine, self._place, self._causes = engine, place, causes
        self._after_s, self._snapshot, self._stacks = after_s, snapshot, stacks or _all_stacks
        self._queues = Queues(engine.scheduler)
        self._movement = Movement()
        self._ids = WrittenIds(hash_ids=hashes_ids())
        self._places: list[Place] = []
        """At each look since the latest progress."""
        self._calls: Any = None
        """Of ``schedule()``, at the latest progress."""
        self._moved_s: float | None = None
        self._looked_s = 0.0
        self._paused = False
        self._said: Stall | None = None
        self._said_since_s = 0.0
        self._stacks_s: dict[str, float] = {}

    @property
    def stalled_s(self) -> float | None:
        """How long the stall has lasted that was said; None: there is none, or the engine is paused."""
        if self._said is None or self._said.kind == "paused":
            return None
        return self._looked_s - self._said_since_s

    @property
    def stall(self) -> str | None:
        """Why, in a sentence."""
        return None if self.stalled_s is None or self._said is None else self._said.sentence

    def look(self, now_s: float) -> None:
        """Compare with the last look; say what has begun or ended since.

        Args:
            now_s: Of a monotonic clock.
        """
        scheduler = self._engine.scheduler
        paused = is_paused(self._engine)
        moved = self._movement.look(scheduler, now_s) or paused != self._paused
        self._paused = paused
        working = has_work(self._engine, self._queues.num_waiting(scheduler))
        absent_s = now_s - self._looked_s - EVERY_S
        self._looked_s = now_s
        if moved or not working or self._moved_s is None:
            self._moved_s, self._calls = now_s, _calls(scheduler)
            self._places.clear()
        else:
            self._moved_s += absent_s if absent_s > ABSENT_S else 0.0
            if (place := self._place()) is not None:
                self._places.append(place)
        circling = self._movement.circling(now_s, self._after_s)
        if now_s - self._moved_s >= self._after_s:
            since_s, why = self._moved_s, self._why
        elif circling is not None and working:
            request_id, found = circling
            since_s, why = found.since_s, lambda: circle(request_id, found, self._ids)
        else:
            self._ended(now_s, working=working)
            return
        if self._said is None:
            self._said, self._said_since_s = why(), since_s
            self._say(self._said, now_s)

    def _why(self) -> Stall:
        calls = _calls(self._engine.scheduler)
        steps = calls != self._calls if calls is not None else _varies(self._places)
        exits: list[Exit] = []
        if steps:
            try:
                exits = self._causes()
            except Exception as error:
                logger.debug("schedtrace: the causes of a stall are not known: {!r}", error)
        return stall(self._engine, self._places, steps=steps, exits=exits, ids=self._ids)

    def _say(self, found: Stall, now_s: float) -> None:
        begin = f"schedtrace: no step has made progress for {now_s - self._said_since_s:.0f} s: "
        if found.kind == "paused":
            log.info("%s%s", begin, found.sentence)
            return
        lines = [f"{begin if found.kind != 'livelock' else 'schedtrace: '}{found.sentence} [{found.kind}]"]
        lines += _tried(lambda: holders(self._engine, self._ids))
        if self._snapshot is not None:
            take = self._snapshot
            lines += _tried(lambda: [f"what happened before: {path}"] if (path := take(found.kind)) else [])
        if now_s - self._stacks_s.get(found.kind, -STACKS_EVERY_S) >= STACKS_EVERY_S:
            self._stacks_s[found.kind] = now_s
            lines += _tried(self._stacks)
        log.warning("%s", "\n  ".join(lines))

    def _ended(self, now_s: float, *, working: bool) -> None:
        said, self._said = self._said, None
        if said is None:
            return
        how = "the engine goes on" if working else "nobody waits any more"
        level = logging.INFO if said.kind == "paused" else logging.WARNING
        log.log(level, "schedtrace: %s after %.0f s [%s]", how, now_s - self._said_since_s, said.kind)


class WatchdogThread:
    """Looks until it is closed; never raises into its process.

    Args:
        watchdog: Whose ``look`` is called.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="schedtrace-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _watch(self) -> None:
        failed = 0
        while not self._over.wait(EVERY_S):
            try:
                self._watchdog.look(time.monotonic())
                failed = 0
            except Exception as error:  # a container changed while it was read, or this vLLM is another
                failed += 1
                logger.debug("schedtrace: the watchdog could not look: {!r}", error)
                if failed == MOST_FAILED:
                    logger.warning("schedtrace: the watchdog gives up: {!r}", error)
                    return


MOST_FAILED = 60
"""Looks in a row."""


def watch(
    engine: Any, thread: int, causes: Causes, snapshot: Snapshot | None = None
) -> tuple[Watchdog, WatchdogThread] | tuple[None, None]:
    """Have an engine and the thread that it runs on watched, unless nobody wants that or it cannot be."""
    try:
        seconds = after_s()
        if seconds is None:
            return None, None
        watchdog = Watchdog(engine, lambda: engine_thread.place(thread), causes, seconds, snapshot)
        return watchdog, WatchdogThread(watchdog)
    except Exception as error:
        logger.warning("schedtrace: no watchdog ({}): {}", VARIABLE, visible(str(error)))
        return None, None


def _all_stacks() -> list[str]:
    return [*stacks_here().splitlines(), *stacks_of_workers()]


def _calls(scheduler: Any) -> int | None:
    """Calls of ``schedule()`` so far, where this release counts them."""
    return getattr(scheduler, "current_step", None)


def _varies(places: list[Place]) -> bool:
    return len(set(places)) > 1 or any(place.at == "between" for place in places)


def _tried(lines: Callable[[], list[str]]) -> list[str]:
    """What cannot be had is left out."""
    try:
        return lines()
    except Exception as error:
        logger.debug("schedtrace: a stall is described without this: {!r}", error)
        return []
