"""Running engine that is watched: its current figures, its last seconds, and its requests' waits."""

import heapq
import os
import socket
from collections import Counter
from pathlib import Path

import polars as pl

from schedtrace.diagnose.serving_metrics import SPAN, request_presence
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.read.follow import Following
from schedtrace.timeline.frames import Demand
from schedtrace.timeline.per_step import per_step
from schedtrace.timeline.pieces import waits_for
from schedtrace.timeline.step_time import StepTime
from schedtrace.timeline.timeline import Timeline, make_timeline
from schedtrace.watch.seen import UNNAMED, Cell, LiveFigures, Slow, added, cells_by_second

KEEP_S = 75
"""Seconds of trace kept in memory: the minute of the longer verdict, and the earlier time that its first
steps need."""
RATES_S = 10
RECENT = ("start_us", "requests", "token_budget", "unused_tokens", "preempted")
SECONDS_KEPT = 300
"""Seconds kept for the chart."""
LAG_S = 1.8
"""Maximum delay in seconds until a step is in the file: half a second for its output, and one second
in a frame."""
IDLE_FROM_S = 3.0
SILENT_FROM_S = 10.0
"""Seconds of silence after which the recorder counts as stopped; it writes at least every 5 s."""


class WatchedEngine:
    """Engine with a growing trace.

    Args:
        path: Trace file, ``engine-<rank>.jsonl``.

    Raises:
        InputError: If the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.following = Following(path, KEEP_S * 1_000_000)
        self.cells: dict[int, Cell] = {}
        """Cells of the last seconds, by Unix time in seconds."""
        self.demand = Demand()
        """Demand of the load since the watch began."""
        self.step_time: StepTime | None = None
        """Model of step times from the span of the longest verdict."""
        self._recent = pl.DataFrame(schema=dict.fromkeys(RECENT, pl.Int64))
        """Steps of the last ``RATES_S``."""
        self._last: dict[str, int | None] = {}
        self._last_step_us: int | None = None
        self._usual: str | None = None
        self._named: dict[str, str] = {}
        self._modified_s = 0.0

    @property
    def trace_header(self) -> Header | None:
        """Header of the trace; None if it has not been written yet."""
        return self.following.header

    @property
    def engine_rank(self) -> int:
        """Data-parallel rank."""
        return self.trace_header.engine_rank if self.trace_header else 0

    @property
    def has_ended(self) -> bool:
        """Whether the engine was shut down properly, or its process is gone."""
        return self.following.end is not None or self._process_is_gone()

    def read_new_lines(self) -> None:
        """Read the new lines.

        Raises:
            InputError: If the file was removed, replaced or truncated, or is not a trace.
        """
        new = self.following.read()
        self._modified_s = self.following.trace_modified_s()
        if any(chunk.steps.height for chunk in new):
            timeline = make_timeline(self.following.trace(new), whole=True)
            self.demand += timeline.demand
            rows = per_step(timeline, timeline.header.wall_anchor_us)
            self._usual, self._named = waits_for(timeline)
            self._last = rows.select("running", "waiting", "kv_used", "kv_total").row(-1, named=True)
            self._last_step_us = int(timeline.steps["start_us"][-1])
            starts = pl.col("begin_us") - timeline.header.wall_anchor_us
            self._recent = pl.concat(
                [self._recent, rows.select(starts.alias("start_us"), *RECENT[1:])]
            ).filter(pl.col("start_us") > self._last_step_us - RATES_S * 1_000_000)
            for second, of_second in cells_by_second(rows).items():
                self.cells[second] = added(self.cells.get(second, Cell()), of_second)
            for second in [expired for expired in self.cells if expired < max(self.cells) - SECONDS_KEPT]:
                del self.cells[second]

    def edge_us(self, now_s: float) -> int:
        """Return the time up to which the trace is complete, on its own clock."""
        header, newest = self.trace_header, self.following.newest_us
        if header is None or self.has_ended or header.clock == "virtual" or self.silent(now_s):
            return newest
        return max(newest, int((now_s - LAG_S) * 1e6) - header.wall_anchor_us)

    def timeline(self, begin_us: int) -> Timeline | None:
        """Return the timeline from about this time of the trace's clock on; None if there is no step."""
        chunks = self.following.since(begin_us)
        if not any(chunk.steps.height for chunk in chunks):
            return None
        return make_timeline(self.following.trace(chunks), whole=True)

    def standing(self, now_s: float) -> Message:
        """Return a sentence if requests are present but no step begins, with the reason if known."""
        if self.has_ended or self.trace_header is None or self._last_step_us is None:
            return NOTHING
        now_us = int(now_s * 1e6) - self.trace_header.wall_anchor_us
        if (stalled := self.following.stalled) is not None:
            return say(
                "No step has made progress for {time:us}: {sentence}.",
                time=now_us - stalled.since_us,
                sentence=stalled.sentence,
            )
        still_us = self.edge_us(now_s) - self._last_step_us
        running, waiting = self._last.get("running") or 0, self._last.get("waiting") or 0
        if still_us < IDLE_FROM_S * 1e6 or not running + waiting:
            return NOTHING
        return say(
            "No step has begun for {time:us} while {running:n request} ran and {waiting:n} waited.",
            time=still_us,
            running=running,
            waiting=waiting,
        )

    def figures(self, now_s: float) -> LiveFigures:
        """Return the engine's current figures."""
        recent = self._recent.filter(pl.col("start_us") > self.edge_us(now_s) - RATES_S * 1_000_000)
        budget, unused = (
            recent.filter(pl.col("requests") > 0).select("token_budget", "unused_tokens").sum().row(0)
        )
        output_tokens, present = self._served(self.edge_us(now_s))
        last = self._last
        waiting = last.get("waiting") or 0
        # A request that the last step skipped counts under the cause of that skip; all other requests count
        # under the cause of the loop's exit.
        queued = [live.entry.request_id for live in self.following.lives if live.waits_since_us is not None]
        waiting_for = Counter(self._named[name] for name in queued if name in self._named)
        if rest := max(0, waiting - waiting_for.total()):
            waiting_for[self._usual or UNNAMED] += rest
        return LiveFigures(
            rank=self.engine_rank,
            state=self._state(now_s),
            running=last.get("running") or 0,
            seats=self.trace_header.max_num_running_reqs if self.trace_header else None,
            waiting=waiting,
            waiting_for=dict(waiting_for.most_common()),
            kv_used=last.get("kv_used"),
            kv_total=last.get("kv_total"),
            budget_frac=(budget - unused) / budget if budget else None,
            preempted_per_s=int(recent["preempted"].sum()) / RATES_S,
            steps_per_s=recent.height / RATES_S,
            output_tokens=output_tokens,
            present=present,
        )

    def _served(self, edge_us: int) -> tuple[int, pl.DataFrame]:
        """Return output tokens and spans with requests in the last ``RATES_S``, by the wall clock."""
        begin_us = edge_us - RATES_S * 1_000_000
        chunks = self.following.since(begin_us)
        if self.trace_header is None or not chunks:
            return 0, pl.DataFrame(schema=SPAN)
        trace = self.following.trace(chunks)
        back = trace.steps.filter(pl.col("output_us").is_between(begin_us, edge_us, closed="right"))
        there = request_presence(trace, begin_us, edge_us)
        return int(back["output_tokens"].sum()), there.select(pl.all() + self.trace_header.wall_anchor_us)

    def slowest(self, now_s: float, most: int) -> list[Slow]:
        """Return the requests with the longest waits, and the oldest ones, up to ``most`` of each."""
        edge, lives = self.edge_us(now_s), self.following.lives
        waits = [
            (live.waits_since_us, at) for at, live in enumerate(lives) if live.waits_since_us is not None
        ]
        chosen = {at for _, at in heapq.nsmallest(most, waits)} | set(range(min(most, len(lives))))
        requests = []
        for live in [lives[at] for at in sorted(chosen)]:
            since, name = live.waits_since_us, live.entry.request_id
            arrival_times = (live.entry.arrived_us, live.entry.queued_us, live.there_us)
            arrived_us = next((us for us in arrival_times if us is not None), edge)
            requests.append(
                Slow(
                    rank=self.engine_rank,
                    request_id=name,
                    age_us=max(0, edge - arrived_us),
                    waits_us=None if since is None else max(0, edge - since),
                    cause=None if since is None else self._named.get(name, self._usual),
                    preempted=live.preempted,
                )
            )
        return requests

    def edge_s(self, now_s: float) -> int:
        """Return ``edge_us`` in whole seconds of Unix time."""
        anchor = self.trace_header.wall_anchor_us if self.trace_header else 0
        return (self.edge_us(now_s) + anchor) // 1_000_000

    def _state(self, now_s: float) -> str:
        if self.following.end is not None:
            return "ended"
        if self._process_is_gone():
            return "killed"
        silent = self._silent_s(now_s)
        if silent >= SILENT_FROM_S:
            return f"silent for {silent:,.0f} s"
        if self._last_step_us is None:
            return "no step yet"
        still = (self.edge_us(now_s) - self._last_step_us) / 1e6
        if still < IDLE_FROM_S:
            return ""
        return f"no step for {still:,.0f} s" if self._last.get("running") else f"idle for {still:,.0f} s"

    def silent(self, now_s: float) -> bool:
        """Return whether the recorder has stopped writing."""
        return self._silent_s(now_s) >= SILENT_FROM_S

    def _silent_s(self, now_s: float) -> float:
        return now_s - self._modified_s

    def _process_is_gone(self) -> bool:
        header = self.trace_header
        if header is None or header.pid is None or header.host != socket.gethostname():
            return False
        return not os.path.exists(f"/proc/{header.pid}") and os.path.exists("/proc/self")  # noqa: PTH110  # one call
