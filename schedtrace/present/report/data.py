"""Columns that the report page draws: steps, requests' states, preemptions, and marks of findings.

A row of ``steps`` is one step or, in a trace of more than ``MOST_ROWS`` steps, several consecutive steps. In
the latter case, steps around findings keep a row each, and the page states that rows are merged.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import polars as pl

from schedtrace.diagnose.analyze import Timelines
from schedtrace.model.causes import CAUSES
from schedtrace.model.message import Message, Request, Requests, plain
from schedtrace.model.printable import visible
from schedtrace.model.report import Finding, RunReport
from schedtrace.model.trace_facts import Fact
from schedtrace.present.report.packed import Packed
from schedtrace.present.report.step_sentences import add_words
from schedtrace.read.run import Run
from schedtrace.timeline.frames import offset
from schedtrace.timeline.per_step import per_step
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.timeline import Timeline

MOST_STORIES, FEWEST_STORIES = 40, 6
"""Maximum and minimum number of steps and requests shown in full; fewer for a long trace, where each takes
half a second."""


@dataclass
class Named:
    """Steps and requests that findings name, most important finding first; they are shown in full."""

    steps: dict[int, list[int]] = field(default_factory=dict)
    """Steps by rank, each listed once."""
    requests: list[str] = field(default_factory=list)
    examples: list[tuple[int, int]] = field(default_factory=list)
    """Rank and number of the first step of each finding."""


def named(report: RunReport) -> Named:
    """Return the steps and requests that a run's findings and their symptoms name."""
    names = Named()
    for finding in report.every_finding():
        own = names.steps.setdefault(finding.engine_rank, [])
        own += finding.steps
        names.examples += [(finding.engine_rank, step) for step in finding.steps[:1]]
        names.requests += _requests(finding)
    names.steps = {rank: list(dict.fromkeys(steps)) for rank, steps in names.steps.items()}
    names.requests = list(dict.fromkeys(names.requests))
    names.examples = list(dict.fromkeys(names.examples))
    return names


def marked(report: RunReport) -> list[dict[str, Any]]:
    """Return the root causes that name steps, in their order, for the page."""
    return [
        {
            "title": plain(finding.title),
            "severity": finding.severity,
            "rank": finding.engine_rank,
            "ranks": finding.engine_ranks or [finding.engine_rank],
            "steps": step_ranges(finding.steps),
            "cause": finding.cause,
            "named": len(finding.steps),
            "count": finding.count,
        }
        for finding in report.findings
        if finding.title and finding.steps
    ]


def step_ranges(steps: list[int]) -> list[list[int]]:
    """Return the first and last step of each series of consecutive steps."""
    ordered = sorted(set(steps))
    if not ordered:
        return []
    cuts = [at + 1 for at, (here, there) in enumerate(pairwise(ordered)) if there != here + 1]
    return [
        [ordered[first], ordered[last - 1]]
        for first, last in zip([0, *cuts], [*cuts, len(ordered)], strict=True)
    ]


def _requests(finding: Finding) -> Iterator[str]:
    messages: list[Message] = [finding.message, finding.holder, finding.verdict]
    messages += [finding.example] if finding.example else []
    for message in messages:
        for part in message.parts():
            if isinstance(part, Request):
                yield part.request_id
            elif isinstance(part, Requests):
                yield from part.request_ids


MOST_REQUESTS, MOST_PIECES = 8_000, 50_000
"""Maximum numbers of requests, and of pieces of their histories, on a page."""


