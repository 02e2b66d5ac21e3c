"""Runs plans: one (``schedtrace run``) or two with their trials in turn (``schedtrace diff --run``)."""

import os
import platform
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from schedtrace import __version__
from schedtrace.engine import spec
from schedtrace.engine.cpu import is_cpu_build
from schedtrace.engine.spec import RunSpec
from schedtrace.engine.supervise import EngineProcess, model_of, option_of
from schedtrace.engine.workload import load_prompts
from schedtrace.errors import EngineError, SchedtraceError, UsageError
from schedtrace.model.manifest import Manifest, Status, TrialResult, Workload, write_manifest
from schedtrace.model.redact import without_secrets

MAX_MEMORY_SHARE = 0.95
"""Of a GPU, for the engines of both runs together."""


@dataclass
class Plan:
    """One run to be made, and how far it has come."""

    spec: RunSpec
    folder: Path
    label: str
    command: list[str]
    manifest: Manifest = field(init=False)

    def __post_init__(self) -> None:
        self.manifest = Manifest(
            schedtrace_version=__version__,
            status="starting",
            label=self.label,
            started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=without_secrets(self.command),
            host=platform.node(),
            cpu_count=os.cpu_count(),
            python_version=platform.python_version(),
            trials_asked=self.spec.trials,
        )

    def save(self, status: Status, error: str | None = None) -> None:
        """Write the manifest with a new status."""
        self.manifest.status = status
        self.manifest.error = error
        write_manifest(self.folder, self.manifest)


class Observer(Protocol):
    """Is told what happens, to show it."""

    def phase(self, plan: Plan, name: str) -> None:
        """Start-up and shutdown have come this far."""

    def progress(self, plan: Plan, trial: int, finished: int, total: int) -> None:
        """So many requests of a trial (0: the warm-up) are finished."""

    def trial_done(self, plan: Plan, result: TrialResult) -> None:
        """A trial is over."""


def check(run: RunSpec) -> None:
    """Find out what is wrong with a spec before anything is started.

    Raises:
        SchedtraceError: a line for the person.
    """
    model = model_of(run.engine_args)
    if model is None:
        msg = "no model given: --model NAME_OR_FOLDER"
        raise UsageError(msg)
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().exists():
        msg = f"--model {model}: no such folder"
        raise UsageError(msg)
    if run.prequeue and run.request_rate is not None:
        msg = "--prequeue hands all requests over before the first step: it cannot go with --request-rate"
        raise UsageError(msg)
    load_prompts(run)


def make_folder(output: Path, name: str, *, force: bool) -> Path:
    """An empty run folder ``output/name``.

    Raises:
        UsageError: it holds something already, and ``force`` is not given.
    """
    folder = output / re.sub(r"[^\w.+=-]+", "_", name).lstrip(".")
    if folder == output:
        msg = f"--label {name}: no name for a folder"
        raise UsageError(msg)
    if folder.exists() and any(folder.iterdir()):
        if not force:
            msg = f"{folder} exists: give another --label or --output, or --force to replace it"
            raise UsageError(msg)
        if not any(folder.glob("engine-*.jsonl")) and not (folder / "run.json").exists():
            msg = f"{folder} is no run folder: --force will not empty it"
            raise UsageError(msg)
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"{folder}: cannot be made ({error.strerror})"
        raise UsageError(msg) from error
    return folder


def both_fit(plans: list[Plan]) -> bool:
    """Whether the engines can be up together: on a CPU yes, on a GPU if the shares given add up.

    Each vLLM engine takes ``--gpu-memory-utilization`` of the device; its default is nearly all of it.
    """
    if is_cpu_build():
        return True
    shares = [option_of(plan.spec.engine_args, "--gpu-memory-utilization") for plan in plans]
    try:
        return (
            sum(float(share) for share in shares if share is not None) <= MAX_MEMORY_SHARE
            and None not in shares
        )
    except ValueError:
        return False  # vLLM will say what is wrong with it


