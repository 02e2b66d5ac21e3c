"""First decision that differs between two runs' schedulers, trial by trial.

Request ids differ between runs, so requests are compared by their number within the trial: the number in the
ids of ``schedtrace run`` (``t<trial>-<number>-...``), or else the place in the order of arrival.
"""

from functools import partial
from typing import Any

import polars as pl

from schedtrace.model.comparison import DecidedStep, Decisions, Divergence
from schedtrace.model.trace_facts import Fact
from schedtrace.read.lines import LONGEST_US
from schedtrace.timeline.timeline import Timeline

GIVEN = (
    "arrived",
    "num_running_before",
    "num_waiting_before",
    "token_budget",
    "max_num_running_reqs",
    "kv_blocks_free_before",
)
"""Inputs of a decision that a trace records."""

_NEEDS = {Fact.REQUESTS, Fact.LIVES}
_RECORDED_BY = {"scheduled": Fact.REQUESTS, "preempted": Fact.PREEMPTIONS, "causes": Fact.EXITS}

_NUMBER = r"^t\d+-(\d+)(?:-|$)"
_OF_TRIAL = ["trial", "request_id"]

_Row = dict[str, Any]


def compare_decisions(*, base: Timeline, new: Timeline) -> Decisions:
    """Return the first step that was decided differently; common trials are aligned at their first steps.

    This compares the scheduled requests with their tokens, the preempted requests and, if both traces record
    them in the same way, the causes of the exits.
    """
    both = base.facts & new.facts
    trials = [trial for trial in base.trials() if trial in new.trials()] if both >= _NEEDS else []
    compared = [name for name, fact in _RECORDED_BY.items() if fact in both]
    if base.header.exits_via != new.header.exits_via:
        compared = [name for name in compared if name != "causes"]
    sides = [_decided_steps(timeline) for timeline in (base, new)] if trials else []
    decisions = Decisions(trials_compared=len(trials), trials_alike=0, common_steps=[], first=None)
    for trial in trials:
        here, there = (side.filter(pl.col("trial").eq_missing(pl.lit(trial))) for side in sides)
        rows = (side.select(compared).iter_rows() for side in (here, there))
        differ = (
            at for at, (base_row, new_row) in enumerate(zip(*rows, strict=False)) if base_row != new_row
        )
        at = next(differ, min(here.height, there.height))
        decisions.common_steps.append(at)
        if at == here.height == there.height:
            decisions.trials_alike += 1
        elif decisions.first is None:
            old, now = (side.row(at, named=True) if at < side.height else None for side in (here, there))
            decisions.first = Divergence(
                trial=trial,
                at=at,
                base=_decided(old, now),
                new=_decided(now, old),
                decided=[name for name in compared if old and now and old[name] != now[name]],
                given=[name for name in GIVEN if old and now and old[name] != now[name]],
            )
    return decisions


def _decided(row: _Row | None, counterpart: _Row | None) -> DecidedStep | None:
    if row is None:
        return None
    there = counterpart["scheduled"] if counterpart else []
    differ = [share for at, share in enumerate(row["scheduled"]) if there[at : at + 1] != [share]]
    return DecidedStep(
        step=row["step"],
        requests=row["total_requests"],
        tokens=row["used_tokens"],
        first_different=differ[0] if differ else None,
        preempted=row["preempted"],
        causes=row["causes"],
        **{name: row[name] for name in GIVEN},
    )


def _decided_steps(timeline: Timeline) -> pl.DataFrame:
    """Return the steps with a decision to make: those with scheduled, preempted or waiting requests.

    In addition to the columns of ``Timeline.steps``: ``scheduled`` (``number: tokens`` each, in order),
    ``preempted`` (numbers), ``causes`` (``loop: cause`` of the exits, each once) and ``arrived``: requests of
    the trial that had reached the scheduler when the step began.
    """
    numbered = partial(
        pl.LazyFrame.join,
        other=_numbers(timeline),
        on=_OF_TRIAL,
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    tokens = pl.format("{}: {} tokens", pl.col("number").cast(pl.String).fill_null("?"), "scheduled_tokens")
    decided = {
        "scheduled": (numbered(timeline.requests), tokens),
        "preempted": (numbered(timeline.preemptions.lazy().filter(pl.col("in_schedule"))), pl.col("number")),
        "causes": (timeline.exits.lazy(), pl.format("{}: {}", "loop", "cause").unique(maintain_order=True)),
    }
    steps = timeline.steps
    for name, (rows, value) in decided.items():
        lists = rows.group_by("step", maintain_order=True).agg(value.alias(name)).collect()
        steps = steps.join(lists, on="step", how="left", maintain_order="left").with_columns(
            pl.col(name).fill_null(pl.lit([], dtype=lists.schema[name]))
        )
    wanted = (pl.col("total_requests") > 0) | (pl.col("eligible_after") > 0)
    arrivals = timeline.new_requests.sort("queued_us")
    of = pl.col("trial").fill_null(-1)
    counted = arrivals.select("queued_us", of=of, arrived=pl.col("queued_us").cum_count().over("trial"))
    return (
        steps.filter(wanted | (pl.col("preempted").list.len() > 0))
        .with_columns(of=of)
        .sort("start_us", maintain_order=True)
        .join_asof(counted, left_on="start_us", right_on="queued_us", by="of", check_sortedness=False)
        .with_columns(pl.col("arrived").fill_null(0))
        .drop("of", "queued_us", strict=False)
    )


def _numbers(timeline: Timeline) -> pl.LazyFrame:
    """Return the number of each request by trial and id; requests present at the beginning come first."""
    columns = (*_OF_TRIAL, "queued_us")
    there = timeline.present.select(*_OF_TRIAL, queued_us=pl.int_range(pl.len()) - pl.lit(LONGEST_US))
    requests = pl.concat([there, timeline.arrivals.select(columns)])
    requests = requests.unique(_OF_TRIAL, keep="first", maintain_order=True)
    in_id = pl.col("request_id").str.extract(_NUMBER, 1).cast(pl.Int64)
    in_order = pl.col("queued_us").rank("ordinal").over("trial").cast(pl.Int64) - 1
    by_id = timeline.header.trial_ids and not timeline.header.hashed_ids
    return requests.select(*_OF_TRIAL, number=in_id if by_id else in_order).lazy()