def lives_of(
    timeline: Timeline, steps: pl.DataFrame, named: Collection[str], engines: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the requests to draw, by arrival, and the pieces of their histories.

    The requests have the columns ``first_us`` and ``pieces``. Pieces are rows of ``request_states``.
    Consecutive waits, each with the cause of the step at that time, become one piece, ``by_step``, which
    replaces most of the table if the queue is long.
    """
    run_of_cause = steps.select(
        pl.col("step").cast(pl.Int64), cause_of_step="cause", same=pl.col("cause").rle_id()
    )
    last = run_of_cause.select(end_step="step", same_to_end="same")
    by_step = (
        pl.col("state").is_in(QUEUED)
        & pl.col("cause").eq(pl.col("cause_of_step"))
        & pl.col("same").eq(pl.col("same_to_end"))
    ).fill_null(value=False)
    pieces = (
        timeline.request_states.lazy()
        .join(run_of_cause.lazy(), left_on="begin_step", right_on="step", how="left", maintain_order="left")
        .join(last.lazy(), on="end_step", how="left", maintain_order="left")
        .select("request_id", "begin_us", "end_us", "state", "cause", "tokens", by_step=by_step)
        .with_columns(
            row=pl.when("by_step")
            .then(pl.struct("request_id", "state").rle_id())
            .otherwise(-1 - pl.int_range(pl.len()))
        )
        .with_columns(row=pl.struct("row", "by_step").rle_id())
        .group_by("row", maintain_order=True)
        .agg(
            pl.col("request_id", "begin_us", "state", "cause", "by_step").first(),
            pl.col("end_us").last(),
            pl.col("tokens").sum(),
        )
        .collect()
    )
    requests = (
        pieces.group_by("request_id", maintain_order=True)
        .agg(first_us=pl.col("begin_us").first(), pieces=pl.len())
        .sort("first_us", maintain_order=True)
    )
    a_request = max(1.0, pieces.height / max(1, requests.height))
    room = int(min(MOST_REQUESTS, MOST_PIECES / a_request)) // engines
    every = max(1.0, requests.height / max(1, room))
    place = pl.int_range(pl.len())
    even = (place / every).floor() != ((place - 1) / every).floor()
    return requests.filter(even | pl.col("request_id").is_in(list(named))), pieces


DETAIL = 500
"""Number of steps that keep a row each on either side of a step that a finding names."""


def merged_steps(steps: pl.DataFrame, named: Collection[int], most: int) -> pl.DataFrame:
    """Merge steps into about ``most`` rows; ``count`` is the number of steps in a row.

    ``offered_tokens`` is the token budget of the steps that scheduled anything. A row of several steps has
    the sum of their tokens and preemptions, their highest numbers of running, waiting and scheduled requests
    and of KV blocks, and their most frequent cause. No row spans the end of a trial.

    Args:
        steps: Rows of ``per_step``.
        named: Steps that keep a row each, like ``DETAIL`` steps on either side; these take at most half of
            the rows.
        most: Approximate maximum number of rows.
    """
    steps = steps.with_columns(
        offered_tokens=pl.when(pl.col("requests") > 0).then("token_budget").otherwise(0)
    )
    if steps.height <= most:
        return steps.with_columns(count=pl.lit(1))
    near = steps["step"].is_in(list(named))
    span = max(1, min(2 * DETAIL + 1, most // (2 * max(1, int(near.sum())))))
    single = near.cast(pl.Int8).rolling_max(span, center=True, min_samples=1) > 0
    wide = -(-steps.height // max(1, most - int(single.sum())))
    place = pl.int_range(pl.len())
    rows = steps.with_columns(single=single).with_columns(
        part=pl.when("single").then(place).otherwise(-1 - place // wide),
        run=pl.struct("single", "trial").rle_id(),
    )
    summed = (
        "decode_tokens",
        "prefill_tokens",
        "recompute_tokens",
        "unused_tokens",
        "token_budget",
        "offered_tokens",
        "preempted",
    )
    most_of = ("requests", "running", "waiting", "kv_used", "kv_total")
    return (
        rows.group_by("run", "part", maintain_order=True)
        .agg(
            pl.col("step", "trial", "begin_us").first(),
            pl.col("end_us").max(),
            pl.col(*summed).sum(),
            pl.col(*most_of).max(),
            pl.col("cause").mode().sort().first(),
            count=pl.len(),
        )
        .select(*steps.columns, "count")
    )


MOST_ROWS = 50_000
"""Maximum number of rows for the steps of a whole page, shared among its engines."""
MOST_ENGINES = 16
STATES = (
    *("front_end", "waiting", "prefill", "decode", "preempted", "recompute", "stalled", "set_aside"),
    "not_recorded",
)
BY_STEP, NO_CAUSE = 1, 0
"""Codes of causes: 0 is none, 1 is the cause of the step at that time, and any higher code is a place in
``TimelineChart.causes`` plus 2."""
FIRST_CAUSE = 2


@dataclass
class TimelineChart:
    """Data that the page draws, from one or two runs."""

    packed: Packed = field(default_factory=Packed)
    engines: list[dict[str, Any]] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    """Names of causes; columns contain indices of this list, or ``UNKNOWN`` where there is no cause."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader on what was left out."""

    def add_engine(
        self, timeline: Timeline, *, run: int, offset_us: int, named: Named, engines: int = 1
    ) -> None:
        """Add an engine.

        Args:
            timeline: Timeline of the engine.
            run: Index of the run: 0, or 1 for the second of two runs.
            offset_us: Microseconds to add to the timeline's times to put them on the clock of the run's first
                engine.
            named: Steps and requests that the run's findings name, which are shown in full.
            engines: Number of the run's engines that share the page.
        """
        if Fact.TIMES not in timeline.facts:
            self.notes.append(f"Engine {timeline.rank} is not drawn: the record has no times of its steps.")
            return
        name = f"{len(self.engines)}."
        steps = per_step(timeline, offset_us)
        rows = merged_steps(steps, named.steps.get(timeline.rank, ()), MOST_ROWS // engines)
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
        """Add a note if a run has more engines than the page shows."""
        if engines > MOST_ENGINES:
            self.notes.append(
                f"{MOST_ENGINES} of {engines} engines are drawn; give one engine's trace file to see another."
            )

    def _add_steps(self, name: str, rows: pl.DataFrame) -> None:
        began, ended = rows["begin_us"], rows["end_us"].fill_null(rows["begin_us"])
        self.packed.add(f"{name}gap", began - ended.shift(1, fill_value=0), differences=False)
        self.packed.add(f"{name}length", ended - began, differences=False)
        for column in (
            "step",
            "count",
            "trial",
            "decode_tokens",
            "prefill_tokens",
            "recompute_tokens",
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
    """Yield the timeline and the clock offset of each engine for which the page has room."""
    headers = run.traces.headers[:MOST_ENGINES]
    for place, header in enumerate(headers):
        yield timelines.at(place), offset(header, headers[0]).us


def words_of_causes(causes: list[str]) -> list[dict[str, str]]:
    """Return each cause's word and meaning, for the legend."""
    next_step = {NEXT_STEP: "The next step had not begun: nothing refused the request"}
    meanings = {word: cause.entry.meaning for word, cause in CAUSES.items()} | next_step
    return [{"word": visible(word), "meaning": meanings.get(word, "")} for word in causes]
