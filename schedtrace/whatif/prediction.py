"""Prediction: replays of a recorded load, unchanged and with other settings, and their comparison."""

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import polars as pl

from schedtrace.compare.metric_changes import Metric
from schedtrace.diagnose.run_statistics import pooled_reports
from schedtrace.engine.vllm_config import required_vllm_version
from schedtrace.errors import InputError, NeverEndsError, UsageError
from schedtrace.model.numbers import duration, number
from schedtrace.model.report import TrialReport
from schedtrace.model.trace import Header
from schedtrace.model.what_if import CONCURRENCY, Baseline, Configuration, Figure, LoadPart, Replays
from schedtrace.read.run import Run
from schedtrace.step_times.fitted import Counted, Fitted, Leaned, fit
from schedtrace.step_times.fitting import gathering_us
from schedtrace.timeline.frames import offset
from schedtrace.timeline.timeline import WARMUP_TRIAL, Timeline, make_timeline
from schedtrace.whatif.figures import (
    METRICS,
    MOST_FRAC,
    REPRODUCES_WITHIN,
    Processors,
    baseline_figures,
    bound_output,
    compositions,
    decided_figures,
    likely_causes,
    recorded_processors,
    restart_factor,
    run_trials,
    timing_figures,
    trial_values,
)
from schedtrace.whatif.replays import (
    RecordedEngine,
    Replayed,
    Work,
    engine_changes,
    load_notes,
    replay_work,
    replayed_load,
)
from schedtrace.workloads.recorded_load import load_of_ranks, loads_of_run
from schedtrace.workloads.workload import Workload

KEPT = ("replayed", "changed")
"""Names of the replays whose run folders may be kept."""
LEANED_DEVIATIONS = 1.645
"""Number of standard errors between the time of steps outside the recorded range and the ends of its 90 %
interval."""
RESAMPLES = 8
"""Number of fits to resampled steps; the spread of their predictions is the uncertainty of the step times."""


@dataclass(frozen=True)
class RecordedLoad:
    """Recorded load of a run, with everything needed to replay it."""

    run: Run
    timelines: list[Timeline]
    """Timelines of the run's engines, in the order of ranks."""
    loads: list[Workload]
    times: Fitted
    part: LoadPart | None = None
    """Part of the whole load that is replayed; None for the whole load."""
    absent: frozenset[tuple[str, str | None]] = frozenset()
    """Code and cause of each finding that is too weak in this part to be tested on it."""

    @property
    def requests(self) -> int:
        """Number of replayed requests, over all trials."""
        return sum(load.requests for load in self.loads)

    @property
    def load_words(self) -> str:
        """Name of the replayed load, as part of a sentence."""
        return "this load" if self.part is None else self.part.words

    @property
    def header(self) -> Header:
        """Header of the first engine; all engines have the same settings."""
        return self.timelines[0].header

    @property
    def trial_count(self) -> int:
        """Number of measured trials."""
        return len(run_trials(self.timelines))

    @property
    def clients(self) -> int | None:
        """Number of clients of a closed loop; None if there is no loop, or trials differ."""
        patterns = [load.replayed_clients for load in self.loads]
        loops = {clients.clients for clients in patterns if clients and clients.pattern == "loop"}
        return loops.pop() if len(loops) == 1 and all(patterns) else None

    @cached_property
    def processors(self) -> Processors | None:
        """Usage of processors by a server's front end and its clients; None without a server."""
        return recorded_processors(self.timelines)

    @property
    def keep_prefix_cache(self) -> bool:
        """Whether the prefix cache was kept between trials."""
        workload = self.run.manifest and self.run.manifest.workload
        return bool(workload and workload.keep_prefix_cache)

    @cached_property
    def work(self) -> Work:
        """Load together with its engine."""
        return Work(
            self.loads,
            RecordedEngine(self.header, self.times, len(self.timelines)),
            self.keep_prefix_cache,
            warmups=len(self.loads) - self.trial_count,
            trial_ids=self.header.trial_ids,
        )