def execute(plans: list[Plan], observer: Observer, *, interleave: bool = True) -> None:
    """Make the runs; with ``interleave`` their trials in turn, so that a drifting machine is fair to all.

    Raises:
        SchedtraceError: an engine did not start or died; what was recorded stays.
        KeyboardInterrupt: after the engines were shut down in order.
    """
    groups = [plans] if interleave else [[plan] for plan in plans]
    for group in groups:
        _execute_group(group, observer)


def _execute_group(plans: list[Plan], observer: Observer) -> None:
    engines: list[tuple[Plan, EngineProcess]] = []
    try:
        for plan in plans:
            plan.save("starting")
            engine = EngineProcess(plan.spec, plan.folder)
            engines.append((plan, engine))
            _await_ready(plan, engine, observer)
            plan.save("running")
        for trial in range(max(plan.spec.trials for plan in plans) + 1):
            for plan, engine in engines:
                if trial <= plan.spec.trials and (trial or plan.spec.warmup):
                    _run_trial(plan, engine, trial, observer)
        for plan, engine in engines:
            observer.phase(plan, "shutting down")
            engine.send(spec.Stop())
            for _ in engine.events():
                pass
            plan.save("finished")
    except KeyboardInterrupt:
        _stop_all(engines, "interrupted", observer)
        raise
    except SchedtraceError as error:
        _stop_all(engines, "failed", observer, str(error).splitlines()[0])
        if isinstance(error, UsageError):  # nothing was run: the names may be used again
            _remove_empty(plans)
        raise


def _remove_empty(plans: list[Plan]) -> None:
    for plan in plans:
        if not any(plan.folder.glob("engine-*.jsonl")):
            shutil.rmtree(plan.folder, ignore_errors=True)


def _await_ready(plan: Plan, engine: EngineProcess, observer: Observer) -> None:
    for event in engine.events():
        if isinstance(event, spec.Phase):
            observer.phase(plan, event.name)
        elif isinstance(event, spec.Ready):
            _note(plan, event)
            observer.phase(plan, "ready")
            return
    msg = f"the engine stopped while it was starting; see {engine.log_path}"
    raise EngineError(msg)


def _note(plan: Plan, ready: spec.Ready) -> None:
    """Put what the started engine told into the manifest."""
    manifest, run = plan.manifest, plan.spec
    manifest.vllm_version = ready.vllm_version
    manifest.torch_version = ready.torch_version
    manifest.device = ready.device
    manifest.front_end = ready.front_end
    manifest.environment = ready.environment
    manifest.engine_args_given = ready.engine_args_given
    manifest.engine_args_chosen = ready.engine_args_chosen
    manifest.config_resolved = ready.config_resolved
    manifest.workload = Workload(
        dataset=run.dataset,
        num_prompts=ready.num_prompts,
        input_tokens=ready.input_tokens,
        output_tokens=ready.output_tokens,
        input_len=run.input_len if run.dataset == spec.RANDOM else None,
        output_len=run.output_len,
        request_rate=run.request_rate,
        burstiness=run.burstiness,
        prequeue=run.prequeue,
        seed=run.seed,
        warmup_requests=run.warmup,
        keep_prefix_cache=run.keep_prefix_cache,
    )


def _run_trial(plan: Plan, engine: EngineProcess, trial: int, observer: Observer) -> None:
    workload = plan.manifest.workload
    total = 0 if workload is None else workload.num_prompts
    if trial == 0:
        total = min(total, plan.spec.warmup)
    observer.progress(plan, trial, 0, total)
    engine.send(spec.RunTrial(trial))
    for event in engine.events():
        if isinstance(event, spec.Progress):
            observer.progress(plan, trial, event.finished, total)
        elif isinstance(event, spec.TrialDone):
            if trial:
                plan.manifest.trials.append(event.result)
                plan.save("running")
            observer.trial_done(plan, event.result)
            return
    msg = f"the engine stopped in trial {trial}; see {engine.log_path}"
    raise EngineError(msg)


def _stop_all(
    engines: list[tuple[Plan, EngineProcess]], status: Status, observer: Observer, error: str | None = None
) -> None:
    for plan, engine in engines:
        observer.phase(plan, "shutting down")
        try:
            engine.stop()
        except KeyboardInterrupt:  # asked twice
            engine.kill()
        plan.save(status, error)
