"""Analysis of recorded runs, which yields a report."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict

from schedtrace.diagnose.effective_settings import effective_settings, without_followed
from schedtrace.diagnose.one_engine import cap_table, cause_table, one_engine
from schedtrace.diagnose.root_causes import Judged, ranked
from schedtrace.diagnose.rules import RANK_RULES
from schedtrace.diagnose.run_statistics import statistics
from schedtrace.diagnose.throughput import counted_s
from schedtrace.diagnose.time_split import time_split
from schedtrace.diagnose.trials import over_all_engines
from schedtrace.diagnose.verdict import lead_first, verdict
from schedtrace.diagnose.weak_records import unjudged
from schedtrace.errors import UsageError
from schedtrace.model.manifest import Manifest
from schedtrace.model.message import Message
from schedtrace.model.report import Finding, Report, RunReport, Severity
from schedtrace.model.say import say
from schedtrace.model.trace_facts import ALL_FACTS, Fact, in_order
from schedtrace.model.what_if import Replays
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.frames import offset
from schedtrace.timeline.timeline import Timeline, Window, make_timeline, windowed

Test = Callable[[Run, list[Finding]], tuple[list[Finding], Replays | str]]
"""Function that tests the advice of a run's findings. It returns the findings in their new order, and either
the replays that tested them or the reason why there are none.
"""


def analyze(runs: list[Run], window: Window | None = None, test: Test | None = None) -> Report:
    """Return the figures and findings of each run, or of a window of each run's traces."""
    return Report(runs=[analyze_run(run, window, test) for run in runs])


class Timelines:
    """Timelines of a run's engines, of which only the last requested one is kept.

    Args:
        run: The run; its traces are read again if needed.
        window: Window to analyze; None for the whole run.
    """

    def __init__(self, run: Run, window: Window | None = None) -> None:
        self._run, self._window = run, window
        self._place: int | None = None
        self._last: Timeline | None = None
        self.problems: list[Message] = []
        """Problems of the file that was read last, and the recorder's notices."""
        self._in_window = False
        self._steps = 0
        self._times_us: list[int] = []
        """Begin and end of each engine's recording, on the first trace's clock."""

    def at(self, place: int) -> Timeline:
        """Return the timeline of the trace with this index."""
        if self._last is None or self._place != place:
            self._last = None  # before the next one is made
            self._place, self._last = place, self._made(self._run.traces.once(place))
        return self._last

    def rank_timeline(self, rank: int) -> Timeline:
        """Return the timeline of this data-parallel rank."""
        return self.at([header.engine_rank for header in self._run.traces.headers].index(rank))

    def _made(self, trace: Trace) -> Timeline:
        self.problems = _trace_problems(trace)
        timeline = make_timeline(trace, self._run.manifest, front_end=self._run.front_end)
        timeline.offset_us = offset(trace.header, self._run.traces.headers[0]).us
        if self._window is None:
            return timeline
        trace.require(Fact.TIMES, str(self._window))
        cut = windowed(timeline, self._window)
        self._in_window |= not (cut.steps.is_empty() and cut.request_states.is_empty())
        if timeline.steps.height:
            self._steps += timeline.steps.height
            self._times_us += [us + timeline.offset_us for us in (timeline.begin_us, timeline.end_us)]
        return cut

    def require_steps(self) -> None:
        """Raise UsageError for a window in which no engine began a step or had a request."""
        if self._window is not None and self._steps and not self._in_window:
            first, last = (us / 1e6 for us in (min(self._times_us), max(self._times_us)))
            msg = (
                f"{self._run.path}: no step began in {self._window}, and no request was there; its "
                f"{self._steps:,} steps lie between {first:,.6g} s and {last:,.6g} s into the recording"
            )
            raise UsageError(msg)


def _trace_problems(trace: Trace) -> list[Message]:
    """Return the problems of a trace's file, and the notices that its recorder wrote."""
    notices = [f"{trace.path}: {notice}" for notice in trace.notices]
    return [say("{problem}", problem=text) for text in (*trace.problems.sentences(trace.path), *notices)]


def analyze_run(
    run: Run, window: Window | None = None, test: Test | None = None, timelines: Timelines | None = None
) -> RunReport:
    """Return the figures and findings of one run; only one of its engines is in memory at a time.

    Args:
        run: A run.
        window: Part of each trace to analyze; None for all of it.
        test: Test of the advice.
        timelines: Timelines of the run in that window, if the caller needs them afterwards.

    Raises:
        UsageError: If no step began in the window, or the record has no times.
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
    findings = without_followed(findings, settings)
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
        lacks=in_order(ALL_FACTS - facts),
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
        ranks.prefill_stalls.steps() if ranks.prefill_stalls is not None else {},
    )


ENGINE = ("model", "vllm_version", "schedtrace_version", "device", "scheduler_class", "async_scheduling")
LIMITS = (
    *("token_budget", "max_num_running_reqs", "max_model_len"),
    *("kv_blocks_total", "block_size", "enable_prefix_caching"),
)
"""Fields of a trace's header that a report shows."""


def config_of(run: Run) -> dict[str, Any]:
    """Return the configuration from the trace's header and, if there is one, from the manifest."""
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
    """Return a test for findings of at least this severity; for None, a test that no finding passes.

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
    """Return notices about lock-step ranks without a trace, and about the clocks of several hosts."""
    problems, recorded, off_us = [], len(ranks.each), ranks.uncertainty_us
    if ranks.missing_ranks:
        sentence = "{found:n} of {size:n rank} recorded: what the others made them wait for is not known."
        problems.append(say(sentence, found=recorded, size=recorded + ranks.missing_ranks))
    if ranks.hosts > 1:
        difference = say("differ by up to {off:us}", off=off_us) if off_us is not None else None
        problems.append(
            say(
                "The ranks ran on {hosts:n host} whose clocks may {apart}: no comparison of their "
                "times is better.",
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
