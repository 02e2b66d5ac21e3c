"""``interruption`` of all ranks: common steps in lock-step that took far longer than the work of any rank.

Each rank waits for the others in every step, so whatever stops one rank stops all; vLLM also stops all
ranks to rearrange the experts of a model.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import advise, finding_of, largest
from schedtrace.diagnose.rules.interruption import KINDS, LEAST_FRAC, RULE, WHOLE_FROM
from schedtrace.model.message import Message, Number
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline import events
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.passes import PASS
from schedtrace.timeline.spans import LENGTH_US, total_us
from schedtrace.timeline.step_time import median

EXPERTS = "parallel_config.enable_eplb"
"""Setting with which vLLM rearranges the experts of a model among the ranks."""


class SlowPasses(Evidence, kw_only=True):
    """Common steps of ranks in lock-step that took far longer than the work of any rank, by kind."""

    kind: str
    """``periodic``, ``episode``, ``scattered`` or ``first_steps``, with the meanings as for one engine."""
    times: int
    """Number of common steps that took far longer than their work."""
    passes: int
    """Number of all common steps."""
    time_ms: float
    """Total time by which these common steps exceeded the expected time."""
    factor: float
    """Median ratio of actual to expected time."""
    period_steps: float | None
    """Number of common steps from one ``periodic`` interruption to the next."""
    period_ms: float | None
    """Time from one ``periodic`` interruption to the next."""
    step_interval: int | None
    """Number of common steps after which vLLM rearranges the experts (``eplb_config.step_interval``); None if
    vLLM does not, or if this is not recorded."""

    @property
    def cycle(self) -> Message:
        """Number of common steps, or time, after which the slow steps recur."""
        if self.period_steps is not None:
            return say("{steps:n common step}", steps=round(self.period_steps))
        return say("{time:ms}", time=self.period_ms or 0)

    @property
    def rearranges(self) -> bool:
        """Whether the slow steps recur as often as vLLM rearranges the experts."""
        period, interval = self.period_steps, self.step_interval
        return bool(period and interval) and abs(period - interval) <= events.LATE_FRAC * interval  # type: ignore[operator]  # both are there


PASSES = {
    events.PERIODIC: (
        "All ranks stop every {cycle}[{rearranges:?} (experts are rearranged)]",
        "All ranks stop every {cycle}[{rearranges:?}, as often as vLLM rearranges the experts]",
    ),
    events.FIRST: (
        "The first common steps are slow",
        "The first common steps of all ranks took far too long",
    ),
}
"""Title and verdict by kind."""
NOW_AND_THEN = ("All ranks stop now and then", "All ranks stop now and then")


def _find_in_ranks(ranks: RecordedRanks) -> Findings:
    if not ranks.lockstep or not ranks.total_requests_us:
        return
    for rows in ranks.slow_passes.partition_by("kind", maintain_order=True):
        turns = ranks.turns.join(rows.select(*PASS, length_us=LENGTH_US), on=PASS, maintain_order="left")
        share = min(
            1.0,
            turns.select((pl.col("length_us") * pl.col("requests")).sum()).item() / ranks.total_requests_us,
        )
        if share >= LEAST_FRAC:
            yield _passes_finding(ranks, rows, turns, share)


def _passes_finding(ranks: RecordedRanks, rows: pl.DataFrame, turns: pl.DataFrame, share: float) -> Finding:
    """Return the finding about slow common steps of one kind.

    Args:
        ranks: The ranks.
        rows: These common steps, from ``slow_passes``.
        turns: The ranks' own steps in these common steps.
        share: Share of the requests' time that these steps cost.
    """
    kind, time_us, settings = rows["kind"][0], total_us(rows), ranks.first_header.settings
    by_rank = turns.group_by("rank").agg(pl.col("requests").sum())
    fullest = int(by_rank.sort("requests", "rank", descending=[True, False])["rank"][0])
    shown = turns.filter(pl.col("rank") == fullest)
    title, verdict = PASSES.get(kind, NOW_AND_THEN)
    interval = settings.get("eplb_config.step_interval") if settings.get(EXPERTS) else None
    period_us = rows["period_us"].mean()
    evidence = SlowPasses(
        kind=kind,
        times=rows.height,
        passes=ranks.passes.height,
        time_ms=time_us / 1e3,
        factor=median(rows["factor"]),
        period_steps=rows["period_steps"].mean(),  # type: ignore[arg-type]  # of numbers
        period_ms=None if period_us is None else float(period_us) / 1e3,  # type: ignore[arg-type]  # of numbers
        step_interval=interval if isinstance(interval, int) else None,
    )
    return finding_of(
        evidence,
        shown,
        values={"factor_of_work": Number(evidence.factor, 0 if evidence.factor >= WHOLE_FROM else 1)},
        title=title,
        verdict=f"{verdict}: {{share:%}} of the requests' time.",
        share_frac=share,
        cause=f"{kind}_of_all_ranks",
        count=rows.height,
        engine_rank=fullest,
        engine_ranks=by_rank["rank"].sort().to_list(),
        message="{times:n} of {passes:n common step} took {factor_of_work} times as long as any rank's work "
        "explains, {time_ms:ms} longer in total.",
        advice=_advice_for_passes(evidence, settings),
        example="{at} of rank {rank:n} took {length_us:us} longer, {factor:n1} times as long as expected.",
        cases=largest(shown.join(rows.select(*PASS, "factor"), on=PASS), "length_us"),
        cost_ms=evidence.time_ms,
        cost_frac=time_us / ranks.passes_us,
    )


def _advice_for_passes(evidence: SlowPasses, settings: Mapping[str, Any]) -> list[Advice]:
    """Return advice on rearranging experts if that is the cause, else on what to examine."""
    if evidence.kind == events.FIRST:
        return [advise(KINDS[events.FIRST].advice)]
    if not evidence.rearranges:
        return [
            advise("Profile one of these common steps on every rank: the trace does not see inside a step.")
        ]
    advice = [
        advise(
            "A larger {option:setting} (now {step_interval:n}).",
            evidence,
            option="--eplb-config.step_interval",
            costs="Experts are balanced later.",
        )
    ]
    if (  # vLLM could move experts while steps run
        settings.get("eplb_config.use_async") is False
        and settings.get("eplb_config.policy") == "default"
        and settings.get("eplb_config.communicator") not in ("torch_nccl", "pynccl")
        and not settings.get("parallel_config.enable_elastic_ep")
    ):
        advice.insert(
            0,
            advise(
                "{option:setting} (now off): experts move while steps run.",
                option="--eplb-config.use_async",
                costs="Memory for the moving weights.",
            ),
        )
    return advice


RANKS_RULE: Rule[RecordedRanks] = replace(cast("Rule[Any]", RULE), find=_find_in_ranks)
