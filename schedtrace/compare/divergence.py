"""Where two runs' schedulers first decided differently, trial by trial.

Request ids differ between runs, so requests are compared by their number within the trial: that of
``schedtrace run``'s ids (``t<trial>-<number>-...``), else their place in the order of arrival.
"""

from typing import Any

import polars as pl

from schedtrace.compare.decided import decided_steps
from schedtrace.model.comparison import DecidedStep, Decisions, Divergence
from schedtrace.model.facts import Fact
from schedtrace.timeline.timeline import Timeline

GIVEN = (
    "arrived",
    "num_running_before",
    "num_waiting_before",
    "token_budget",
    "max_num_running_reqs",
    "kv_blocks_free_before",
)
"""What a decision is made from, as far as a trace tells it."""

_NEEDS = {Fact.REQUESTS, Fact.LIVES}
_TOLD_BY = {"scheduled": Fact.REQUESTS, "preempted": Fact.PREEMPTIONS, "causes": Fact.EXITS}

_Row = dict[str, Any]


def compare_decisions(*, base: Timeline, new: Timeline) -> Decisions:
    """Align the steps of each trial that both runs have, from its first, and find the first that differs.

    Compared are the requests scheduled with their tokens, those preempted, and the causes of the exits where
    both traces know these in the same way.
    """
    both = base.facts & new.facts
    trials = [trial for trial in base.trials() if trial in new.trials()] if both >= _NEEDS else []
    compared = [name for name, fact in _TOLD_BY.items() if fact in both]
    if base.header.exits_via != new.header.exits_via:
        compared = [name for name in compared if name != "causes"]
    sides = [decided_steps(timeline) for timeline in (base, new)] if trials else []
    decisions = Decisions(trials_compared=len(trials), trials_alike=0, common_steps=[], first=None)
    for trial in trials:
        here, there = (side.filter(pl.col("trial").eq_missing(pl.lit(trial))) for side in sides)
        at = _common_steps(here, there, compared)
        decisions.common_steps.append(at)
        if at == here.height == there.height:
            decisions.trials_alike += 1
        elif decisions.first is None:
            decisions.first = _divergence(at, _row(here, at), _row(there, at), compared)
            decisions.first.trial = trial
    return decisions


def _common_steps(base: pl.DataFrame, new: pl.DataFrame, compared: list[str]) -> int:
    """How many rows from the first on are alike."""
    both = min(base.height, new.height)
    pairs = zip(
        base.select(compared).head(both).iter_rows(), new.select(compared).head(both).iter_rows(), strict=True
    )
    return next((at for at, (one, other) in enumerate(pairs) if one != other), both)


def _row(steps: pl.DataFrame, at: int) -> _Row | None:
    return steps.row(at, named=True) if at < steps.height else None


def _divergence(at: int, base: _Row | None, new: _Row | None, compared: list[str]) -> Divergence:
    sides = _decided(base, new), _decided(new, base)
    return Divergence(
        trial=None,
        at=at,
        base=sides[0],
        new=sides[1],
        decided=[name for name in compared if base and new and base[name] != new[name]],
        given=[name for name in GIVEN if base and new and base[name] != new[name]],
    )


def _decided(row: _Row | None, other: _Row | None) -> DecidedStep | None:
    if row is None:
        return None
    there = other["scheduled"] if other else []
    differ = [one for at, one in enumerate(row["scheduled"]) if there[at : at + 1] != [one]]
    return DecidedStep(
        step=row["step"],
        requests=row["total_requests"],
        tokens=row["used_tokens"],
        first_different=differ[0] if differ else None,
        preempted=row["preempted"],
        causes=row["causes"],
        **{name: row[name] for name in GIVEN},
    )
