"""Verdicts on the last seconds, at a rate that limits their cost to a share of a core."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from schedtrace.diagnose.analyze import all_findings
from schedtrace.diagnose.analyze import judge as judge_engine
from schedtrace.diagnose.root_causes import on_engine
from schedtrace.diagnose.verdict import engine_split, lead_first, leading, time_split, unlimited, verdict
from schedtrace.model.message import NOTHING
from schedtrace.model.say import say
from schedtrace.model.trace_facts import ALL_FACTS, SHOWS_LIMITS
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.timeline import Timeline
from schedtrace.timeline.window import Window, windowed
from schedtrace.watch.seen import LiveFigures, Slow, Verdict
from schedtrace.watch.watched_engine import WatchedEngine

WAITS_US = 500_000
"""Shortest wait in microseconds that counts; the wait for the next step is shorter."""
FULL, NO_LONGER_FULL = 0.95, 0.90
"""Shares of used KV blocks above which the cache counts as full, and below which it no longer does, to avoid
flicker."""


@dataclass(frozen=True)
class Picture:
    """State of all engines at one observation."""

    idle: bool
    waiting_for: dict[str, int]
    """Number of waiting requests by cause; empty if no request has waited for long."""
    kv_frac: float
    """KV cache usage of the fullest engine; 0 if unknown."""
    preempting: bool

    def changed(self, then: "Picture") -> str:
        """Describe what began or ended since ``then``, worded to follow "before"; empty if nothing did."""
        if self.idle != then.idle:
            return "the engine ran empty" if self.idle else "requests ran"
        if bool(self.waiting_for) != bool(then.waiting_for):
            return "requests waited" if self.waiting_for else "the queue emptied"
        if self.preempting and not then.preempting:
            return "preemptions began"
        if self.kv_frac >= FULL > then.kv_frac:
            return f"{FULL:.0%} of the KV blocks were in use".replace("%", " %")
        if then.kv_frac >= FULL and self.kv_frac < NO_LONGER_FULL:
            return "KV blocks became free"
        return self._other_cause(then)

    def _other_cause(self, then: "Picture") -> str:
        """Describe the new main cause if it is twice as frequent as the old one; less might be flicker."""
        if not self.waiting_for:
            return ""
        cause = max(self.waiting_for, key=self.waiting_for.__getitem__)
        before = max(then.waiting_for, key=then.waiting_for.__getitem__)
        if cause == before or self.waiting_for[cause] < 2 * self.waiting_for.get(before, 0):
            return ""
        return f"they waited for {cause}"


def picture(engines: list[LiveFigures], slowest: list[Slow]) -> Picture:
    """Return the picture of the current observation.

    Args:
        engines: Figures of each engine.
        slowest: Requests, including those with the longest waits.
    """
    waits = any(slow.waits_us is not None and slow.waits_us >= WAITS_US for slow in slowest)
    causes: dict[str, int] = {}
    for figures in engines if waits else []:
        for cause, count in figures.waiting_for.items():
            causes[cause] = causes.get(cause, 0) + count
    return Picture(
        idle=all(figures.state and not figures.running for figures in engines),
        waiting_for=causes,
        kv_frac=max((figures.kv_frac or 0.0 for figures in engines), default=0.0),
        preempting=any(figures.preempted_per_s for figures in engines),
    )


SHORT_S, LONG_S = 10, 60
LINES_LOST = say("Lines of the trace in this time could not be read, so this may be wrong:")


@dataclass
class Judge:
    """Judge that renews a verdict on the last seconds at intervals.

    Args:
        span_s: Seconds up to now that are judged.
        every_s: Minimum seconds between two verdicts.
        share: Share of a core that verdicts may use while the engines do not change in kind.
        spent: Function that returns the processor time of this process in seconds.
    """

    span_s: int
    every_s: float
    share: float
    spent: Callable[[], float] = time.process_time
    latest: Verdict | None = None
    _soonest_s: float = 0.0
    _due_s: float = 0.0
    _judged: Picture | None = None
    """Picture of the engines at the latest judgement."""

    def judge_if_due(
        self, engines: list[WatchedEngine], now: Picture, now_s: float, *, at_once: bool = False
    ) -> None:
        """Judge again if a judgement is due, if the engines have changed in kind, or if ``at_once``."""
        changed = now.changed(self._judged) if self._judged and self.latest else ""
        if not (at_once or now_s >= (self._soonest_s if changed else self._due_s)):
            if self.latest and self.latest.changed != changed:
                self.latest = replace(self.latest, changed=changed)
            return
        began, first = self.spent(), self.latest is None
        before = self.latest.code if self.latest else ""
        self.latest, self._judged = judge_window(engines, now_s, self.span_s, before), now
        # The first one also imports and compiles, which no other does.
        cost = 0.0 if first else self.spent() - began
        if self.latest.judged:
            self._soonest_s = now_s + self.every_s
            self._due_s = now_s + max(self.every_s, cost / self.share)

    def reset(self) -> None:
        """Forget the run, because another run begins."""
        self.latest, self._judged, self._soonest_s, self._due_s = None, None, 0.0, 0.0


def judge_window(engines: list[WatchedEngine], now_s: float, span_s: int, before: str) -> Verdict:
    """Return the result of ``analyze`` for the last ``span_s`` seconds of these engines.

    A few seconds show neither the cost of a step nor the peak demand. The cost is taken from the last minute,
    the demand from everything observed.

    Args:
        engines: Engines, with or without steps.
        now_s: Current Unix time in seconds.
        span_s: Length of the span in seconds.
        before: Code of the previous verdict's finding, which leads until another finding is twice as large.
    """
    windows = [window for engine in engines if (window := _window(engine, now_s, span_s)) is not None]
    standing = [
        on_engine(engine.engine_rank, sentence) if len(engines) > 1 else sentence
        for engine in engines
        if (sentence := engine.standing(now_s))
    ]
    if not windows:
        nothing = [say("No step in this time: nothing to judge.")]
        return Verdict(span_s, now_s, standing or nothing, NOTHING, judged=False)
    facts = ALL_FACTS.intersection(*(window.facts for window in windows))
    findings = lead_first(
        all_findings(
            [judge_engine(window) for window in windows], RecordedRanks.from_timelines(windows), facts
        )
    )
    split = time_split([engine_split(window) for window in windows]) if facts >= SHOWS_LIMITS else []
    unlimiteds = [replace(unlimited(window), stalled=NOTHING) for window in windows]
    sentences = [*standing, *verdict(unlimiteds, findings, split, before)]
    # Lines may be lost, for example, when the open file is truncated.
    lost_us = [(engine, us) for engine in engines if (us := engine.following.garbled_us) is not None]
    if any(us >= engine.edge_us(now_s) - span_s * 1_000_000 for engine, us in lost_us):
        sentences = [LINES_LOST, *sentences]
    lead = leading(findings, before)[:1]
    advice = lead[0].advice[0].message if lead and lead[0].advice else NOTHING
    return Verdict(span_s, now_s, sentences, advice, code=lead[0].code if lead else "")


def _window(engine: WatchedEngine, now_s: float, span_s: int) -> Timeline | None:
    begin_us = engine.edge_us(now_s) - span_s * 1_000_000
    timeline = engine.timeline(begin_us)
    if timeline is None:
        return None
    cut = windowed(timeline, Window(begin_us=begin_us))
    if cut.steps.is_empty():
        return None
    if span_s == LONG_S:
        engine.step_time = cut.step_time
    return replace(cut, demand=engine.demand, longer_step_time=engine.step_time)
