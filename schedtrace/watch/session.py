"""Repeated observation of a run: the session finds it, reads new lines, judges them and notes events."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl

from schedtrace.engine.running_engines import listening_engines, queues_of
from schedtrace.errors import InputError, engine_error
from schedtrace.explain.request import explain_request
from schedtrace.model import safe_files
from schedtrace.model.manifest import files_of, is_in_parts, read_manifest
from schedtrace.model.printable import visible
from schedtrace.present.pages.queue import queue_page
from schedtrace.present.pages.story import request_page
from schedtrace.present.renderers import Format, renderer
from schedtrace.read.growing import LostError
from schedtrace.read.lines import ReadOptions
from schedtrace.read.run import read_run
from schedtrace.watch.find import Target, grows
from schedtrace.watch.judge import LONG_S, SHORT_S, Judge, picture
from schedtrace.watch.seen import Cell, Seen, Slow, TraceNote, summed_cells
from schedtrace.watch.watched_engine import SECONDS_KEPT, WatchedEngine

MOST_SLOW = 50
MOST_NOTES = 100
LARGEST_READ = 128 * 2**20
"""Maximum bytes of a trace to read for one request's history; reading them takes a core some seconds."""
COMPRESSED = 6
"""Minimum ratio of a part's content to its size on disk (docs/recording.md)."""


