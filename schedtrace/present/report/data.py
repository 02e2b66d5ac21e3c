"""Timelines as the columns that the page draws: steps, the states of requests, preemptions.

A row of ``steps`` is one step or, in a trace of more than ``MOST_ROWS``, several in a row: then those around
findings stay single steps, and the page says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from schedtrace.diagnose.analyze import Timelines
from schedtrace.model.causes import CAUSES
from schedtrace.model.facts import Fact
from schedtrace.model.printable import visible
from schedtrace.present.report.lives import lives_of
from schedtrace.present.report.named import Named
from schedtrace.present.report.packed import Packed
from schedtrace.present.report.rows import merged
from schedtrace.present.report.words import add_words
from schedtrace.read.run import Run
from schedtrace.timeline.chart import per_step
from schedtrace.timeline.clocks import offset
from schedtrace.timeline.request_states import NEXT_STEP
from schedtrace.timeline.timeline import Timeline

MOST_ROWS = 50_000
"""Rows of steps of a whole page, shared among its engines."""
MOST_ENGINES = 16
STATES = ("front_end", "waiting", "prefill", "decode", "preempted", "recompute", "stalled", "set_aside")
BY_STEP, NO_CAUSE = 1, 0
"""Codes of causes: 0 is none, 1 that of the step of the time, from 2 on a place in ``Chart.causes``."""
FIRST_CAUSE = 2


@dataclass
class Chart:
    """What the page draws, of one run or of two."""

    packed: Packed = field(default_factory=Packed)
    engines: list[dict[str, Any]] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    """Words of causes; columns have their places in it, ``UNKNOWN`` for none."""
    notes: list[str] = field(default_factory=list)
    """What is left out, for the reader."""

    def add_engine(
        self, timeline: Timeline, *, run: int, offset_us: int, named: Named, engines: int = 1
    ) -> None:
        """Add an engine.

        Args:
            timeline: Its.
            run: 0, or 1 for the second of two.
            offset_us: From its clock to that of the run's first engine.
            named: What the run's findings name, which stays in full.
            engines: How many of the run share the page.
        """
        if Fact.TIMES not in timeline.facts:
            self.notes.append(f"Engine {timeline.rank} is not drawn: the record has no times of its steps.")
            return
        name = f"{len(self.engines)}."
        steps = per_step(timeline, offset_us)
        rows = merged(steps, named.steps.get(timeline.rank, ()), MOST_ROWS // engines)
        shown, lives = lives_of(timeline, steps, named.requests, engines)
        if rows.height < steps.height:
            self.notes.append(
                f"Engine {timeline.rank}: {steps.height:,} steps are drawn as {rows.height:,} rows; steps "
                "near those that findings name are single, others are summed."
            )
        if shown.height < (requests := lives["request_id"].n_unique()):
            self.notes.append(f"Engine {timeline.rank}: {shown.height:,} of {requests:,} requests are drawn.")
        self._add_steps(name, rows)
        self._add_lives(name, shown, lives, offset_us)
        words = add_words(self.packed, name, timeline, rows, shown["request_id"])
        self.engines.append(
            {
                "run": run,
                "rank": timeline.rank,
                "seats": timeline.seats,
                "budget": timeline.token_budget,
                "steps": steps.height,
                "request_count": requests,
                "knows": [fact.name for fact in Fact if fact in timeline.facts],
                "words": words,
            }
        )

    def note_engines(self, engines: int) -> None:
        """Tell the reader where a run has more engines than the page."""
        if engines > MOST_ENGINES:
            self.notes.append(
                f"{MOST_ENGINES} of {engines} engines are drawn; give one engine's trace file to see another."
            )

    def _add_steps(self, name: str, rows: pl.DataFrame) -> None:
        began, ended = rows["begin_us"], rows["end_us"].fill_null(rows["begin_us"])
        self.packed.add(f"{name}gap", began - ended.shift(1, fill_value=0), differences=False)
        self.packed.add(f"{name}length", ended - began, differences=False)
        for column in ("step", "count", "trial", "decode_tokens", "prefill_tokens", "recompute_tokens"):
            self.packed.add(f"{name}{column}", rows[column])
        for column in (
            "token_budget",
            "offered_tokens",
            "requests",
            "running",
            "waiting",
            "kv_used",
            "kv_total",
            "preempted",
        ):
            self.packed.add(f"{name}{column}", rows[column])
        self.packed.add(f"{name}cause", self._codes(rows["cause"]))

    def _add_lives(self, name: str, shown: pl.DataFrame, lives: pl.DataFrame, offset: int) -> None:
        self.packed.add_texts(f"{name}ids", map(visible, shown["request_id"]))
        pieces = shown.join(lives, on="request_id", how="inner", maintain_order="left_right")
        causes = self._codes(pieces["cause"]) + FIRST_CAUSE
        states = pieces["state"].replace_strict(STATES, range(len(STATES)), return_dtype=pl.Int64)
        kinds = pieces.select(
            pl.when(pl.col("by_step")).then(BY_STEP).otherwise(causes.fill_null(NO_CAUSE)) * len(STATES)
            + states
        ).to_series()
        self.packed.add(f"{name}first", shown["first_us"] + offset)
        self.packed.add(f"{name}pieces", shown["pieces"], differences=False)
        self.packed.add(f"{name}kind", kinds, differences=False)
        self.packed.add(f"{name}lasts", pieces["end_us"] - pieces["begin_us"], differences=False)
        self.packed.add(f"{name}tokens", pieces["tokens"], differences=False)

    def _codes(self, words: pl.Series) -> pl.Series:
        for word in words.drop_nulls().unique(maintain_order=True):
            if word not in self.causes:
                self.causes.append(word)
        return words.replace_strict(self.causes, range(len(self.causes)), default=None, return_dtype=pl.Int64)


def engines_of(run: Run, timelines: Timelines) -> Iterator[tuple[Timeline, int]]:
    """The timelines of the engines that a page has room for, one after the other, and the offset of each."""
    headers = run.traces.headers[:MOST_ENGINES]
    for place, header in enumerate(headers):
        yield timelines.at(place), offset(header, headers[0]).us


def words_of_causes(causes: list[str]) -> list[dict[str, str]]:
    """Each word with its meaning, for the legend."""
    known = {NEXT_STEP: "The next step had not begun: nothing refused the request"}
    meanings = {word: cause.entry.meaning for word, cause in CAUSES.items()} | known
    return [{"word": visible(word), "meaning": meanings.get(word, "")} for word in causes]
