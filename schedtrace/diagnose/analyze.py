"""Report on recorded runs, catalogue of the findings, and selection of findings by code.

The facts that a report needs about one engine are extracted first (``one_engine``), so that this engine's
timeline can be released before the next one is made.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import polars as pl
from msgspec.structs import asdict

from schedtrace.diagnose.root_causes import Judged, ordered_findings, ranked, reranked
from schedtrace.diagnose.rule import package_findings
from schedtrace.diagnose.rules import KINDS, PACKAGES, RANK_RULES, RULES, slow_steps
from schedtrace.diagnose.rules.allowed_settings import allowed
from schedtrace.diagnose.run_statistics import (
    EngineSums,
    engine_sums,
    over_all_engines,
    statistics,
    strip,
    trial_reports,
)
from schedtrace.diagnose.serving_metrics import counted_s, tails
from schedtrace.diagnose.settings import Use, effective_settings, use_of, without_followed
from schedtrace.diagnose.verdict import (
    Unlimited,
    engine_split,
    engine_time,
    lead_first,
    request_time,
    time_split,
    unjudged,
    unlimited,
    verdict,
)
from schedtrace.errors import InputError, UsageError
from schedtrace.model.manifest import Manifest
from schedtrace.model.message import Message
from schedtrace.model.report import (
    CapRow,
    CauseRow,
    EngineTime,
    Finding,
    LatencyTail,
    Report,
    RequestTime,
    RunReport,
    Severity,
    StepExcess,
    StripCell,
    TrialReport,
)
from schedtrace.model.say import say
from schedtrace.model.trace_facts import ALL_FACTS, SHOWS_LIMITS, Fact, fact_names
from schedtrace.model.what_if import Replays
from schedtrace.read.run import Run
from schedtrace.timeline.engine_ranks import RankSummary, RecordedRanks, rank_of
from schedtrace.timeline.frames import offset
from schedtrace.timeline.queue_waits import overtakings
from schedtrace.timeline.timeline import Timeline, make_timeline
from schedtrace.timeline.window import Window, windowed

_EXIT = ["loop", "kind", "cause", "detail", "location", "via", "refusal"]
_CAP = ["cap", "location"]
_REQUESTS = pl.col("request_ids").explode().drop_nulls().n_unique()


def exit_counts(timeline: Timeline) -> pl.DataFrame:
    """Return a row for each kind of exit in one engine: ``exits``, ``steps``, ``request_ids`` and ``left``.

    ``left`` is the unused budget in tokens, summed over the exits.
    """
    return timeline.exits.group_by(_EXIT).agg(
        pl.col("count").sum().alias("exits"),
        pl.col("step").n_unique().cast(pl.Int64).alias("steps"),
        pl.col("request_id").drop_nulls().unique().alias("request_ids"),
        (pl.col("budget_left") * pl.col("count")).sum().alias("left"),
    )


def cause_table(engines: Sequence[pl.DataFrame]) -> list[CauseRow]:
    """Return one row per kind of exit over all engines: refusals before the rest, each by frequency.

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
    """Return a row for each kind of cap in one engine.

    Columns: ``chunks``, ``steps``, ``request_ids``, ``withheld_tokens``, ``left`` (unused budget in tokens,
    summed over the steps) and ``known`` (number of steps whose unused budget is recorded).
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
    """Notices about requests that were present when the trace began, about queues whose order is unknown or
    was rebuilt wrongly, and about rules of other packages that failed."""
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
        timeline: Timeline of the engine.
        manifest: Manifest with the front end's figures; None if they do not apply.
        engines: Number of engines in the run.
    """
    times, limits = Fact.TIMES in timeline.facts, timeline.facts >= SHOWS_LIMITS
    findings, step_excess = judge(timeline), []
    if slow_steps.RULE.needs <= timeline.facts:
        from schedtrace.diagnose.excess import step_excesses  # noqa: PLC0415  # SciPy loads late

        step_excess = step_excesses(timeline)
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
        step_excess=step_excess,
        sums=engine_sums(timeline),
        exits=exit_counts(timeline),
        caps=cap_counts(timeline),
        use=use_of(timeline),
        problems=[*_notices(timeline), *findings.problems],
        warmup_steps=timeline.warmup_steps,
        requests_missing=timeline.requests_missing,
    )


def judge(timeline: Timeline) -> Judged:
    """Return the findings of all rules about one engine."""
    own = (rule for rule in RULES.values() if rule.code not in PACKAGES.rules)
    findings = [finding for rule in own if rule.needs <= timeline.facts for finding in rule(timeline)]
    more, problems = package_findings(timeline, PACKAGES)
    result = ordered_findings(timeline, [allowed(timeline, finding) for finding in findings + more])
    return replace(result, problems=problems)


