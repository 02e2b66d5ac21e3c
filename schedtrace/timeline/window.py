"""Windows: a timeline cut to the time between two moments, with the requests in their states then."""

from dataclasses import dataclass, replace

import polars as pl

from schedtrace.timeline.engine_states import find_starved_steps, thread_times
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Window:
    """Window of a recording: its ends in microseconds on the first trace's clock; None if unbounded."""

    begin_us: int | None = None
    end_us: int | None = None
    last_us: int | None = None
    """Length of the window in microseconds, counted back from its end; an alternative to ``begin_us``."""

    def __str__(self) -> str:
        bounds = {"--from": self.begin_us, "--to": self.end_us, "--last": self.last_us}
        return " ".join(f"{name} {us / 1e6:.9g}s" for name, us in bounds.items() if us is not None)

    def moments(self, timeline: Timeline) -> tuple[int, int]:
        """Return both ends in microseconds on the clock of the timeline, which must have steps."""
        first, end = timeline.begin_us, timeline.end_us
        if self.end_us is not None:
            end = min(end, self.end_us - timeline.offset_us)
        if self.last_us is not None:
            return max(first, end - self.last_us), end
        if self.begin_us is None:
            return first, end
        return max(first, self.begin_us - timeline.offset_us), end


def windowed(timeline: Timeline, window: Window) -> Timeline:
    """Return a timeline of the steps that began in the window, with all other tables cut to it.

    States keep their causes: a request that already waited before the window waits from the window's
    beginning. A window without steps, such as one within a pause, still has the requests present and the
    calls to the engine.
    """
    if timeline.steps.is_empty():
        return timeline
    begin_us, end_us = window.moments(timeline)
    steps = timeline.steps.filter(pl.col("start_us").is_between(begin_us, end_us, closed="left"))
    number = steps[["step"]]
    states = _cut(timeline.request_states, begin_us, end_us)
    there = states[["request_id"]].unique()
    tables = timeline.tables
    engine = _cut(tables.engine_states, begin_us, end_us)
    during = (pl.col("end_us") > begin_us) & (pl.col("begin_us") < end_us)
    starved = tables.starved.filter(during)
    gaps = timeline.gaps.filter((pl.col("to_us") > begin_us) & (pl.col("from_us") < end_us))
    return replace(
        timeline,
        steps=steps,
        stretches=_cut_stretches(timeline.stretches, number),
        arrivals=timeline.arrivals.filter(pl.col("queued_us") < end_us).join(
            there, on="request_id", how="semi", maintain_order="left"
        ),
        gaps=gaps.with_columns(pl.col("from_us", "to_us").clip(begin_us, end_us)),
        there_after=timeline.there_after.filter(pl.col("at_us").is_in(gaps["told_us"].implode())),
        present=timeline.present.join(there, on="request_id", how="semi", maintain_order="left"),
        finishes=timeline.finishes.filter(pl.col("finished_us").is_between(begin_us, end_us)),
        preemptions=timeline.preemptions.join(number, on="step", how="semi", maintain_order="left"),
        exits=timeline.exits.join(number, on="step", how="semi", maintain_order="left"),
        caps=timeline.caps.join(number, on="step", how="semi", maintain_order="left"),
        lists={
            name: rows.join(number.lazy(), on="step", how="semi") for name, rows in timeline.lists.items()
        },
        stalls=_cut(timeline.stalls.rename({"since_us": "begin_us", "until_us": "end_us"}), begin_us, end_us)
        .rename({"begin_us": "since_us", "end_us": "until_us"})
        .with_columns(pl.col("open") & (pl.col("until_us") < end_us).not_()),
        begin_us=begin_us,
        end_us=end_us,
        there_first=timeline.there_first.join(there, on="request_id", how="semi", maintain_order="left"),
        warmup_steps=0,
        is_window=True,
        ready_tables=replace(
            tables,
            gone=tables.gone.filter(pl.col("gone_us") < end_us),
            request_states=states,
            engine_states=engine,
            thread_times=thread_times(timeline, engine),
            starved=starved,
            starved_steps=find_starved_steps(steps, starved),
        ),
    )


def _cut(rows: pl.DataFrame, begin_us: int, end_us: int) -> pl.DataFrame:
    """Cut rows with ``begin_us`` and ``end_us`` to their parts in the window."""
    return rows.with_columns(pl.col("begin_us", "end_us").clip(begin_us, end_us)).filter(
        pl.col("end_us") > pl.col("begin_us")
    )


def _cut_stretches(stretches: pl.LazyFrame, number: pl.DataFrame) -> pl.LazyFrame:
    """Cut stretches to these steps; tokens computed before them count as computed from the start."""
    if number.is_empty():
        return stretches.filter(pl.lit(value=False))
    first, last = int(number["step"][0]), int(number["step"][-1])
    later = (first - pl.col("step")).clip(0)
    grown = pl.when(later > 0).then(later * pl.col("scheduled_tokens")).otherwise(0)
    return stretches.filter((pl.col("last_step") >= first) & (pl.col("step") <= last)).with_columns(
        step=pl.col("step").clip(first),
        last_step=pl.col("last_step").clip(None, last),
        computed_tokens=pl.col("computed_tokens") + grown,
    )