def recorded_load(run: Run, times: Fitted | None = None, clients: int | None = None) -> RecordedLoad:
    """Return a run's recorded load, ready for predictions.

    Args:
        run: Run of one engine, or of data-parallel ranks.
        times: Step times; None to fit them to the run.
        clients: Number of clients that kept one request open each (a closed loop); None to determine it from
            the times.

    Raises:
        InputError: If the run has no requests or too few steps, or lacks the trace of a rank.
    """
    traces = run.traces
    if run.engines != len(traces) and len(traces) > 1:
        msg = f"{run.path}: {len(traces)} traces of {run.engines} engines"
        raise InputError(msg)
    timelines = [make_timeline(trace, run.manifest, front_end=run.front_end) for trace in traces]
    for timeline in timelines:
        timeline.offset_us = offset(timeline.header, timelines[0].header).us
    loads = loads_of_run(traces, manifest=run.manifest)
    if clients is not None:
        loads = [load.with_clients(clients) for load in loads]
    base = RecordedLoad(run, timelines, loads, times or fit(timelines, [run.label], gathering_us(traces)))
    if base.keep_prefix_cache and any(timeline.warmup_steps for timeline in timelines):
        warm = load_of_ranks(traces, WARMUP_TRIAL, manifest=run.manifest)  # what it leaves in the cache
        base = replace(base, loads=[warm, *loads])
    return base


def predict(
    base: RecordedLoad,
    changes: Mapping[str, Any],
    *,
    output: Path | None = None,
    resamples: int = RESAMPLES,
) -> Replays:
    """Return the document of an unchanged replay and, if there are changes, of a replay with them.

    Without changes, the baseline states how many steps of the replay match the recorded ones.

    Args:
        base: The recorded load.
        changes: Values by the names of vLLM's arguments.
        output: Parent of the run folders that are kept, ``<label>-replayed`` and ``<label>-changed``; None to
            keep none.
        resamples: Number of resamples for the interval; 0 for no interval.

    Raises:
        UsageError: If vLLM does not accept the changes, or a replay cannot make them.
    """
    with Predictor(base, output=output, resamples=resamples) as predictor:
        if changes:
            return predictor.document([predictor.predict(changes)], Baseline())
        same, compared = predictor.same_steps()
        return predictor.document([], Baseline(same_steps=same, compared_steps=compared))


def _written(value: float, unit: str) -> str:
    """Return a figure as text with its unit; times have the usual format."""
    us = {"s": 1e6, "ms": 1e3}.get(unit)
    return f"{number(value)} {unit}" if us is None else duration(us * value)


