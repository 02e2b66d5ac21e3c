"""Sweep: every combination of settings, replayed with the same load in reusable processes."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import polars as pl
from loguru import logger

from schedtrace.diagnose.serving_metrics import covered_seconds, with_latencies
from schedtrace.engine.vllm_config import import_vllm, required_vllm_version
from schedtrace.errors import EngineError, InputError, UsageError
from schedtrace.fleet.workers import LocalProcesses, RayTasks, WorkerPool
from schedtrace.model import safe_files
from schedtrace.model.message import Message
from schedtrace.model.printable import capped
from schedtrace.model.say import say
from schedtrace.model.what_if import Baseline, Bound, ReplayOutcome, Replays
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.version import __version__
from schedtrace.whatif.replays import (
    ModelledEngine,
    RecordedEngine,
    Work,
    fitted_length,
    load_notes,
    replay_work,
    replayed_load,
)
from schedtrace.whatif.sweep_rows import objectives, sweep_rows
from schedtrace.workloads.recorded_load import loads_of_run, without_ranks
from schedtrace.workloads.workload import Workload

RETRIES = 3
"""Number of times that Ray repeats a replay after its worker has ended."""
DIGITS = 3
"""Number of decimals of times in milliseconds; a trace's clock counts microseconds."""


def base_settings(work: Work, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of settings before any change.

    Raises:
        UsageError: If a name is not an argument of vLLM, or a replay cannot change this argument.
    """
    from schedtrace.simulate.engine_options import require_known  # noqa: PLC0415  # imports vLLM

    for name in names:
        if name not in work.engine.OWN:
            require_known(name)
    return work.engine.base(names)


def outcome_of(work: Work, key: str, changes: Mapping[str, Any]) -> ReplayOutcome:
    """Replay the loads under a changed configuration; if vLLM refuses it, the outcome states why.

    Raises:
        OSError: If the trace cannot be written.
    """
    outcome = ReplayOutcome(key=key, changes=dict(changes), requests=sum(map(len, work.measured)))
    with tempfile.TemporaryDirectory(prefix="schedtrace-sweep-") as folder:
        try:
            if isinstance(work.engine, ModelledEngine):
                options, _ = work.engine.configured(changes)
                outcome.fitted_max_model_len = fitted_length(work.engine.shape, changes, options)
            replayed = replay_work(work, changes, Path(folder) / "run")
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
    """Fill in the figures that a replay's traces show; the traces share a clock."""
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
    """Pool of processes, each of which imports vLLM once and may replay the same loads many times.

    Args:
        pool: The processes. On a cluster, each machine needs the same releases of schedtrace and vLLM; loads
            are sent as data.
        work: First argument of all calls.
    """

    def __init__(self, pool: WorkerPool, work: Work) -> None:
        self._pool, self._work = pool, pool.shared(work)

    def submit_replay(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Call ``function(work, *arguments)`` in a process; return its future."""
        return self._pool.submit(_quietly, function, self._work, *arguments)

    def is_process_loss(self, error: BaseException) -> bool:
        """Return whether an error means that a process was lost; the call itself did not raise it."""
        return self._pool.is_loss(error)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
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


FILE_NAME = "sweep.jsonl"


class SweepLog:
    """Log of a sweep's finished configurations, in a folder.

    Args:
        folder: Folder, which is created if it does not exist.

    Raises:
        UsageError: If the folder cannot be created, or its file cannot be read.
        InputError: If its file contains a line of another kind.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        try:
            safe_files.make_folder(folder)
            content = self.path.read_bytes() if self.path.exists() else b""
            *lines, cut = content.split(b"\n")
            if cut:  # the machine went down in the middle of a line: that configuration is done again
                with os.fdopen(safe_files.appendable(self.path), "ab") as file:
                    file.truncate(len(content) - len(cut))
        except OSError as error:
            msg = f"{folder}: {error.strerror}"
            raise UsageError(msg) from error
        self.finished: dict[str, ReplayOutcome] = {}
        for number, line in enumerate(lines, 1):
            try:
                outcome = msgspec.json.decode(line, type=ReplayOutcome)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                msg = (
                    f"{self.path}:{number}: not a line of a sweep ({error}); remove it, "
                    "or name another --output"
                )
                raise InputError(msg) from error
            self.finished[outcome.key] = outcome

    def add(self, outcome: ReplayOutcome) -> None:
        """Add an outcome to the file unless it is there; it stays even if this process is then killed."""
        if outcome.key in self.finished:
            return
        self.finished[outcome.key] = outcome
        line = msgspec.json.encode(outcome) + b"\n"
        with os.fdopen(safe_files.appendable(self.path), "ab", buffering=0) as stream:
            stream.write(line)


def digest(work: Work) -> str:
    """Return a hexadecimal digest of everything that determines the outcomes, except for the changes."""
    hashed = hashlib.sha256()
    for load in work.loads:
        hashed.update(msgspec.json.encode([load.prefix_block, list(load)]))
    versions = (__version__, required_vllm_version())
    hashed.update(repr((work.engine, work.keep_prefix_cache, work.warmups, versions)).encode())
    return hashed.hexdigest()


def key(work_digest: str, changes: Mapping[str, Any]) -> str:
    """Return the key of a configuration; the order of its changes does not matter."""
    content = msgspec.json.encode([work_digest, changes], order="deterministic")
    return hashlib.sha256(content).hexdigest()[:32]


MOST = 10_000
"""Maximum number of combinations; more are probably a mistake."""
WORDS = {"true": True, "false": False, "none": None, "null": None}


def parse_values(option: str, text: str) -> tuple[str, list[Any]]:
    """Parse ``max-num-seqs=64,128`` to a setting's name in vLLM's spelling, and its values.

    Raises:
        UsageError: If there is no name, no value, or a value twice.
    """
    name, _, listed = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    values = [_value(part.strip()) for part in listed.split(",") if part.strip()]
    if not name or not values:
        msg = f"{option} {text}: expected NAME=VALUE, for instance {option} max_num_seqs=512"
        raise UsageError(msg)
    if len({repr(value) for value in values}) < len(values):
        msg = f"{option} {text}: a value is given twice"
        raise UsageError(msg)
    return name, values


def parse_changes(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings of ``--set``, each with its value.

    Raises:
        UsageError: As for ``parse_values``, or if a setting has several values.
    """
    changes = {}
    for text in texts:
        name, values = parse_values("--set", text)
        if len(values) > 1:
            msg = f"--set {text}: one value, or --vary for several"
            raise UsageError(msg)
        changes[name] = values[0]
    return changes


def combinations(vary: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of values, with the fixed settings; the last setting varies fastest.

    Raises:
        UsageError: If a setting is both varied and fixed, or there are more than ``MOST`` combinations.
    """
    if both := vary.keys() & fixed.keys():
        msg = f"--set {min(both)}: it is varied as well"
        raise UsageError(msg)
    chosen = [{**fixed, **dict(zip(vary, values, strict=True))} for values in product(*vary.values())]
    if len(chosen) > MOST:
        msg = f"--vary: {len(chosen):,} combinations, at most {MOST:,} are replayed"
        raise UsageError(msg)
    return chosen


def replay_configurations(
    work: Work,
    changes: Sequence[Mapping[str, Any]],
    log: SweepLog,
    make_pool: Callable[[Work], ReplayPool],
    *,
    slo: Sequence[Bound] = (),
    label: str = "",
    path: Path | None = None,
    baseline: Baseline | None = None,
    progress: Callable[[int, int], Any] = lambda _done, _total: None,
) -> Replays:
    """Replay each configuration that ``log`` lacks, in the processes of a pool.

    The recorded configuration is replayed even if ``changes`` lacks it.

    Args:
        work: Load and engine of all configurations.
        changes: Changes of each configuration.
        log: Log that gets each outcome at once.
        make_pool: Function that starts the processes.
        slo: Bounds by which every configuration is judged.
        label: Label of the load.
        path: Folder of the load's run; None: it is not recorded.
        baseline: Comparison of a replay with the recording; None: the engine was not recorded.
        progress: Function called with the number of configurations done and in total.

    Raises:
        UsageError: If a name is not an argument of vLLM.
        EngineError: If a process was killed.
    """
    work = work.portable()
    work_digest, names = digest(work), list(dict.fromkeys(name for of_one in changes for name in of_one))
    recorded = key(work_digest, {}) if isinstance(work.engine, RecordedEngine) else None
    with closing(make_pool(work)) as pool:
        try:
            base = pool.submit_replay(base_settings, names).result()
            wanted: dict[str, dict[str, Any]] = {} if recorded is None else {recorded: {}}
            for of_one in changes:
                real = {name: value for name, value in of_one.items() if base[name] != value}
                wanted[key(work_digest, real)] = real
            for done in _finished(pool, wanted, log):
                progress(done, len(wanted))
        except Exception as error:
            if not pool.is_process_loss(error):
                raise
            msg = (
                f"a replaying process was killed, most likely for its memory; lower --jobs. Kept: {log.path}"
            )
            raise EngineError(msg) from error
    outcomes = [log.finished[key] for key in wanted]
    return Replays(
        load=replayed_load(work, label, path),
        vllm_version=required_vllm_version(),
        step_times=work.engine.step_times,
        settings=base,
        baseline=baseline,
        slo=list(slo),
        objectives=objectives(slo),
        configurations=sweep_rows(outcomes, slo, recorded=recorded),
        notes=load_notes(work, changes) + _lengths(outcomes),
    )


def _finished(pool: ReplayPool, wanted: Mapping[str, Mapping[str, Any]], log: SweepLog) -> Iterator[int]:
    """Yield the number of finished configurations, first and after each replay."""
    missing = [(key, real) for key, real in wanted.items() if key not in log.finished]
    yield len(wanted) - len(missing)
    futures = [pool.submit_replay(outcome_of, key, real) for key, real in missing]
    try:
        for at, future in enumerate(as_completed(futures), 1):
            log.add(future.result())
            yield len(wanted) - len(missing) + at
    finally:  # stopped: several may have ended together
        for future in futures:
            if future.done() and not future.cancelled() and future.exception() is None:
                log.add(future.result())


def _lengths(outcomes: Iterable[ReplayOutcome]) -> list[Message]:
    """Return a note on configurations whose ``max_model_len`` the KV cache limits, not the model."""
    fitted = [
        outcome.fitted_max_model_len for outcome in outcomes if outcome.fitted_max_model_len is not None
    ]
    if not fitted:
        return []
    return [
        say(
            "In {rows:n configuration} max_model_len is all that the KV cache holds, as with "
            "vLLM's --max-model-len auto: {tokens:n token} or more.",
            rows=len(fitted),
            tokens=min(fitted),
        )
    ]


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def recorded_loads(run: Run, clients: int | None = None) -> list[Workload]:
    """Return the load of each trial of a run, for another engine: the requests name no rank.

    Args:
        run: Any run.
        clients: As for ``prediction.recorded_load``.

    Raises:
        InputError: If the run has no requests.
    """
    loads = [without_ranks(load) for load in loads_of_run(run.traces, manifest=run.manifest)]
    return loads if clients is None else [load.with_clients(clients) for load in loads]
