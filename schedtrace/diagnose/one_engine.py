"""Facts that a report needs about one engine of a run, so that its timeline can be released."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from schedtrace.diagnose.effective_settings import Use, use_of
from schedtrace.diagnose.package_rules import package_findings
from schedtrace.diagnose.root_causes import Judged, ordered_findings
from schedtrace.diagnose.rules import PACKAGES, RULES, slow_steps
from schedtrace.diagnose.rules.allowed_settings import allowed
from schedtrace.diagnose.run_statistics import EngineSums, engine_sums
from schedtrace.diagnose.tail import tails
from schedtrace.diagnose.time_split import engine_split, engine_time, request_time
from schedtrace.diagnose.trials import strip, trial_reports
from schedtrace.diagnose.verdict import Unlimited, unlimited
from schedtrace.model.manifest import Manifest
from schedtrace.model.message import Message
from schedtrace.model.report import (
    CapRow,
    CauseRow,
    EngineTime,
    LatencyTail,
    RequestTime,
    StepExcess,
    StripCell,
    TrialReport,
)
from schedtrace.model.say import say
from schedtrace.model.trace_facts import SHOWS_LIMITS, Fact
from schedtrace.timeline.engine_ranks import RankSummary, rank_of
from schedtrace.timeline.queue_waits import overtakings
from schedtrace.timeline.timeline import Timeline

_EXIT = ["loop", "kind", "cause", "detail", "location", "via", "refusal"]
_CAP = ["cap", "location"]
_REQUESTS = pl.col("request_ids").explode().drop_nulls().n_unique()


def exit_counts(timeline: Timeline) -> pl.DataFrame:
    """Return a row per kind of exit of an engine: ``exits``, ``steps``, ``request_ids``, budget ``left``."""
    return timeline.exits.group_by(_EXIT).agg(
        pl.col("count").sum().alias("exits"),
        pl.col("step").n_unique().cast(pl.Int64).alias("steps"),
        pl.col("request_id").drop_nulls().unique().alias("request_ids"),
        (pl.col("budget_left") * pl.col("count")).sum().alias("left"),
    )


def cause_table(engines: Sequence[pl.DataFrame]) -> list[CauseRow]:
    """Return one row per kind of exit over all engines: refusals first, then by frequency.

    Args:
        engines: ``exit_counts`` of each engine.
    """
    rows = (
        pl.concat(engines)
        .group_by(_EXIT)
        .agg(pl.col("exits", "steps", "left").sum(), requests=_REQUESTS)
        .with_columns(mean_budget_left=pl.col("left") / pl.col("exits"))
        .drop("left")
        .sort("refusal", "exits", *_EXIT[:-1], descending=[True, True, *[False] * 6])
    )
    return [CauseRow(**row) for row in rows.to_dicts()]


def cap_counts(timeline: Timeline) -> pl.DataFrame:
    """Return a row per kind of cap of an engine: ``chunks``, ``steps``, ``request_ids``, ``withheld_tokens``.

    For the steps of each kind, ``left`` is the sum of the unused budget, and ``known`` the number of steps
    with a known budget.
    """
    of_steps = pl.struct("step", "remaining_budget").unique().struct.field("remaining_budget")
    return timeline.caps.group_by(_CAP).agg(
        pl.len().cast(pl.Int64).alias("chunks"),
        pl.col("step").n_unique().cast(pl.Int64).alias("steps"),
        pl.col("request_id").drop_nulls().unique().alias("request_ids"),
        (pl.col("wanted_tokens") - pl.col("capped_tokens")).sum().alias("withheld_tokens"),
        of_steps.sum().cast(pl.Int64).alias("left"),
        of_steps.count().cast(pl.Int64).alias("known"),
    )


def cap_table(engines: Sequence[pl.DataFrame]) -> list[CapRow]:
    """Return one row per kind of cap over all engines, the kind that withheld the most tokens first.

    Args:
        engines: ``cap_counts`` of each engine.
    """
    rows = (
        pl.concat(engines)
        .group_by(_CAP)
        .agg(pl.col("chunks", "steps", "withheld_tokens", "left", "known").sum(), requests=_REQUESTS)
        .with_columns(mean_budget_left=pl.when(pl.col("known") > 0).then(pl.col("left") / pl.col("known")))
        .drop("left", "known")
        .sort("withheld_tokens", *_CAP, descending=[True, False, False])
    )
    return [CapRow(**row) for row in rows.to_dicts()]


@dataclass(frozen=True)
class OneEngine:
    """Figures and findings of one engine."""

    rank: RankSummary
    judged: Judged
    unlimited: Unlimited
    problems: list[Message]
    """Notices about requests that were present when the trace began, and about steps in which the rebuilt
    queue differs from the recorded counts.
    """
    trials: list[TrialReport]
    request_time: list[RequestTime]
    engine_time: list[EngineTime]
    step_excess: list[StepExcess]
    strip: list[StripCell]
    tails: list[LatencyTail]
    split: pl.DataFrame | None
    """Split of the requests' time; None if the trace does not show it."""
    exits: pl.DataFrame
    caps: pl.DataFrame
    sums: EngineSums
    use: Use | None
    warmup_steps: int
    requests_missing: bool


