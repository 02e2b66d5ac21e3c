"""Finding about a balance that has no ranks to balance. Imported by schedtrace alone."""

from collections.abc import Iterator

import polars as pl

from schedtrace import Evidence, Fact, Finding, Rule, Timeline, step_finding

CAUSES = ("ranks_full", "rank_balance")
"""Causes of a closed gate: of the scheduler beside this file, and of ``schedtrace.balance``."""


class ClosedGate(Evidence, kw_only=True):
    """Effect of the gate on an engine that steps independently of all others."""

    scheduler_class: str
    """Class of the scheduler."""
    closed_steps: int
    """Number of steps in which the gate refused requests."""
    waited_ms: float
    """Time that the gate refused requests, added up over them."""


def find(timeline: Timeline) -> Iterator[Finding]:
    """Yield a finding if a scheduler that balances ranks runs on an engine without any."""
    header = timeline.header
    if "balance" not in header.scheduler_class.lower() or header.data_parallel_size != 1:
        return
    refused = timeline.exits.filter(pl.col("cause").is_in(CAUSES))
    closed = timeline.steps.join(refused.select("step").unique(), on="step", how="semi")
    waits = timeline.request_states.filter(pl.col("cause").is_in(CAUSES))
    waited_us = int(waits.select((pl.col("end_us") - pl.col("begin_us")).sum()).item())
    yield step_finding(
        timeline,
        closed,
        ClosedGate(
            scheduler_class=header.scheduler_class,
            closed_steps=closed.height,
            waited_ms=waited_us / 1e3,
        ),
        title="Balance scheduling without ranks to balance",
        verdict="Balance scheduling kept requests waiting for {share:%} of their time, although no rank "
        "waits for another one here: leave out {scheduler_class:code}.",
        share_frac=waited_us / timeline.requests_us if timeline.requests_us else None,
        message="[{closed_steps:?}The gate refused requests in {closed_steps:n step} for {waited_ms:ms} in "
        "total.][{closed_steps:!}The gate never closed: it had no effect.]",
    )


RULE = Rule(
    code="balance-without-effect",
    summary="balance scheduling is on where there are no ranks in lock-step to balance",
    needs=frozenset({Fact.CONFIG, Fact.EXITS}),
    find=find,
)
