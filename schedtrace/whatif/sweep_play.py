"""One configuration replayed, in a process that may do several: what a pool's workers call."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from schedtrace.diagnose.throughput import seconds
from schedtrace.diagnose.trials import FINISHED
from schedtrace.errors import UsageError
from schedtrace.model.ids import capped
from schedtrace.model.sweep import Outcome
from schedtrace.read.run import read_run
from schedtrace.read.trace import Trace
from schedtrace.step_times.counted import Counted
from schedtrace.step_times.fitted import Fitted
from schedtrace.whatif.sweep_engines import Engine, ModelledEngine, fitted_length
from schedtrace.workloads.workload import Workload

DIGITS = 3
"""Of milliseconds: a trace's clock counts microseconds."""


@dataclass(frozen=True)
class Work:
    """What every configuration of a sweep shares, as data that can go to another process or machine.

    Args:
        loads: Trials, replayed one after the other.
        engine: The one whose settings are changed.
        keep_prefix_cache: It is not emptied between the loads.
        warmups: So many of the first loads are replayed for what they leave in the cache, and not measured.
    """

    loads: Sequence[Workload]
    engine: Engine
    keep_prefix_cache: bool = False
    warmups: int = 0

    @property
    def measured(self) -> Sequence[Workload]:
        """The loads that figures are of."""
        return self.loads[self.warmups :]

    def portable(self) -> "Work":
        """Itself with every request in memory, since another process cannot read the source."""
        loads = [replace(load, read=partial(iter, list(load))) for load in self.loads]
        return replace(self, loads=loads)


def base_settings(work: Work, names: Sequence[str]) -> dict[str, Any]:
    """What settings are before any change.

    Raises:
        UsageError: a name that is no argument of vLLM, or that a replay cannot change.
    """
    work.engine.require_known(names)
    return work.engine.base(names)


def outcome_of(work: Work, key: str, changes: Mapping[str, Any]) -> Outcome:
    """Replay the loads under a changed configuration; one that vLLM refuses has an outcome that says why.

    Raises:
        OSError: the trace cannot be written.
    """
    outcome = Outcome(key=key, changes=dict(changes), requests=sum(map(len, work.measured)))
    with tempfile.TemporaryDirectory(prefix="schedtrace-sweep-") as folder:
        try:
            _play(work, outcome, Path(folder))
        except (OSError, MemoryError):
            raise  # of this machine, not of the configuration
        except UsageError as error:
            outcome.refused = str(error)
        except Exception as error:  # noqa: BLE001  # vLLM's own assertions: a row, like what it refuses by name
            outcome.refused = f"vLLM fails: {type(error).__name__}: {error}".splitlines()[0]
    return outcome


def _play(work: Work, outcome: Outcome, folder: Path) -> None:
    from schedtrace.simulate.replay import play  # noqa: PLC0415  # imports vLLM

    options, times = work.engine.configured(outcome.changes)
    if isinstance(work.engine, ModelledEngine):
        outcome.fitted_max_model_len = fitted_length(work.engine.shape, outcome.changes, options)
    counted = Counted(times) if isinstance(times, Fitted) else None
    played = play(work.loads, options, counted or times, folder, keep_prefix_cache=work.keep_prefix_cache)
    outcome.steps, outcome.too_long = played.steps, len(played.refused)
    if counted is not None:
        outcome.extrapolated_steps = counted.outside
    _measure(outcome, read_run(folder).traces, work.measured)


def _measure(outcome: Outcome, traces: Sequence[Trace], loads: Sequence[Workload]) -> None:
    """Fill in what the traces of a replay show; they have one clock."""
    if traces[0].header.preemptions_recorded:
        outcome.preemptions = sum(
            trace.preemptions().filter("in_schedule").collect().height for trace in traces
        )
    arrivals, finishes = (
        pl.concat(frames, how="diagonal_relaxed")
        for frames in ([trace.arrivals for trace in traces], [trace.finishes for trace in traces])
    )
    load_of = {capped(request.request_id): number for number, load in enumerate(loads) for request in load}
    numbers = pl.DataFrame({"request_id": load_of.keys(), "load": load_of.values()})
    came = arrivals.join(numbers, on="request_id").group_by("load").agg(pl.col("arrived_us").min())
    done = (
        finishes.filter(pl.col("status").is_in(FINISHED))
        .join(numbers, on="request_id", maintain_order="left")
        .with_columns(
            ttft=(pl.col("first_token_us") - pl.col("arrived_us")) / 1e3,
            tpot=pl.when(pl.col("output_tokens") > 1).then(
                (pl.col("last_token_us") - pl.col("first_token_us")) / 1e3 / (pl.col("output_tokens") - 1)
            ),
            e2e=(pl.col("last_token_us") - pl.col("arrived_us")) / 1e3,
        )
        .with_columns(pl.col("ttft", "tpot", "e2e").round(DIGITS))
    )
    ended = done.group_by("load").agg(pl.col("last_token_us").max()).join(came, on="load")
    outcome.duration_s = ended.select((pl.col("last_token_us") - pl.col("arrived_us")).sum()).item() / 1e6
    if any(load.of_server for load in loads):
        outcome.counted_s = seconds(done.select(begin_us="arrived_us", end_us="last_token_us"))
    outcome.output_tokens = int(done["output_tokens"].sum())
    outcome.ttft_ms, outcome.tpot_ms, outcome.e2e_ms = (
        done[name].to_list() for name in ("ttft", "tpot", "e2e")
    )