def one_engine(timeline: Timeline, manifest: Manifest | None, *, engines: int) -> OneEngine:
    """Summarize one engine and judge it by all rules.

    Args:
        timeline: Its trace.
        manifest: Has the front end's figures; None: they are of something else.
        engines: Of the run.
    """
    times, limits = Fact.TIMES in timeline.facts, timeline.facts >= SHOWS_LIMITS
    findings = judge(timeline)
    return OneEngine(
        rank=rank_of(timeline),
        judged=findings,
        unlimited=unlimited(timeline),
        trials=trial_reports(timeline, manifest, engines=engines),
        strip=strip(timeline),
        tails=tails(timeline) if limits else [],
        split=engine_split(timeline) if limits else None,
        request_time=request_time(timeline) if limits else [],
        engine_time=engine_time(timeline) if times else [],
        step_excess=_step_excess(timeline) if slow_steps.RULE.needs <= timeline.facts else [],
        sums=engine_sums(timeline),
        exits=exit_counts(timeline),
        caps=cap_counts(timeline),
        use=use_of(timeline),
        problems=[*_begin_problems(timeline), *_queue_problems(timeline), *findings.problems],
        warmup_steps=timeline.warmup_steps,
        requests_missing=timeline.requests_missing,
    )


def _step_excess(timeline: Timeline) -> list[StepExcess]:
    from schedtrace.diagnose.excess import step_excesses  # noqa: PLC0415  # NumPy loads late

    return step_excesses(timeline)


def judge(timeline: Timeline) -> Judged:
    """Return the findings of all rules on one engine."""
    own = (rule for rule in RULES.values() if rule.code not in PACKAGES.rules)
    findings = [finding for rule in own if rule.needs <= timeline.facts for finding in rule(timeline)]
    more, problems = package_findings(timeline, PACKAGES)
    result = ordered_findings(timeline, [allowed(timeline, finding) for finding in findings + more])
    return replace(result, problems=problems)


def _begin_problems(timeline: Timeline) -> list[Message]:
    """Return a notice about requests that were present when the trace began."""
    if timeline.there_first.is_empty():
        return []
    return [
        say(
            "{there:n request} {were} there when the recording began: what happened to them before is not "
            "known, and none counts as an arrival.",
            there=timeline.there_first.height,
            were="was" if timeline.there_first.height == 1 else "were",
        )
    ]


def _queue_problems(timeline: Timeline) -> list[Message]:
    """Return notices about a queue that is not vLLM's, and about a rebuilt queue of another length."""
    if not {Fact.QUEUE, Fact.LIVES, Fact.REQUESTS} <= timeline.facts:
        return []
    problems, wrong = [], timeline.mismatches
    if timeline.header.foreign_queues:
        problems.append(
            say(
                "Requests wait in {queue:code}, which is not vLLM's: its order is not known. "
                "{overtook:n} of {arrived:n request} were admitted before an earlier one that waited.",
                queue=", ".join(timeline.header.foreign_queues),
                overtook=overtakings(timeline, timeline.gone),
                arrived=timeline.new_requests.height,
            )
        )
    if wrong.height:
        problems.append(
            say(
                "The waiting queue rebuilt from the trace disagrees with the recorded count after "
                "{wrong:n} of {steps:n step}: after {step:step} it has {reconstructed:n request}, the "
                "record {recorded:n}. Findings that name waiting requests may be wrong.",
                wrong=wrong.height,
                steps=timeline.steps.height,
                **wrong.row(0, named=True),
            )
        )
    return problems
