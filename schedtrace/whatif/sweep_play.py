"""Replay of a configuration in a process that may do several: what a pool's workers call."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
from loguru import logger

from schedtrace.diagnose.latencies import with_latencies
from schedtrace.diagnose.throughput import covered_seconds
from schedtrace.engine.vllm_config import import_vllm
from schedtrace.errors import UsageError
from schedtrace.fleet.workers import LocalProcesses, RayTasks, WorkerPool
from schedtrace.model.printable import capped
from schedtrace.model.what_if import ReplayOutcome
from schedtrace.read.trace import Trace
from schedtrace.whatif.replays import ModelledEngine, Work, fitted_length, replay
from schedtrace.workloads.workload import Workload

RETRIES = 3
"""Number of times that Ray repeats a replay whose worker ended."""
DIGITS = 3
"""Digits of milliseconds: a trace's clock counts microseconds."""


def base_settings(work: Work, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of settings before any change.

    Raises:
        UsageError: If a name is not an argument of vLLM, or a replay cannot change it.
    """
    from schedtrace.simulate.engine_options import require_known  # noqa: PLC0415  # imports vLLM

    for name in names:
        if name not in work.engine.OWN:
            require_known(name)
    return work.engine.base(names)


def outcome_of(work: Work, key: str, changes: Mapping[str, Any]) -> ReplayOutcome:
    """Replay the loads under a changed configuration; if vLLM refuses it, the outcome gives the reason.

    Raises:
        OSError: If the trace cannot be written.
    """
    outcome = ReplayOutcome(key=key, changes=dict(changes), requests=sum(map(len, work.measured)))
    with tempfile.TemporaryDirectory(prefix="schedtrace-sweep-") as folder:
        try:
            if isinstance(work.engine, ModelledEngine):
                options, _ = work.engine.configured(changes)
                outcome.fitted_max_model_len = fitted_length(work.engine.shape, changes, options)
            replayed = replay(work, changes, Path(folder) / "run")
            outcome.steps, outcome.too_long = replayed.played.steps, len(replayed.played.refused)
            outcome.kv_blocks, outcome.preemptions = replayed.kv_blocks, replayed.preemption_count
            if replayed.counted is not None:
                outcome.extrapolated_steps = replayed.counted.outside
            _measure(outcome, replayed.run.traces, work.measured)
        except (OSError, MemoryError):
            raise  # of this machine, not of the configuration
        except UsageError as error:
            outcome.refused = str(error)
        except Exception as error:  # noqa: BLE001  # vLLM's own assertions: a row, like what it refuses by name
            outcome.refused = f"vLLM fails: {type(error).__name__}: {error}".splitlines()[0]
    return outcome


def _measure(outcome: ReplayOutcome, traces: Sequence[Trace], loads: Sequence[Workload]) -> None:
    """Fill in the figures that the traces of a replay show; they have one clock."""
    arrivals, finishes = (
        pl.concat(frames, how="diagonal_relaxed")
        for frames in ([trace.arrivals for trace in traces], [trace.finishes for trace in traces])
    )
    load_of = {capped(request.request_id): number for number, load in enumerate(loads) for request in load}
    numbers = pl.DataFrame({"request_id": load_of.keys(), "load": load_of.values()})
    first_arrivals = arrivals.join(numbers, on="request_id").group_by("load").agg(pl.col("arrived_us").min())
    done = (
        with_latencies(finishes)
        .filter("done")
        .join(numbers, on="request_id", maintain_order="left")
        .with_columns((pl.col("ttft_us", "tpot_us", "e2e_us") / 1e3).round(DIGITS))
    )
    ended = done.group_by("load").agg(pl.col("last_token_us").max()).join(first_arrivals, on="load")
    outcome.duration_s = ended.select((pl.col("last_token_us") - pl.col("arrived_us")).sum()).item() / 1e6
    if any(load.of_server for load in loads):
        outcome.counted_s = covered_seconds(done.select(begin_us="arrived_us", end_us="last_token_us"))
    outcome.output_tokens = int(done["output_tokens"].sum())
    outcome.ttft_ms, outcome.tpot_ms, outcome.e2e_ms = (
        done[name].to_list() for name in ("ttft_us", "tpot_us", "e2e_us")
    )


_T = TypeVar("_T")
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class ReplayPool:
    """Other processes, each of which imports vLLM once and may replay the same loads many times.

    Args:
        pool: The processes. On a cluster, each machine needs schedtrace and vLLM in the releases of this
            one; the loads go to them as data.
        work: First argument of all calls.
    """

    def __init__(self, pool: WorkerPool, work: Work) -> None:
        self._pool, self._work = pool, pool.shared(work)

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Call ``function(work, *arguments)`` in a process; return its future."""
        return self._pool.submit(_quietly, function, self._work, *arguments)

    def is_loss(self, error: BaseException) -> bool:
        """Return whether the error says that a process ended, and not what the call raised."""
        return self._pool.is_loss(error)

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._pool.close()


def local_replays(work: Work, jobs: int) -> ReplayPool:
    """Return a pool of local processes, all of which begin to import vLLM at once."""
    pool = LocalProcesses(jobs)
    for _ in range(jobs):
        pool.submit(_quietly, import_vllm)
    return ReplayPool(pool, work)


def ray_replays(work: Work, jobs: int) -> ReplayPool:
    """Return a pool of Ray tasks.

    Raises:
        MissingExtraError: If Ray is not installed.
    """
    return ReplayPool(RayTasks(jobs, retries=RETRIES), work)


def _quietly(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function without the user's settings for recordings, which do not apply to replays."""
    os.environ.update(QUIET)
    for name in [name for name in os.environ if name.startswith("SCHEDTRACE")]:
        del os.environ[name]
    logger.remove()
    logger.add(_warn, level="WARNING", format="schedtrace: {message}")
    return function(*arguments)


def _warn(line: str) -> None:
    os.write(2, line.encode())
