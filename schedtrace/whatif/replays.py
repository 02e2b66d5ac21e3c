"""Replay of a load on an engine with changed settings, for predictions, advice and sweeps.

The engine is a recorded engine, or a model on a GPU.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from schedtrace.diagnose.run_statistics import pooled_reports
from schedtrace.model.message import Message
from schedtrace.model.report import TrialReport
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import Fact
from schedtrace.model.what_if import CONCURRENCY, LoadPart, ReplayedLoad
from schedtrace.read.run import Run, read_run
from schedtrace.step_times.batch import StepTimes
from schedtrace.step_times.fitted import Counted, Fitted
from schedtrace.step_times.roofline import FIT_TO_MEMORY, Gpu, Roofline
from schedtrace.step_times.shapes import Shape
from schedtrace.timeline.timeline import Timeline, make_timeline
from schedtrace.workloads.workload import Workload

if TYPE_CHECKING:
    from schedtrace.simulate.replay import Played

BLOCKS = "num_gpu_blocks_override"
ALONE: dict[str, Any] = {"data_parallel_size": 1, "balance_ranks": False}
"""Options for an engine that is not a data-parallel rank."""
NOT_KNOWN = say(
    "balance_ranks: what gathering the ranks' counts costs is not known, since no all-reduce of theirs is "
    "recorded; it takes no time here."
)
AS_RECORDED = (
    "balance_ranks: gathering the ranks' counts takes {time:us} in every loop, the median of their recorded "
    "all-reduces."
)
AUTO = ("kv_cache_dtype", "auto")
"""Setting and value that are equivalent to not setting the option."""


@dataclass(frozen=True)
class RecordedEngine:
    """Engine of a trace, or several ranks of one run."""

    OWN: ClassVar[frozenset[str]] = frozenset()
    """Settings that act only through memory and step times, so that vLLM's scheduler does not see them."""

    header: Header
    times: StepTimes
    ranks: int = 1
    """Number of data-parallel ranks."""

    @property
    def step_times(self) -> str:
        """Source of the step times, as a sentence."""
        return self.times.description

    def configured(self, changes: Mapping[str, Any]) -> tuple[dict[str, Any], StepTimes]:
        """Return options of ``simulate.replay.play_loads``, and the step times.

        Raises:
            UsageError: If a replay cannot make a change.
        """
        from schedtrace.simulate.engine_options import engine_options  # noqa: PLC0415  # imports vLLM

        return engine_options(self.header, changes, ranks=self.ranks), self.times

    def base(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of settings before any change; None if vLLM's default applies."""
        options, _ = self.configured({})
        options = {**ALONE, **options}
        return {name: options.get("num_blocks" if name == BLOCKS else name) for name in names}


@dataclass(frozen=True)
class ModelledEngine:
    """Engine with a model's shape on GPUs, and vLLM's defaults for an API server on such a GPU.

    Args:
        shape: Shape of the model.
        gpu: Kind of the engine's GPUs.
        times: Step times; None for the roofline of shape and GPUs.
    """

    shape: Shape
    gpu: Gpu
    times: StepTimes | None = None

    OWN: ClassVar[frozenset[str]] = frozenset(
        {"tensor_parallel_size", "gpu_memory_utilization", "kv_cache_dtype"}
    )

    @property
    def step_times(self) -> str:
        """Source of the step times, as a sentence."""
        return (self.times or Roofline(self.shape, self.gpu)).description

    def configured(self, changes: Mapping[str, Any]) -> tuple[dict[str, Any], StepTimes]:
        """Return options and step times (``RecordedEngine.configured``); the memory determines the KV blocks.

        Raises:
            UsageError: If the model does not fit, or vLLM would not start.
        """
        from schedtrace.simulate.engine_options import shaped_options  # noqa: PLC0415  # imports vLLM

        chosen = {name: value for name, value in changes.items() if (name, value) != AUTO}
        gpus = chosen.get("tensor_parallel_size", 1)
        roofline = Roofline(self.shape, self.gpu, gpus, chosen.get("kv_cache_dtype"))
        return shaped_options(self.shape, self.gpu, chosen), self.times or roofline

    def base(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of these settings as in ``RecordedEngine.base``: all are vLLM's defaults."""
        return dict.fromkeys(names)


Engine = RecordedEngine | ModelledEngine


@dataclass(frozen=True)
class Work:
    """Load with its engine, as data that can be sent to another process or machine.

    Args:
        loads: Trials, replayed one after the other.
        engine: Engine whose settings are changed.
        keep_prefix_cache: Whether to keep the prefix cache between the loads.
        warmups: Number of first loads that are replayed only to fill the cache, and not measured.
        trial_ids: Whether the requests' ids contain their trials.
    """

    loads: Sequence[Workload]
    engine: Engine
    keep_prefix_cache: bool = False
    warmups: int = 0
    trial_ids: bool = False

    @property
    def measured(self) -> Sequence[Workload]:
        """Loads that the figures refer to."""
        return self.loads[self.warmups :]

    def portable(self) -> "Work":
        """Return this work with every request in memory, because another process cannot read the source."""
        loads = [replace(load, read=partial(iter, list(load))) for load in self.loads]
        return replace(self, loads=loads)


@dataclass(frozen=True)
class Replayed:
    """Result of a replay."""

    run: Run
    played: "Played"
    counted: Counted | None
    """Fit that counted the steps outside the recorded range; None if step times were not fitted."""

    @cached_property
    def timelines(self) -> list[Timeline]:
        """Timelines of the replay's engines, in the order of ranks."""
        return [make_timeline(trace, self.run.manifest) for trace in self.run.traces]

    @cached_property
    def replayed_trials(self) -> list[TrialReport]:
        """Trials of all engines together, without queue times."""
        return pooled_reports(self.timelines, None, queued=False)

    @property
    def kv_blocks(self) -> int | None:
        """Number of blocks in the KV cache."""
        return self.run.traces[0].header.kv_blocks_total

    @property
    def preemption_count(self) -> int | None:
        """Number of preemptions in ``schedule()`` on all engines; None if not recorded."""
        traces = self.run.traces
        if Fact.PREEMPTIONS not in traces[0].facts:
            return None
        return sum(trace.preemptions().filter("in_schedule").collect().height for trace in traces)


def replay_work(
    work: Work,
    changes: Mapping[str, Any],
    folder: Path,
    *,
    times: StepTimes | None = None,
    by_step: bool = False,
) -> Replayed:
    """Replay a load under changed settings in virtual time, with vLLM's own scheduler.

    Args:
        work: The load and its engine.
        changes: Values by the names of vLLM's arguments, or by ``CONCURRENCY``.
        folder: Run folder to write; an existing one is replaced.
        times: Step times; None for the engine's own.
        by_step: As for ``simulate.replay.play_loads``.

    Raises:
        UsageError: If vLLM does not accept the changes, or a replay cannot make them.
        NeverEndsError: If the load never ends with the changes.
        OSError: If the trace cannot be written.
    """
    from schedtrace.simulate.replay import play_loads  # noqa: PLC0415  # imports vLLM

    options, of_engine = work.engine.configured(engine_changes(changes))
    loads = work.loads
    if CONCURRENCY in changes:
        loads = [load.with_concurrency(changes[CONCURRENCY]) for load in loads]
    times = times or of_engine
    counted = Counted(times) if isinstance(times, Fitted) else times if isinstance(times, Counted) else None
    shutil.rmtree(folder, ignore_errors=True)
    played = play_loads(
        loads,
        options,
        counted or times,
        folder,
        by_step=by_step,
        keep_prefix_cache=work.keep_prefix_cache,
        trial_ids=work.trial_ids,
    )
    return Replayed(read_run(folder), played, counted)


def engine_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that are vLLM's arguments."""
    return {name: value for name, value in changes.items() if name != CONCURRENCY}


def fitted_length(shape: Shape, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    """Return a modelled engine's ``max_model_len`` if the KV cache determined it; otherwise None.

    Args:
        shape: Shape of the model.
        arguments: vLLM's arguments.
        options: Options of ``simulate.replay.play_loads`` that were made from the arguments.
    """
    length: int = options["max_model_len"]
    left = arguments.get("max_model_len") in FIT_TO_MEMORY
    return length if left and length < (shape.positions or 0) else None


def replayed_load(
    work: Work, label: str, path: Path | None = None, part: LoadPart | None = None
) -> ReplayedLoad:
    """Return the description of a measured load that documents contain.

    Args:
        work: The load and its engine.
        label: Label of the run, or name of the workload.
        path: Folder of the run; None: the load is not recorded.
        part: Part of the recorded load that is replayed; None for the whole load.
    """
    loads = work.measured
    return ReplayedLoad(
        label=label,
        path=None if path is None else str(path),
        recorded_version=work.engine.header.vllm_version if isinstance(work.engine, RecordedEngine) else None,
        trials=len(loads),
        requests=sum(map(len, loads)),
        prompt_tokens=sum(load.prompt_tokens for load in loads),
        output_tokens=sum(load.output_tokens for load in loads),
        by_arrival=any(load.last_arrival_us > 0 for load in loads),
        part=part,
    )


def load_notes(work: Work, changes: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Return notes on facts that the load lacks and on the assumptions made, once for all trials."""
    notes: list[Message] = []
    notes += (note for load in work.measured for note in load.all_notes if note not in notes)
    return notes + gathering_notes(work.engine.times, changes)


def gathering_notes(times: StepTimes | None, changes: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Return notes on the assumed cost of gathering counts, if any change uses balance scheduling."""
    if not any(of_one.get("balance_ranks") for of_one in changes):
        return []
    took_us = times.gathering_us() if times else None
    if took_us is None:
        return [NOT_KNOWN]
    return [say(AS_RECORDED, time=took_us)] if took_us else []
