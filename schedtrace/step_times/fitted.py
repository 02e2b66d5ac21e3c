"""Step times fitted to recorded traces, with their error and their source.

``RecordedTimes`` has the times of one trace step by step, for a replay that must reproduce it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from schedtrace.errors import InputError, UsageError
from schedtrace.model import safe_files
from schedtrace.read.lines import reading
from schedtrace.step_times.batch import Batch, graph_sizes, graph_use
from schedtrace.step_times.fitting import (
    COMPUTE,
    DEVICE,
    DRAFTS,
    GRAPHS,
    PREFILL_STEPS,
    UNMEASURED,
    Extrapolation,
    Fit,
    Source,
    extrapolation_errors,
    fit_rows,
    observed,
    with_engine_columns,
    with_slowest_rank,
    with_sums,
)
from schedtrace.timeline.engine_states import unstarved
from schedtrace.timeline.timeline import Timeline
from schedtrace.version import __version__

BLOCK = 25
"""Number of steps in a block; samples are drawn in blocks, because residuals of neighbouring steps are
similar."""
MOST_STEPS = 20_000
"""Maximum number of steps to fit; of a longer trace, evenly spaced blocks are fitted."""


@dataclass(frozen=True)
class Fitted:
    """Step times from a fit (``StepTimes``)."""

    fit: Fit
    rows: pl.DataFrame | None = field(default=None, repr=False)
    """Steps of the fit; None for a loaded fit."""

    @property
    def description(self) -> str:
        """Sentence with source, model and error of the fit."""
        source, error = self.fit.source, self.fit.error
        unresolved = dict.fromkeys(hidden.column for hidden in self.fit.device.unresolved)
        hidden = ", ".join(name.replace("_", " ") for name in unresolved if name not in GRAPHS)
        form = "" if len(self.fit.device.parts) == 1 else " as the larger of memory and compute time"
        return (
            f"Fitted to {self.fit.device.fitted_steps} steps of {', '.join(source.runs)} "
            f"({source.model} on {source.device}, vLLM {source.vllm_version}){form}: "
            f"half of them within {error.median_abs_log:.0%}, 90 % within {error.p90_abs_log:.0%}"
            f"{f'; no cost of its own could be found for {hidden}' if hidden else ''}"
            f"{'; a decode is charged like a token of prefill' if self.fit.device.parts[0].alike else ''}."
        )

    def device_us(self, batch: Batch) -> float:
        """Return the time of execution in the worker, in microseconds; 0 without tokens."""
        return self.fit.device.us(self._device_columns(batch)) if batch.tokens else 0.0

    def schedule_us(self, batch: Batch) -> float:
        """Return the time of ``schedule()``, in microseconds."""
        return self.fit.schedule.us(_host_columns(batch))

    def update_us(self, batch: Batch) -> float:
        """Return the time of ``update_from_output()``, in microseconds."""
        return self.fit.update.us(_host_columns(batch))

    def gap_us(self, arrivals: int) -> float:
        """Return the time from an update to the next ``schedule()``, in microseconds."""
        return self.fit.gap.us({"arrivals": arrivals})

    def wake_us(self) -> float:
        """Return the median time until an idle engine took a request in, in microseconds."""
        return self.fit.wake_us

    def gathering_us(self) -> float | None:
        """Return the cost of gathering, measured in recorded all-reduces (``fitting.gathering_us``)."""
        return self.fit.gathering_us

    def extrapolates(self, batch: Batch) -> bool:
        """Return whether a batch is outside the recorded range, so that its device time is extrapolated."""
        return bool(batch.tokens) and self.fit.device.doublings_outside(self._device_columns(batch)) > 0

    @cached_property
    def most_tokens(self) -> float:
        """Tokens of the largest recorded step; infinite for a loaded fit."""
        return self._most(pl.col("prefill_tokens") + pl.col("decode_tokens"))

    @cached_property
    def most_decodes(self) -> float:
        """Largest number of decodes of a recorded step; infinite for a loaded fit."""
        return self._most(pl.col("decode_requests"))

    def _most(self, count: pl.Expr) -> float:
        most = None if self.rows is None else self.rows.select(count.max()).item()
        return float(most or math.inf)

    @cached_property
    def first_decode_us(self) -> float:
        """Cost of a step's first decode, in microseconds; 0 if unknown, or if the fit holds without decodes.

        This cost appears with the first decode and does not grow with more decodes, for example because
        batches are padded to one size; beyond the largest recorded number of decodes, it may appear again.
        The first step of a trial, which may take longer, counts only if all later steps have decodes.
        """
        if self.rows is None:
            return 0.0
        steps = with_sums(self.rows).filter((pl.col("decode_requests") == 0) & (pl.col("device_us") > 0))
        later = steps.filter(~pl.col("first"))
        fitted_us, took_us = self.fit.device.expr(), pl.col("device_us")
        figures = (steps if later.is_empty() else later).select(
            log=(fitted_us / took_us).log().median(), us=(fitted_us - took_us).median()
        )
        log, us = figures.row(0)
        return float(us) if log is not None and log > self.fit.error.p90_abs_log else 0.0

    def exceeds_recorded(self, batch: Batch) -> bool:
        """Return whether a batch's time without economies of scale may differ from the fit's."""
        return batch.batch_tokens > self.most_tokens or (
            batch.decode_requests > self.most_decodes and self.first_decode_us > 0
        )

    def without_economies_us(self, batch: Batch) -> float:
        """Return the time of execution without economies of scale beyond the largest recorded step.

        More tokens then take as long as a series of recorded steps. No device takes much longer than that, so
        the result is an upper bound if the recorded steps are too small to show the cost of a token. For
        decodes beyond ``most_decodes``, ``first_decode_us`` is added once per further batch of that many
        decodes, unless the fit says that they cost more.
        """
        if not self.exceeds_recorded(batch):
            return self.device_us(batch)
        columns, parts = self._device_columns(batch), self._parts(batch)
        parts_us = parts * self.fit.device.us(self._device_columns(batch, parts))
        least_us = max(parts_us, self.device_us(batch))
        more = batch.decode_requests - self.most_decodes
        if more <= 0:
            return least_us
        columns["decode_context_tokens"] *= self.most_decodes / batch.decode_requests
        columns |= {name: columns[name] - more for name in ("decode_requests", "batch_tokens")}
        further = math.ceil(more / self.most_decodes)
        edge_us = self.fit.device.us(columns) + further * self.first_decode_us
        return max(least_us, edge_us)

    def _parts(self, batch: Batch) -> int:
        """Return how many steps of the largest recorded size a batch would fill, each with a fixed cost."""
        return max(1, math.ceil(batch.batch_tokens / self.most_tokens))

    def _device_columns(self, batch: Batch, parts: int = 1) -> dict[str, float]:
        """Return the columns of a batch, or of each of its parts if it is divided evenly.

        The cost of any prefill counts once for each step of the largest recorded size that the batch would
        fill, because it may be the cost of that many tokens.
        """
        columns = {name: getattr(batch, name) / parts for name in {*DEVICE, *COMPUTE, *DRAFTS}}
        columns |= {name: getattr(batch, name) * self._parts(batch) / parts for name in PREFILL_STEPS}
        use = graph_use(math.ceil(batch.batch_tokens / parts), self.fit.graph_sizes)
        return columns | dict(zip(GRAPHS, use, strict=True))

    @property
    def has_draft_cost(self) -> bool:
        """Whether recorded steps show the cost of a draft token, so that a replay without drafts saves it."""
        return all(set(DRAFTS) <= part.factors.keys() for part in self.fit.device.parts)

    @cached_property
    def extrapolation(self) -> dict[str, Extrapolation]:
        """Error of steps outside the recorded range, by column; empty for a loaded fit."""
        return {} if self.rows is None else extrapolation_errors(self.rows, self.fit.device)

    def deviated_us(self, batch: Batch, deviations: float) -> float:
        """Return the time of execution if steps outside the range take this many standard errors longer.

        Steps with more tokens than any recorded step take at most the time that they would take without
        economies of scale.
        """
        if not batch.tokens:
            return 0.0
        columns = self._device_columns(batch)
        leaned_us = self._leaned_us(columns, deviations)
        parts = self._parts(batch)
        if parts == 1:
            return leaned_us
        parts_us = parts * self._leaned_us(self._device_columns(batch, parts), deviations)
        return min(leaned_us, max(self.device_us(batch), parts_us))

    def _leaned_us(self, columns: dict[str, float], deviations: float) -> float:
        outside = self.fit.device.outside_by_column(columns).items() if self.extrapolation else ()
        error = max(
            (self.extrapolation.get(name, UNMEASURED).log_error(doublings) for name, doublings in outside),
            default=0.0,
        )
        return self.fit.device.leaned_us(columns, deviations, error)

    def residual_blocks(self) -> list[list[float]]:
        """Return residuals in blocks of neighbouring steps; ``exp`` of each is a factor of noise."""
        return [trial[at : at + BLOCK] for trial in self.fit.residuals for at in range(0, len(trial), BLOCK)]

    def resampled(self, seed: int, block: int = BLOCK) -> "Fitted":
        """Return a fit to a bootstrap sample of trials, and of blocks of neighbouring steps in each trial.

        Raises:
            UsageError: If the fit was loaded from a file, which does not contain the steps.
        """
        if self.rows is None:
            msg = "a saved fit cannot be resampled, since its steps are not saved: fit the trace again"
            raise UsageError(msg)
        import numpy as np  # noqa: PLC0415  # as in ``cost_sums``

        random = np.random.default_rng(seed)
        trials = self.rows.partition_by("part", maintain_order=True)
        drawn: list[pl.DataFrame] = []
        for place in random.integers(len(trials), size=len(trials)):
            trial = trials[place]
            blocks = -(-trial.height // block)
            at = (random.integers(blocks, size=blocks)[:, None] * block + np.arange(block)).ravel()
            # Blocks wrap around, so that as many steps are drawn as there are: the circular block bootstrap
            # (Politis and Romano, 1992). A trial drawn twice is two trials.
            drawn.append(
                trial[at[: trial.height] % trial.height].with_columns(part=pl.lit(len(drawn), pl.UInt32))
            )
        rows = pl.concat(drawn)
        return Fitted(fit_rows(rows, self.fit.source, self.fit), rows)

    def save(self, path: Path) -> None:
        """Write the fit as JSON, without the steps.

        Raises:
            UsageError: If the file cannot be written.
        """
        try:
            safe_files.replace(path, msgspec.json.format(msgspec.json.encode(self.fit), indent=2) + b"\n")
        except OSError as error:
            msg = f"{path}: cannot be written ({error.strerror})"
            raise UsageError(msg) from error


def load_fit(path: Path) -> Fitted:
    """Load a saved fit.

    Raises:
        InputError: If the file does not exist, or is not a saved fit.
    """
    with reading(path):
        content = path.read_bytes()
    try:
        return Fitted(msgspec.json.decode(content, type=Fit))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        msg = f"{path}: no saved step times ({error})"
        raise InputError(msg) from error


def fit(timelines: Sequence[Timeline], runs: Sequence[str], gathering_us: float | None = None) -> Fitted:
    """Fit the times of traces: of one engine, of several ranks, or of several runs of one engine.

    Ranks in lock-step wait for the slowest rank in each pass, so the device's time of a pass is fitted to the
    slowest rank's batch.

    Args:
        timelines: Timelines of one model on one device.
        runs: Names of the timelines' sources, such as names of run folders.
        gathering_us: Cost of gathering for ranks in lock-step (``fitting.gathering_us``); None if unknown.

    Raises:
        InputError: If too few steps have an output and known requests.
    """
    header = timelines[0].header
    rows = pl.concat(
        unstarved(timeline, timeline.starved_steps, observed(timeline)).with_columns(trace=pl.lit(number))
        for number, timeline in enumerate(timelines)
    ).with_columns(part=pl.struct("trace", "trial").rank("dense") - 1)
    source = Source(
        runs=list(runs),
        vllm_version=header.vllm_version,
        model=header.model,
        device=header.device,
        host=header.host,
        recorded_at=datetime.fromtimestamp(header.wall_anchor_us / 1e6, UTC).isoformat(timespec="seconds"),
        schedtrace_version=__version__,
    )
    blocks = pl.int_range(pl.len()) // BLOCK
    rows = rows.filter(blocks % max(1, -(-rows.height // MOST_STEPS)) == 0)
    rows = with_engine_columns(rows, header)
    if len(timelines) > 1 and rows["wave"].is_not_null().any():
        rows = with_slowest_rank(rows, source)
    fitted = msgspec.structs.replace(
        fit_rows(rows, source), gathering_us=gathering_us, graph_sizes=graph_sizes(header)
    )
    return Fitted(fitted, rows)


def _host_columns(batch: Batch) -> dict[str, float]:
    return {"requests": batch.requests, "prefill_tokens": batch.prefill_tokens}


class Leaned:
    """Step times of a fit, shifted by standard errors for steps outside the recorded range (``StepTimes``).

    The host's times are known to be sums, so only errors of their costs count.

    Args:
        fitted: Fit to use.
        deviations: Number of standard errors by which these steps take longer; negative for shorter.
    """

    def __init__(self, fitted: Fitted, deviations: float) -> None:
        self._fitted, self._deviations = fitted, deviations

    def device_us(self, batch: Batch) -> float:
        """Return the time of execution in the worker, in microseconds."""
        return self._fitted.deviated_us(batch, self._deviations)

    def schedule_us(self, batch: Batch) -> float:
        """Return the time of ``schedule()``, in microseconds."""
        return self._fitted.fit.schedule.leaned_us(_host_columns(batch), self._deviations)

    def update_us(self, batch: Batch) -> float:
        """Return the time of ``update_from_output()``, in microseconds."""
        return self._fitted.fit.update.leaned_us(_host_columns(batch), self._deviations)

    def gap_us(self, arrivals: int) -> float:
        """Return the time from an update to the next ``schedule()``, in microseconds."""
        return self._fitted.fit.gap.leaned_us({"arrivals": arrivals}, self._deviations)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute from the fit."""
        return getattr(self._fitted, name)


