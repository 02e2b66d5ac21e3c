"""``preemption``: running requests lost their KV blocks and had to compute tokens again.

The trace has the recomputed tokens of each step; ``record/assemble.py`` counts them.
"""

import msgspec
import polars as pl

from schedtrace.diagnose.kv_cache import resumptions, steps_per_block
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import (
    CRITICAL_COST_FRAC,
    CostFigures,
    largest,
    prefill_cost,
    step_finding,
)
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING
from schedtrace.model.report import Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

CRITICAL_RECOMPUTE_FRAC = 0.10
"""Minimum share of recomputed tokens for a critical finding; recomputation costs about this share of
throughput."""
OFTEN = 3
"""Number of preemptions of one request that are a storm; the third shows that resuming does not help."""
FEWEST_PREEMPTIONS = 3
MUCH_FRAC = 0.10
"""Minimum share of prefill done twice that is a storm if there are at least ``FEWEST_PREEMPTIONS``."""
STORM_NEEDS = frozenset({Fact.REQUESTS, Fact.BLOCKS, Fact.TIMES})
"""Facts that a trace must contain to show whether there is a storm."""
STORM = (
    " It is a storm: {cycles:n} came within {cycle_steps:n step} of admission, and {prefill_again_frac:%} of "
    "all prefill was done twice. The first was in {first_step:step} with {first_running:n request} running"
    "[ and {first_used_frac:%} of the KV cache in use]."
)
STORM_EXAMPLE = (
    "{at} preempted {request_id:id}[ (its preemption number {num_preemptions:n})][ {lasted_steps:n step} "
    "after its admission]: it lost {lost_tokens:n computed token} and was away for {away_us:us}."
)
EXAMPLE = (
    "{at} preempted {request_id:id} for [{itself:?}blocks that it needed itself][{itself:!}"
    "[{for_request_id:id}][{for_request_id:!}a request that is not recorded]], which discarded "
    "{lost_tokens:n computed token}."
)


class Storm(msgspec.Struct, kw_only=True):
    """Repeated preemptions of the same requests, or preemptions that discard much work."""

    cycles: int
    """Number of preemptions within ``cycle_steps`` steps of an admission."""
    cycle_steps: int
    """Maximum number of steps from an admission to a preemption that counts in ``cycles``."""
    prefill_again_frac: float
    """Share of all prefill that was done twice."""
    first_step: int
    """First step that preempted a request."""
    first_running: int
    """Number of running requests before ``first_step``."""
    first_used_frac: float | None
    """Share of KV blocks in use before ``first_step``: ``1 - kv_blocks_free_before / (kv_blocks_total - 1)``
    (one block is vLLM's null block); None: not known."""


class Preemptions(Evidence, kw_only=True):
    """Preempted requests and their tokens."""

    victims: int
    """Number of different requests that were preempted."""
    lost_tokens: int
    """Number of computed tokens that were lost."""
    recomputed_tokens: int
    """Number of tokens that were computed again."""
    storm: Storm | None
    """Figures of a storm; None: there is no storm, or the record lacks the facts that show it."""


def _find(timeline: Timeline) -> Findings:
    lost = timeline.preemptions.filter(pl.col("in_schedule"))
    if lost.is_empty():
        return
    each = lost.group_by("request_id", maintain_order=True).agg(times=pl.len())
    repeated = each.filter(pl.col("times") > 1).sort("times", descending=True, maintain_order=True)
    recomputed = int(timeline.steps["recomputed_tokens"].sum())
    part = recomputed / max(1, int(timeline.steps["used_tokens"].sum()), recomputed)
    storm = _storm(timeline, repeated, recomputed)
    cost: CostFigures = {}
    cases = largest(lost, "lost_tokens")
    if storm is not None:
        cost = prefill_cost(timeline, recomputed)
        most = repeated.filter(pl.col("times") == pl.col("times").max())
        away = largest(resumptions(timeline), "away_us")
        cases = away.join(most, on="request_id", how="semi", maintain_order="left") if most.height else away
    critical = part >= CRITICAL_RECOMPUTE_FRAC or (cost.get("cost_frac") or 0) >= CRITICAL_COST_FRAC
    often, times = repeated.row(0) if repeated.height else (None, None)
    evidence = Preemptions(
        victims=lost["request_id"].n_unique(),
        lost_tokens=int(lost["lost_tokens"].sum()),
        recomputed_tokens=recomputed,
        storm=storm,
    )
    yield step_finding(
        timeline,
        lost,
        evidence,
        severity="critical" if critical else "warning",
        cause=Cause.KV_BLOCKS,
        tokens=evidence.lost_tokens,
        message="{steps:n preemption}{trials} discarded {lost_tokens:n computed token} of "
        "{victims:n request}[, {repeated:n} of them repeatedly ({often:id} {times:n time})]. vLLM computed "
        "{recomputed_tokens:n token} again, {part:%} of all tokens computed.{of_storm}",
        values={
            "repeated": repeated.height,
            "often": often,
            "times": times,
            "part": part,
            "of_storm": say(STORM, storm) if storm else NOTHING,
            "itself": cases["for_request_id"][0] == cases["request_id"][0],
        },
        example=STORM_EXAMPLE if storm else EXAMPLE,
        cases=cases,
        **cost,
    )


def _storm(timeline: Timeline, repeated: pl.DataFrame, recomputed: int) -> Storm | None:
    """Return the figures of a preemption storm; None if there is none, or the trace cannot show it."""
    if not timeline.facts >= STORM_NEEDS:
        return None
    lost = resumptions(timeline)
    prefill = int((timeline.steps["used_tokens"] - timeline.steps["decode_tokens"]).sum())
    part = recomputed / max(1, prefill, recomputed)
    often = repeated.height > 0 and repeated["times"][0] >= OFTEN
    if not often and (lost.height < FEWEST_PREEMPTIONS or part < MUCH_FRAC):
        return None
    first = timeline.steps.filter(pl.col("step").is_in(pl.lit(lost["step"]).implode())).row(0, named=True)
    total, free = first["kv_blocks_total"], first["kv_blocks_free_before"]
    # One block is vLLM's null block, which nobody uses.
    is_counted = free is not None and total is not None and total > 1
    return Storm(
        cycles=lost.filter("cycle").height,
        cycle_steps=steps_per_block(timeline),
        prefill_again_frac=part,
        first_step=first["step"],
        first_running=first["num_running_before"],
        first_used_frac=1 - free / (total - 1) if is_counted else None,
    )


RULE = Rule(
    code="preemption",
    summary="running requests lost their KV blocks and had to compute again",
    needs=frozenset({Fact.PREEMPTIONS}),
    find=_find,
    symptom_of=("kv-bound", "no-progress"),
)