class WatchSession:
    """Session that observes a target for a user.

    Args:
        target: Target to watch.
        clock: Function that returns the Unix time in seconds.
    """

    def __init__(self, target: Target, clock: Callable[[], float] = time.time) -> None:
        self.target, self._clock = target, clock
        self.engines: dict[Path, WatchedEngine] = {}
        self.judges = [Judge(SHORT_S, 5.0, 0.015), Judge(LONG_S, 15.0, 0.007)]
        self.notes: deque[TraceNote] = deque(maxlen=MOST_NOTES)
        self.noted = 0
        """Number of notes so far."""
        self._refused: set[Path] = set()
        self._told: set[str] = set()
        self._causes: list[str] = []
        self._saved: set[Path] = set()
        self._lost = self._last_words = False

    @property
    def run_folder(self) -> Path | None:
        """Run folder that is watched; None if there is no run yet."""
        return next((path.parent for path in self.engines), None)

    def observe_engines(self, *, judge_now: bool = False) -> Seen:
        """Read new lines and return the current state.

        Args:
            judge_now: Whether to judge even if the last verdict is recent.
        """
        now = self._clock()
        self._find(now)
        for path, engine in list(self.engines.items()):
            try:
                engine.read_new_lines()
            except (InputError, OSError) as error:
                self._lose(path, engine, error, now)
        self._lose_twins(now)
        engines = [engine for engine in self.engines.values() if engine.trace_header is not None]
        for engine in engines:
            self._tell(engine, now)
        over = bool(engines) and all(engine.has_ended for engine in engines)
        figures = [engine.figures(now) for engine in engines]
        if figures:  # throughput is over the engines' common time with requests, so that it adds up
            present = pl.concat([engine.present for engine in figures])
            figures = [replace(engine, present=present) for engine in figures]
        slowest = [slow for engine in engines for slow in engine.slowest(now, MOST_SLOW)]
        if engines:
            shape = picture(figures, slowest)
            for judge in reversed(self.judges):  # the longer one first: it shows what a step costs
                judge.judge_if_due(engines, shape, now, at_once=judge_now or (over and not self._last_words))
        self._last_words = over
        edge = max((engine.edge_s(now) for engine in engines), default=0)
        cells: dict[int | None, list[Cell]] = {
            None: summed_cells([engine.cells for engine in engines], edge, SECONDS_KEPT),
            **{engine.engine_rank: summed_cells([engine.cells], edge, SECONDS_KEPT) for engine in engines},
        }
        here = dict.fromkeys(cause for cell in cells[None] for cause in cell.waiting)
        self._causes += [cause for cause in here if cause not in self._causes]
        return Seen(
            at_s=now,
            name=self._name(),
            awaited=self.target.awaited(),
            engines=figures,
            verdicts=[judge.latest for judge in self.judges if judge.latest is not None],
            # Waiting requests first, with the longest wait on top; then the oldest.
            slowest=sorted(
                slowest,
                key=lambda slow: (
                    slow.waits_us is None,
                    -(slow.age_us if slow.waits_us is None else slow.waits_us),
                ),
            )[:MOST_SLOW],
            cells=cells,
            edge_s=edge,
            causes=list(self._causes),
            notes=list(self.notes),
            ended=over,
            over=self._over(),
        )

    def save_last_minute(self, folder: Path) -> Path:
        """Write the last minute as a run folder that every command reads.

        Raises:
            OSError: If the folder cannot be written.
        """
        safe_files.make_folder(folder)
        self._saved.add(folder.absolute())
        for path, engine in self.engines.items():
            begin = engine.edge_us(self._clock()) - LONG_S * 1_000_000
            with safe_files.writable(folder / path.name) as file:
                file.write(engine.following.saved(begin))
        return folder

    def life(self, slow: Slow, width: int) -> str:
        """Return a request's history so far, as ``schedtrace request`` shows it.

        Raises:
            InputError: If the trace cannot be read or is gone, or is too large to be read beside the watch.
            UsageError: If the request is not in the trace.
        """
        path = next((path for path, engine in self.engines.items() if engine.engine_rank == slow.rank), None)
        if path is None:
            msg = f"{slow.request_id}: the trace of engine {slow.rank} is no longer there"
            raise InputError(msg)
        packed = COMPRESSED if is_in_parts(path) else 1
        size = packed * sum(file.stat().st_size for file in files_of(path))
        if size > LARGEST_READ:
            msg = (
                f"{path} has {size >> 20:,} MiB, too much to read beside the engine; later: "
                f"schedtrace request {path} {slow.request_id}"
            )
            raise InputError(msg)
        life = explain_request(read_run(path, ReadOptions(cache=False)), slow.request_id)
        return renderer(Format.TEXT)(request_page(life), width=width)

    def queue_text(self, width: int) -> str:
        """Return the current queues of the run's engines, as ``schedtrace queue`` shows them.

        Raises:
            EngineError: If an engine does not answer.
            InputError: If no engine of the run listens on this machine.
        """
        pids = {
            engine.trace_header.pid for engine in self.engines.values() if engine.trace_header is not None
        }
        listeners = listening_engines().with_pids({pid for pid in pids if pid is not None})
        if not listeners.engines and not listeners.silent:
            msg = "no engine of this run listens on this machine"
            raise InputError(msg)
        queues, errors = queues_of(listeners)
        if not queues.engines:
            raise engine_error(errors)
        return "\n".join([renderer(Format.TEXT)(queue_page(queues), width=width), *map(visible, errors)])

    def close(self) -> None:
        """Close all files."""
        for engine in self.engines.values():
            engine.following.close()
        self.engines.clear()

    def _find(self, now: float) -> None:
        """Open the traces of the run, including those of late ranks; switch to a newer run, if any."""
        files = self.target.trace_paths(self._saved)
        if files and self.run_folder not in {None, files[0].parent} and grows(files):
            name = files[0].parent.name
            if not all(engine.has_ended or engine.silent(now) for engine in self.engines.values()):
                self._note(f"a newer run began, {name}; the one shown still runs", now, once=True)
                files = []
            else:
                self.close()
                self._reset()
                self._note(f"a newer run began: {name}", now)
        elif files and self.run_folder not in {None, files[0].parent}:
            files = []
        for path in files:
            if path not in self.engines and path not in self._refused:
                try:
                    self.engines[path] = WatchedEngine(path)
                except InputError as error:
                    self._refused.add(path)
                    self._note(str(error), now)
        self.engines = dict(sorted(self.engines.items(), key=lambda item: (len(item[0].name), item[0].name)))

    def _lose(self, path: Path, engine: WatchedEngine, error: Exception, now: float) -> None:
        engine.following.close()
        del self.engines[path]
        self._lost = True
        if not isinstance(error, LostError):
            self._refused.add(path)  # it is no trace, and will not become one
        if not self.engines:
            self._reset()
        self._note(str(error), now)

    def _lose_twins(self, now: float) -> None:
        """Drop the second of two traces of the same rank."""
        first: dict[int, Path] = {}
        for path, engine in list(self.engines.items()):
            if (
                engine.trace_header is not None
                and (shown_path := first.setdefault(engine.engine_rank, path)) != path
            ):
                what = f"{path} is of rank {engine.engine_rank}, as is {shown_path}, which alone is shown"
                self._lose(path, engine, InputError(what), now)

    def _reset(self) -> None:
        """Forget the verdicts and notes, because another run follows."""
        for judge in self.judges:
            judge.reset()
        self.notes.clear()
        self._told.clear()

    def _tell(self, engine: WatchedEngine, now: float) -> None:
        """Report the recorder's notices and the end of the trace, each once."""
        rank = f"rank {engine.engine_rank}: " if len(self.engines) > 1 else ""
        for text in (*engine.following.notices, *engine.following.left_out):
            self._note(f"{rank}{text}", now, once=True)
        if engine.following.garbled_us is not None:
            self._note(f"{engine.following.path}: some lines were not understood", now, once=True)
        events = []
        if engine.following.dropped:
            events.append("steps are missing: the disk was too slow")
        if engine.following.gaps:
            events.append("steps are missing, and so is any request that arrived or ended in them")
        if engine.following.end is not None:
            events.append("the engine ended")
        elif engine.has_ended:
            events.append("the engine's process is gone, and its trace has no end: killed?")
        elif engine.silent(now):
            events.append("nothing is written any more: the engine was killed or hangs, or its disk is full")
        for text in events:
            self._note(f"{rank}{text}", now, once=True)

    def _note(self, text: str, now: float, *, once: bool = False) -> None:
        if once and text in self._told:
            return
        self._told.add(text)
        self.notes.append(TraceNote(now, text))
        self.noted += 1

    def notes_since(self, count: int) -> list[TraceNote]:
        """Return the notes after the first ``count``, as far as they are still in memory."""
        new = self.noted - count
        return list(self.notes)[-new:] if new else []

    def _over(self) -> bool:
        """Return whether nothing will follow, because the engines have ended or the traces are gone."""
        if not self.target.only:
            return False
        if self.engines:
            return all(engine.has_ended for engine in self.engines.values())
        return self._lost and not self.target.trace_paths(self._saved)

    def _name(self) -> str:
        """Return the run's label or else the name of its folder."""
        folder = self.run_folder
        if folder is None:
            return ""
        try:
            manifest = read_manifest(folder)
        except InputError:
            manifest = None
        return (manifest and manifest.label) or folder.resolve().name