class Counted:
    """Fit that counts the steps whose times it is asked for (``StepTimes``).

    Args:
        fitted: Fit to use.
        noise: Factors of successive steps' device time. If empty, every step is scaled by total measured over
            total fitted time, so that outliers are included.
        device_us: Function for the time of execution, such as ``without_economies_us``; None for the fit's.
    """

    def __init__(
        self,
        fitted: Fitted | Leaned,
        noise: list[float] | None = None,
        *,
        device_us: Callable[[Batch], float] | None = None,
    ) -> None:
        self._fitted, self._noise = fitted, noise or [1 + fitted.fit.error.total_frac]
        self._device_us = device_us or fitted.device_us
        self.steps = self.outside = self.larger = 0
        """Numbers of steps counted: all, those outside the recorded range, and those that exceed the recorded
        steps (``exceeds_recorded``)."""

    @property
    def outside_frac(self) -> float:
        """Share of the steps outside the recorded range."""
        return self.outside / self.steps if self.steps else 0.0

    def device_us(self, batch: Batch) -> float:
        """Return the time of execution in the worker, in microseconds."""
        factor = self._noise[self.steps % len(self._noise)]
        self.steps += 1
        self.outside += self._fitted.extrapolates(batch)
        self.larger += self._fitted.exceeds_recorded(batch)
        return factor * self._device_us(batch)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute from the fit."""
        return getattr(self._fitted, name)


class RecordedTimes:
    """Durations of a trace's steps in order; fitted durations after its end, or where one is missing.

    Each method refers to a step: ``schedule_us`` to the next one, ``device_us`` to the one scheduled last,
    ``update_us`` to the oldest one whose recorded update has not been returned yet, ``gap_us`` to the time
    before the next step. An object can be used for one replay only.

    Args:
        timeline: The recorded trace, or one trial of it.
        fitted: Step times for missing durations.
    """

    def __init__(self, timeline: Timeline, fitted: Fitted) -> None:
        rows = observed(timeline)
        works = rows["total_requests"] > 0
        # From when a batch could begin to its output: so an asynchronous replay has each in time, too.
        self._device = [us if work else None for us, work in zip(rows["busy_us"], works, strict=True)]
        self._schedule = rows["schedule_us"].to_list()
        self._gap = rows["gap_us"].to_list()
        self._wake = rows["wake_us"].to_list()
        self._update = rows["update_us"].drop_nulls().to_list()
        self._fitted = fitted
        self._scheduled = self._updated = 0
        self.extrapolated = 0
        """Number of steps scheduled after the last recorded one."""

    @property
    def description(self) -> str:
        """Sentence with the number of recorded steps and the fit that is used after them."""
        return f"The {len(self._schedule)} recorded steps, one by one; then: {self._fitted.description}"

    def schedule_us(self, batch: Batch) -> float:
        """Return the time of ``schedule()`` of the next step, in microseconds."""
        recorded = _at(self._schedule, self._scheduled)
        self.extrapolated += self._scheduled >= len(self._schedule)
        self._scheduled += 1
        return self._fitted.schedule_us(batch) if recorded is None else recorded

    def device_us(self, batch: Batch) -> float:
        """Return the time of execution of the step scheduled last, in microseconds."""
        recorded = _at(self._device, self._scheduled - 1) if batch.tokens else 0.0
        return self._fitted.device_us(batch) if recorded is None else recorded

    def update_us(self, batch: Batch) -> float:
        """Return the time of the next ``update_from_output()``, in microseconds."""
        recorded = _at(self._update, self._updated)
        self._updated += 1
        return self._fitted.update_us(batch) if recorded is None else recorded

    def gap_us(self, arrivals: int) -> float:
        """Return the time from an update to the next ``schedule()``, in microseconds."""
        recorded = _at(self._gap, self._scheduled)
        return self._fitted.gap_us(arrivals) if recorded is None else recorded

    def wake_us(self) -> float:
        """Return the time until an idle engine takes in a request of the next step, in microseconds."""
        recorded = _at(self._wake, self._scheduled)
        return self._fitted.wake_us() if recorded is None else recorded

    def gathering_us(self) -> float | None:
        """Return the microseconds that gathering a number from all ranks adds to a loop; None if unknown."""
        return self._fitted.gathering_us()


def _at(times: list[float | None], place: int) -> float | None:
    return times[place] if 0 <= place < len(times) else None