def _notices(timeline: Timeline) -> list[Message]:
    """Return notices about requests present at the beginning, and about queues of uncertain order."""
    problems: list[Message] = []
    if not timeline.there_first.is_empty():
        problems.append(
            say(
                "{there:n request} {were} present when the recording began: what happened to them earlier "
                "is not known, and none counts as an arrival.",
                there=timeline.there_first.height,
                were="was" if timeline.there_first.height == 1 else "were",
            )
        )
    if not {Fact.QUEUE, Fact.LIVES, Fact.REQUESTS} <= timeline.facts:
        return problems
    wrong = timeline.mismatches
    if timeline.header.foreign_queues:
        problems.append(
            say(
                "Requests wait in {queue:code}, which is not vLLM's: its order is not known. "
                "{overtook:n} of {arrived:n request} were admitted before an earlier one that waited.",
                queue=", ".join(timeline.header.foreign_queues),
                overtook=overtakings(timeline, timeline.tables.gone),
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


Test = Callable[[Run, list[Finding]], tuple[list[Finding], Replays | str]]
"""Function that tests the advice of a run's findings. It returns the findings, reordered, and either the
replays that tested the advice or the reason why there are no replays."""


def analyze(runs: list[Run], window: Window | None = None, test: Test | None = None) -> Report:
    """Return the figures and findings of each run, or of one window of its traces."""
    return Report(runs=[analyze_run(run, window, test) for run in runs])


class Timelines:
    """Timelines of a run's engines; only the one requested last is kept in memory.

    Args:
        run: The run; its traces are read again if needed.
        window: Window to analyze; None for the whole run.
    """

    def __init__(self, run: Run, window: Window | None = None) -> None:
        self._run, self._window = run, window
        self._place: int | None = None
        self._last: Timeline | None = None
        self.problems: list[Message] = []
        """Problems and recorder's notices of the trace that was read last."""
        self._in_window = False
        self._steps = 0
        self._times_us: list[int] = []
        """Begin and end of each engine's recording, in microseconds on the first trace's clock."""

    def at(self, place: int) -> Timeline:
        """Return the timeline of the trace with this index."""
        if self._last is None or self._place != place:
            self._last = None  # before the next one is made
            trace = self._run.traces.once(place)
            notices = [f"{trace.path}: {notice}" for notice in trace.notices]
            texts = (*trace.problems.sentences(trace.path), *notices)
            self.problems = [say("{problem}", problem=text) for text in texts]
            timeline = make_timeline(trace, self._run.manifest, front_end=self._run.front_end)
            timeline.offset_us = offset(trace.header, self._run.traces.headers[0]).us
            if self._window is not None:
                trace.require(Fact.TIMES, str(self._window))
                if timeline.steps.height:
                    self._steps += timeline.steps.height
                    self._times_us += [us + timeline.offset_us for us in (timeline.begin_us, timeline.end_us)]
                timeline = windowed(timeline, self._window)
                self._in_window |= not (timeline.steps.is_empty() and timeline.request_states.is_empty())
            self._place, self._last = place, timeline
        return self._last

    def rank_timeline(self, rank: int) -> Timeline:
        """Return the timeline of this data-parallel rank."""
        return self.at([header.engine_rank for header in self._run.traces.headers].index(rank))

    def require_steps(self) -> None:
        """Raise UsageError for a window in which no engine began a step or had a request."""
        if self._window is not None and self._steps and not self._in_window:
            first, last = (us / 1e6 for us in (min(self._times_us), max(self._times_us)))
            msg = (
                f"{self._run.path}: no step began in {self._window}, and no request was there; its "
                f"{self._steps:,} steps lie between {first:,.6g} s and {last:,.6g} s into the recording"
            )
            raise UsageError(msg)


def analyze_run(
    run: Run, window: Window | None = None, test: Test | None = None, timelines: Timelines | None = None
) -> RunReport:
    """Return the figures and findings of one run; only one of its engines is in memory at a time.

    Args:
        run: A run.
        window: Part of each trace to analyze; None for all of it.
        test: Function that tests the findings' advice; None to test none.
        timelines: Timelines of the run in that window, if the caller uses them afterwards.

    Raises:
        UsageError: If no step began and no request was present in the window, or the record has no times.
    """
    timelines = timelines or Timelines(run, window)
    measured = run.manifest if window is None else None  # the front end's figures are of whole trials
    engines, of_traces = [], []
    for place in range(len(run.traces)):
        engines.append(one_engine(timelines.at(place), measured, engines=run.engines))
        of_traces += timelines.problems
    timelines.require_steps()
    trials = [report for engine in engines for report in engine.trials]
    if run.engines > 1:
        over_all_engines(trials, counted_s(engine.sums.spans for engine in engines))
    ranks = RecordedRanks([engine.rank for engine in engines], timelines.rank_timeline)
    facts = frozenset(ALL_FACTS).intersection(*(engine.rank.facts for engine in engines))
    findings = all_findings([engine.judged for engine in engines], ranks, facts)
    settings = effective_settings(run, [engine.use for engine in engines if engine.use is not None])
    findings = reranked(without_followed(findings, settings))
    tested: Replays | str | None = None
    if test is not None:
        findings, tested = test(run, findings)
    findings = lead_first(findings)
    splits = [engine.split for engine in engines if engine.split is not None]
    split = time_split(splits) if len(splits) == len(engines) else []
    of_queues = [problem for engine in engines for problem in engine.problems]
    of_files = [say("{problem}", problem=text) for text in run.problems]
    return RunReport(
        path=str(run.path),
        label=run.label,
        config=config_of(run),
        problems=[*of_files, *of_traces, *of_queues, *_rank_problems(ranks), *_run_problems(run.manifest)],
        verdict=verdict([engine.unlimited for engine in engines], findings, split),
        time_split=split,
        tails=[tail for engine in engines for tail in engine.tails],
        trials=trials,
        findings=findings,
        lacks=fact_names(ALL_FACTS - facts),
        not_judged=unjudged(facts, len(engines)),
        causes=cause_table([engine.exits for engine in engines]),
        caps=cap_table([engine.caps for engine in engines]),
        request_time=[share for engine in engines for share in engine.request_time],
        engine_time=[share for engine in engines for share in engine.engine_time],
        step_excess=[excess for engine in engines for excess in engine.step_excess],
        strip=engines[0].strip,
        statistics=statistics([engine.sums for engine in engines], ranks),
        warmup_steps=sum(engine.warmup_steps for engine in engines),
        requests_missing=any(engine.requests_missing for engine in engines),
        settings=settings,
        tested=tested if isinstance(tested, Replays) else None,
        not_tested=tested if isinstance(tested, str) else "",
    )


def all_findings(engines: list[Judged], ranks: RecordedRanks, facts: frozenset[Fact]) -> list[Finding]:
    """Return the findings of all engines and those about their ranks, ranked.

    Args:
        engines: Findings of each engine.
        ranks: Ranks of the same engines.
        facts: Facts that the records of all engines contain.
    """
    return ranked(
        engines,
        [finding for rule in RANK_RULES.values() if rule.needs <= facts for finding in rule(ranks)],
        ranks.prefill_stalls.stalled_steps() if ranks.prefill_stalls is not None else {},
    )


ENGINE = ("model", "vllm_version", "schedtrace_version", "device", "scheduler_class", "async_scheduling")
LIMITS = (
    *("token_budget", "max_num_running_reqs", "max_model_len"),
    *("kv_blocks_total", "block_size", "enable_prefix_caching"),
)
"""Fields of a trace's header that a report shows as limits."""


def config_of(run: Run) -> dict[str, Any]:
    """Return the run's configuration, from its first trace's header and, if there is one, its manifest."""
    first, manifest = run.traces[0], run.manifest
    header = first.header
    config: dict[str, Any] = {
        "record": first.record,
        **{name: getattr(header, name) for name in ENGINE},
        "engines": len(run.traces),
        "exits_via": header.exits_via if Fact.EXITS in first.facts else None,
        **{name: getattr(header, name) for name in LIMITS},
        **{name: header.scheduler_config.get(name) for name in ("enable_chunked_prefill", "policy")},
    }
    if run.named is not None:
        config["named"] = asdict(run.named)
    if manifest is not None:
        for name in ("status", "front_end", "trials_asked", "engine_args_chosen"):
            config[name] = getattr(manifest, name)
        if manifest.workload is not None:
            config["workload"] = asdict(manifest.workload)
    return config


def at_or_above(severity: str | None) -> Callable[[Finding], bool]:
    """Return a predicate for findings of at least this severity; None selects no finding.

    Raises:
        UsageError: If there is no such severity.
    """
    if severity is None:
        return lambda _: False
    try:
        least = Severity[severity.upper()]
    except KeyError:
        msg = f"--fail-on {severity}: expected info, warning or critical"
        raise UsageError(msg) from None
    return lambda finding: Severity[finding.severity.upper()] >= least


def _rank_problems(ranks: RecordedRanks) -> list[Message]:
    """Return notices about lock-step ranks that have no trace, and about the clocks of several hosts."""
    problems, recorded, off_us = [], len(ranks.each), ranks.uncertainty_us
    if ranks.missing_ranks:
        sentence = "{found:n} of {size:n rank} recorded: what the others made them wait for is not known."
        problems.append(say(sentence, found=recorded, size=recorded + ranks.missing_ranks))
    if ranks.hosts > 1:
        difference = say("differ by up to {off:us}", off=off_us) if off_us is not None else None
        problems.append(
            say(
                "The ranks ran on {hosts:n host} whose clocks may {apart}; comparisons of their times "
                "are no more accurate.",
                ranks,
                apart=difference or "differ by an unknown time",
            )
        )
    return problems


def _run_problems(manifest: Manifest | None) -> list[Message]:
    """Return notices about how the run ended, and about trials that began with a filled prefix cache."""
    problems: list[Message] = []
    if manifest is None:
        return problems
    ended = {"failed": "failed", "interrupted": "was interrupted"}.get(manifest.status)
    if ended is not None:
        sentence = "The run {ended}[: {error}]. This report covers what was recorded before."
        problems.append(say(sentence, manifest, ended=ended))
    if manifest.status in {"starting", "running"}:
        problems.append(say("The run's command ended without a result, or is still running."))
    dirty = [str(trial.trial) for trial in manifest.trials if trial.prefix_cache_reset is False]
    if dirty:
        sentence = "The prefix cache could not be emptied before trial {trials}."
        problems.append(say(sentence, trials=", ".join(dirty)))
    return problems


CATALOGUE_SCHEMA_VERSION = 1
MOST_CODES = 3
"""Maximum number of codes that a message names; further ones are only counted."""
FORMER = {
    "balance-candidate": "part of prefill-stall",
    "balance-without-effect": "in the example package examples/rank_balance",
    "cache-resets": "part of interruption",
    "decode-starves-prefill": "part of token-budget-bound",
    "dummy-batches": "part of rank-imbalance",
}
"""Codes of former findings, each with the place where the same facts appear now."""


class FindingKind(msgspec.Struct, kw_only=True):
    """Kind of finding, as the catalogue lists it."""

    code: str
    """Code of the finding in a report, and value of ``analyze --only`` and ``--ignore``."""
    summary: str
    """Meaning of the finding in one line."""
    needs: list[str]
    """Facts that a record must contain for the rule to be evaluated; a trace of vLLM's own scheduler contains
    all of them."""


class Catalogue(msgspec.Struct, kw_only=True):
    """Document that ``schedtrace findings`` prints."""

    schema_version: int = CATALOGUE_SCHEMA_VERSION
    findings: list[FindingKind]


def catalogue() -> Catalogue:
    """Return every rule, in the order in which ``analyze`` evaluates the rules."""
    kinds = [
        FindingKind(code=rule.code, summary=rule.summary, needs=sorted(rule.needs)) for rule in KINDS.values()
    ]
    return Catalogue(findings=kinds)


def choose(*, only: list[str], ignore: list[str]) -> frozenset[str]:
    """Return the codes to report: those of ``only`` (all codes if it is empty) without those of ``ignore``.

    Raises:
        UsageError: If a code is unknown, or belongs to a former finding.
    """
    for option, codes in (("--only", only), ("--ignore", ignore)):
        for code in codes:
            if code not in KINDS:
                msg = (
                    f"{option} {code}: this finding is now {FORMER[code]}"
                    if code in FORMER
                    else f"{option} {code}: no such finding; there are {', '.join(KINDS)}"
                )
                raise UsageError(msg)
    return frozenset(only or KINDS) - frozenset(ignore)


def keep(report: Report, codes: frozenset[str]) -> Report:
    """Keep only the findings with these codes in a report; leave its figures and its verdict unchanged."""
    for run in report.runs:
        run.findings = [*_kept(run.findings, codes)]
        run.not_judged = [rule for rule in run.not_judged if rule.code in codes]
    return report


def require_judged(report: Report, what: str) -> None:
    """Raise InputError if a finding could not be judged.

    Raises:
        InputError: If a run has no step, or its record lacks facts.
    """
    for run in report.runs:
        if not any(trial.steps for trial in run.trials):
            msg = f"{what} cannot be judged: {run.path} has no step"
            raise InputError(msg)
        if codes := [rule.code for rule in run.not_judged]:
            missing = dict.fromkeys(fact for rule in run.not_judged for fact in rule.missing)
            more = f" and {len(codes) - MOST_CODES} more" if len(codes) > MOST_CODES else ""
            msg = (
                f"{what} cannot be judged: {run.path} does not record {', '.join(missing)}, which "
                f"{', '.join(codes[:MOST_CODES])}{more} need; leave them out (--ignore) or record the engine "
                "with schedtrace"
            )
            raise InputError(msg)


def _kept(findings: list[Finding], codes: frozenset[str]) -> Iterator[Finding]:
    """Yield the findings with these codes; symptoms replace a root cause that is left out."""
    for finding in findings:
        symptoms = [*_kept(finding.symptoms, codes)]
        if finding.code in codes:
            yield msgspec.structs.replace(finding, symptoms=symptoms)
        else:
            yield from symptoms
