"""What a report needs of one engine of a run: taken from its timeline, which need not be kept."""

from dataclasses import dataclass

import polars as pl

from schedtrace.diagnose.engine_sums import EngineSums, engine_sums
from schedtrace.diagnose.exit_counts import cap_counts, exit_counts
from schedtrace.diagnose.root_causes import Judged, judged
from schedtrace.diagnose.rules import RULES
from schedtrace.diagnose.rules.allowed import allowed
from schedtrace.diagnose.settings.used import Use, use_of
from schedtrace.diagnose.time_split import engine_split
from schedtrace.diagnose.times import engine_time, request_time
from schedtrace.diagnose.trials import strip, trial_reports
from schedtrace.diagnose.verdict import Unlimited, unlimited
from schedtrace.model.facts import Fact
from schedtrace.model.manifest import Manifest
from schedtrace.model.message import Code, Count, Message, Number, Steps, message
from schedtrace.model.report import EngineTime, RequestTime, StripCell, TrialReport
from schedtrace.timeline.rank import Rank, rank_of
from schedtrace.timeline.timeline import Timeline
from schedtrace.timeline.waits import mismatches, overtakings


@dataclass(frozen=True)
class OneEngine:
    """Figures and findings of one engine."""

    rank: Rank
    judged: Judged
    unlimited: Unlimited
    problems: list[Message]
    """Where the queue rebuilt from its trace disagrees with the recorded counts."""
    trials: list[TrialReport]
    request_time: list[RequestTime]
    engine_time: list[EngineTime]
    strip: list[StripCell]
    split: pl.DataFrame
    exits: pl.DataFrame
    caps: pl.DataFrame
    sums: EngineSums
    use: Use | None
    warmup_steps: int
    requests_missing: bool


def one_engine(timeline: Timeline, manifest: Manifest | None, *, engines: int) -> OneEngine:
    """Judge and sum up one engine.

    Args:
        timeline: Its trace.
        manifest: Has the front end's figures; None: they are of something else.
        engines: Of the run.
    """
    return OneEngine(
        rank=rank_of(timeline),
        judged=judge(timeline),
        unlimited=unlimited(timeline),
        problems=_of_queue(timeline),
        trials=trial_reports(timeline, manifest, engines=engines),
        request_time=request_time(timeline),
        engine_time=engine_time(timeline),
        strip=strip(timeline),
        split=engine_split(timeline),
        exits=exit_counts(timeline),
        caps=cap_counts(timeline),
        sums=engine_sums(timeline),
        use=use_of(timeline),
        warmup_steps=timeline.warmup_steps,
        requests_missing=timeline.requests_missing,
    )


def judge(timeline: Timeline) -> Judged:
    """What all rules find in one engine."""
    found = [finding for rule in RULES.values() if rule.needs <= timeline.facts for finding in rule(timeline)]
    return judged(timeline, [allowed(timeline, finding) for finding in found])


def _of_queue(timeline: Timeline) -> list[Message]:
    """A queue that is not vLLM's, and where the one rebuilt from the trace has another length."""
    if not {Fact.QUEUE, Fact.LIVES, Fact.REQUESTS} <= timeline.facts:
        return []
    wrong = mismatches(timeline)
    foreign = [
        message(
            "Requests wait in {queue}, which is not vLLM's: its order is not known. {overtook} of {arrived} "
            "were admitted before an earlier one that waited.",
            queue=Code(", ".join(timeline.header.foreign_queues)),
            overtook=Number(overtakings(timeline)),
            arrived=Count(timeline.arrivals.filter(~pl.col("streaming_update")).height, "request"),
        )
        for _ in timeline.header.foreign_queues[:1]
    ]
    if wrong.is_empty():
        return foreign
    first = wrong.row(0, named=True)
    return [
        *foreign,
        message(
            "The waiting queue rebuilt from the trace disagrees with the recorded count after {wrong} of "
            "{steps}: after {first} it has {rebuilt}, the record {recorded}. Findings that name waiting "
            "requests may be wrong.",
            wrong=Number(wrong.height),
            steps=Count(timeline.steps.height, "step"),
            first=Steps(first["step"], first["step"]),
            rebuilt=Count(first["reconstructed"], "request"),
            recorded=Number(first["recorded"]),
        ),
    ]