class Predictor:
    """Predictor of several changes of one recorded load; the unchanged load is replayed only once.

    Args:
        base: The recorded load.
        output: As for ``predict``.
        resamples: As for ``predict``.
    """

    def __init__(self, base: RecordedLoad, *, output: Path | None = None, resamples: int = RESAMPLES) -> None:
        self._base, self._output, self._resamples = base, output, resamples
        self._scratch = tempfile.TemporaryDirectory()
        self._resampled_trials: dict[int, list[TrialReport]] = {}
        """Replayed trials of the unchanged load, by the seed of the resampled step times."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options of the recorded engine (``engine_options``)."""
        return self._base.work.engine.configured({})[0]

    def now(self, name: str) -> Any:
        """Return the recorded value of a setting, or the number of clients."""
        if name == CONCURRENCY:
            return self._base.clients
        return self._base.work.engine.base([name])[name]

    @cached_property
    def replayed(self) -> Replayed:
        """Replay of the unchanged load.

        Raises:
            UsageError: If the replay never ends.
        """
        try:
            return self._replay({}, "replayed")
        except NeverEndsError as error:
            raise UsageError(str(error)) from error

    @cached_property
    def _reports(self) -> list[TrialReport]:
        """Reports of the recorded trials, without requests that were present when recording began.

        The load lacks these requests.
        """
        timelines = []
        for timeline in self._base.timelines:
            if not timeline.present.is_empty():
                there = pl.col("request_id").is_in(timeline.present["request_id"].implode())
                rest, ready = timeline.finishes.filter(~there), timeline.tables
                timeline = replace(timeline, finishes=rest, ready_tables=ready)  # noqa: PLW2901  # a copy
            timelines.append(timeline)
        return pooled_reports(timelines, self._base.run.manifest)

    @cached_property
    def recorded(self) -> Configuration:
        """The recorded configuration, replayed and compared with the recording.

        Raises:
            UsageError: If the replay never ends.
        """
        figures = [
            *decided_figures(self._base.timelines, self.replayed.timelines),
            *baseline_figures(self._reports, self.replayed.replayed_trials),
        ]
        return self._configuration({}, self.replayed, figures)

    def require_reproduced(self, name: str) -> Baseline:
        """Return how close the replay of the unchanged load comes to the recording.

        Args:
            name: One of ``figures.METRICS``.

        Raises:
            InputError: If the replay is off by more than ``figures.MOST_FRAC``, or the load has no such
                figure.
            UsageError: If the replay of the unchanged load never ends.
        """
        if abs(self.misfit_frac(name)) > MOST_FRAC:
            raise InputError(self.misfit_words(name))
        _, was, now = self._both(name)
        return Baseline(judged_by=name, misfit_frac=statistics.fmean(now) / statistics.fmean(was) - 1)

    def misfit_frac(self, name: str) -> float:
        """Return the misfit of the unchanged replay; 0 if it is small enough.

        A misfit counts as small up to ``REPRODUCES_WITHIN``, or up to half of the difference between the
        recorded trials, which shows their noise.

        Raises:
            InputError: If the load has no such figure.
            UsageError: If the replay of the unchanged load never ends.
        """
        _, was, now = self._both(name)
        mean = statistics.fmean(was)
        off = statistics.fmean(now) / mean - 1
        return off if abs(off) > max(REPRODUCES_WITHIN, (max(was) - min(was)) / 2 / mean) else 0.0

    def misfit_words(self, name: str) -> str:
        """Return a sentence on the misfit of the unchanged replay and its likely causes."""
        metric, was, now = self._both(name)
        mean, ours = statistics.fmean(was), statistics.fmean(now)
        off = ours / mean - 1
        words = (
            f"the replay of {self._base.load_words} as it was recorded is {100 * off:+.0f} % off in "
            f"{name} ({_written(mean, metric.unit)} recorded, {_written(ours, metric.unit)} replayed)"
        )
        causes = likely_causes(self._base, off)
        return f"{words}; {' and '.join(causes)}, which a replay does not know" if causes else words

    def _both(self, name: str) -> tuple[Metric, list[float], list[float]]:
        """Return a metric with its recorded and its replayed values."""
        metric = next(metric for metric in METRICS if metric.name == name)
        was, now = (
            trial_values(metric.value, trials) for trials in (self._reports, self.replayed.replayed_trials)
        )
        if not was or not now:
            msg = f"the load has no {name}, by which to judge a replay"
            raise InputError(msg)
        return metric, was, now

    def predict(self, changes: Mapping[str, Any], *, resamples: int | None = None) -> Configuration:
        """Return the configuration of a replay with changes, compared with the unchanged replay.

        Args:
            changes: As for the function ``predict``; at least one.
            resamples: Number of resamples; None for the predictor's own number.

        Raises:
            UsageError: If vLLM does not accept the changes, a replay cannot make them, or the unchanged
                replay never ends.
            NeverEndsError: If the replay with the changes never ends.
        """
        self._base.work.engine.configured(engine_changes(changes))  # refused before anything is replayed
        replayed = self.replayed
        changed = self._replay(changes, "changed")
        resamples = self._resamples if resamples is None else resamples
        spread = self._spread(changes, resamples)
        counted, times = changed.counted, self._base.times
        bound, leaned = None, []
        if counted and counted.larger:
            alone = Counted(times, device_us=times.without_economies_us)
            bound = self._replay(changes, "changed-priced", times=alone).replayed_trials
        if counted and counted.outside and resamples and times.extrapolation:
            for end in (-LEANED_DEVIATIONS, LEANED_DEVIATIONS):
                leaning = Counted(Leaned(times, end))
                leaned.append(self._replay(changes, "changed-priced", times=leaning).replayed_trials)
        figures = [
            *decided_figures(replayed.timelines, changed.timelines),
            *timing_figures(
                self._reports, replayed.replayed_trials, changed.replayed_trials, spread, bound, leaned
            ),
        ]
        if self._base.processors is not None:
            bound_output(figures, self._base.processors)
        return self._configuration(changes, changed, figures)

    def document(self, configurations: Sequence[Configuration], baseline: Baseline) -> Replays:
        """Return the document of the recorded configuration followed by these."""
        base = self._base
        changes = [configuration.changes for configuration in configurations]
        return Replays(
            load=replayed_load(base.work, base.run.label, base.run.path, base.part),
            vllm_version=required_vllm_version(),
            step_times=base.times.description,
            settings={name: self.now(name) for changed in changes for name in changed},
            baseline=baseline,
            configurations=[self.recorded, *configurations],
            notes=load_notes(base.work, changes),
        )

    def _configuration(
        self, changes: Mapping[str, Any], replayed: Replayed, figures: list[Figure]
    ) -> Configuration:
        finished = [trial.requests_finished for trial in replayed.replayed_trials]
        return Configuration(
            changes=dict(changes),
            recorded=not changes,
            kv_blocks=replayed.kv_blocks,
            figures=figures,
            finished=sum(count for count in finished if count is not None),
            too_long=len(replayed.played.refused),
            steps=replayed.played.steps,
            preemptions=replayed.preemption_count,
            extrapolated_frac=replayed.counted.outside_frac if replayed.counted else None,
            folder=str(replayed.run.path) if self._output else None,
        )

    def _replay(self, changes: Mapping[str, Any], name: str, **how: Any) -> Replayed:
        parent = self._output if name in KEPT and self._output else Path(self._scratch.name)
        return replay_work(self._base.work, changes, parent / f"{self._base.run.label}-{name}", **how)

    def _resampled(self, seed: int, *, side: int, factor: float = 1.0) -> Counted:
        """Return a fit to resampled steps, with noise from resampled residuals that differs by side.

        The sides are the replays without (0) and with changes (1). All steps take ``factor`` times as long.
        """
        import numpy as np  # noqa: PLC0415  # a quarter of a second

        blocks = self._base.times.residual_blocks()
        drawn = np.random.default_rng([seed, side]).integers(len(blocks), size=4 * len(blocks))
        noise = [factor * math.exp(residual) for place in drawn for residual in blocks[place]]
        return Counted(self._base.times.resampled(seed), noise)

    def _spread(self, changes: Mapping[str, Any], resamples: int) -> dict[str, list[float]]:
        """Return the ratios that resampled fits predict, by metric."""
        ratios: dict[str, list[float]] = {metric.name: [] for metric in METRICS}
        if self._base.times.rows is None:  # a saved fit
            return ratios
        for seed in range(resamples):
            restarted = self._resampled(seed, side=1, factor=restart_factor(self._base.header, seed))
            after = self._replay(changes, f"changed-{seed}", times=restarted).replayed_trials
            if seed not in self._resampled_trials:
                times = self._resampled(seed, side=0)
                self._resampled_trials[seed] = self._replay(
                    {}, f"replayed-{seed}", times=times
                ).replayed_trials
            before = self._resampled_trials[seed]
            for metric in METRICS:
                was, becomes = (trial_values(metric.value, trials) for trials in (before, after))
                if was and becomes:
                    ratios[metric.name].append(statistics.fmean(becomes) / statistics.fmean(was))
        return ratios

    def same_steps(self) -> tuple[int, int]:
        """Return how many steps a replay by step decides as recorded, and the number of recorded steps."""
        replayed = self._replay({}, "by-step", by_step=True)
        ours, theirs = (compositions(ranks) for ranks in (replayed.timelines, self._base.timelines))
        return sum(ours.get(step) == what for step, what in theirs.items()), len(theirs)
