"""``balance-without-effect``: balance scheduling is on where no rank waits for another one."""

from typing import ClassVar

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import StepExample, advise, finding_of
from schedtrace.diagnose.uneven_ranks import CAUSE, has_balance_scheduler
from schedtrace.model.report import MAX_STEPS, Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.timeline import Timeline

SHUT = (
    "The gate refused requests in {closed_steps:n step} for {waited_ms:ms} in total; at most "
    "{most_running:n} of {seats:n} seats were taken."
)


class GateExample(StepExample, kw_only=True):
    """A step in which the gate was closed."""

    rank: int
    """Rank of the step."""
    running: int
    """Number of running requests."""
    waiting: int
    """Number of waiting requests."""
    cause: ClassVar[str] = CAUSE


class BalanceWithoutEffect(Evidence, kw_only=True):
    """What the gate did."""

    scheduler_class: str
    """The scheduler's class."""
    ranks: int
    """Number of engines in the run, which step independently."""
    seats: int
    """``max_num_seqs``."""
    most_running: int
    """Most requests that ran at a time on one engine."""
    closed_steps: int
    """Number of steps in which the gate refused requests."""
    waited_ms: float
    """Time that the gate refused requests."""
    examples: list[GateExample]
    """Steps in which the gate was closed."""

    @property
    def several(self) -> bool:
        """Whether there are other engines."""
        return self.ranks > 1


def _find(ranks: RecordedRanks) -> Findings:
    header = ranks.header
    if not has_balance_scheduler(header) or ranks.lockstep or header.data_parallel_size != 1:
        return
    closed = [_closed(ranks.timeline(rank.number)) for rank in ranks.each]
    steps, waited_us = pl.concat([rows for rows, _ in closed]), sum(us for _, us in closed)
    share = waited_us / ranks.total_requests_us if ranks.total_requests_us else None
    evidence = BalanceWithoutEffect(
        scheduler_class=header.scheduler_class,
        ranks=len(ranks.each),
        seats=ranks.seats_per_rank,
        most_running=ranks.most_running,
        closed_steps=steps.height,
        waited_ms=waited_us / 1e3,
        examples=GateExample.first(steps),
    )
    yield finding_of(
        evidence,
        steps,
        engine_rank=steps["rank"][0] if steps.height else ranks.each[0].number,
        title="Balance scheduling without ranks to balance",
        verdict=say(
            "Balance scheduling kept requests waiting for {share:%} of their time, although no rank "
            "waits for another one here.",
            share=share or 0.0,
        ),
        share_frac=share,
        cause=CAUSE if steps.height else None,
        via="source",
        engine_ranks=sorted(steps["rank"].unique().to_list()),
        steps=steps["step"].sort().head(MAX_STEPS).to_list(),
        message="{scheduler_class:code} balances ranks in lock-step, but this run has "
        "[{several:!}one engine][{several:?}{ranks:n} engines that step independently]. "
        + (SHUT if evidence.closed_steps else "The gate never closed: it had no effect."),
        advice=[
            advise(
                "Leave out {scheduler_class:code}: vLLM's own scheduler uses all {seats:n} seats.",
                evidence,
            )
        ],
        example="In {at} {running:n} ran and {waiting:n request} waited for {cause:cause}.",
    )


def _closed(timeline: Timeline) -> tuple[pl.DataFrame, int]:
    """Return the steps of one engine in which the gate refused requests, and the time that these waited."""
    by_gate = timeline.exits.filter(_by_gate()).select("step").unique()
    steps = timeline.steps.join(by_gate, on="step", how="semi", maintain_order="left")
    waited = timeline.request_states.filter(pl.col("cause") == CAUSE).select(LENGTH_US.sum()).item()
    return steps.select(
        "step",
        "trial",
        pl.lit(timeline.rank).alias("rank"),
        running="num_running_after",
        waiting="num_waiting_after",
    ), int(waited)


def _by_gate() -> pl.Expr:
    """Select exits of the gate: schedtrace's have their own cause, other packages' guards name it."""
    return (pl.col("cause") == CAUSE) | pl.col("guard").str.contains("(?i)balance").fill_null(value=False)


RULE = Rule(
    code="balance-without-effect",
    summary="balance scheduling is on where there are no ranks in lock-step to balance: it can only cost a "
    "seat",
    needs=frozenset({Fact.CONFIG, Fact.EXITS}),
    find=_find,
)
