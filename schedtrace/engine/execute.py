"""Execution of plans: one (``schedtrace run``), or two in alternation (``schedtrace diff --run``)."""

import contextlib
import shutil
from typing import Protocol

from schedtrace.engine import run_spec
from schedtrace.engine.plan import Plan
from schedtrace.engine.prompts import DEFAULT_RANDOM_OUTPUT_LEN
from schedtrace.engine.recording_check import begun_traces, require_recording, require_whole
from schedtrace.engine.supervise import EngineProcess, log_lines
from schedtrace.errors import EngineError, RecordingError, SchedtraceError, UsageError
from schedtrace.model.manifest import RunWorkload, Status, TrialResult, traces_in


class Observer(Protocol):
    """Observer that shows the progress of a run."""

    def phase(self, plan: Plan, name: str) -> None:
        """Note a phase of start-up or shutdown."""

    def progress(self, plan: Plan, trial: int, finished: int, total: int) -> None:
        """Report the number of finished requests of a trial (0 is the warm-up)."""

    def trial_done(self, plan: Plan, result: TrialResult) -> None:
        """Note that a trial is over."""


def execute_plans(plans: list[Plan], observer: Observer, *, interleave: bool = True) -> None:
    """Execute the runs; with ``interleave``, alternate their trials, so machine drift affects both.

    Raises:
        SchedtraceError: If an engine did not start or died, or its trace is incomplete; the recording is
            kept.
        KeyboardInterrupt: After the engines were shut down in order.
    """
    groups = [plans] if interleave else [[plan] for plan in plans]
    for group in groups:
        _execute_group(group, observer)


def _execute_group(plans: list[Plan], observer: Observer) -> None:
    engines: list[tuple[Plan, EngineProcess]] = []
    try:
        for plan in plans:
            plan.save_manifest("starting")
            engine = EngineProcess(plan.spec, plan.folder)
            engines.append((plan, engine))
            _await_ready(plan, engine, observer)
            plan.save_manifest("running")
        for trial in range(max(plan.spec.trials for plan in plans) + 1):
            for plan, engine in engines:
                if trial <= plan.spec.trials and (trial or plan.spec.warmup):
                    _run_trial(plan, engine, trial, observer)
        for plan, engine in engines:
            _finish(plan, engine, observer)
    except KeyboardInterrupt:
        _stop_all(engines, "interrupted", observer)
        raise
    except SchedtraceError as error:
        _stop_all(engines, "failed", observer, str(error))
        _remove_unused(plans, error)
        if isinstance(error, RecordingError):
            _require_whole(engines)  # a trace that is cut is more to tell than a manifest that is
        raise


def _finish(plan: Plan, engine: EngineProcess, observer: Observer) -> None:
    observer.phase(plan, "shutting down")
    engine.send_command(run_spec.StopCommand())
    for _ in engine.events():
        pass
    _require_whole([(plan, engine)])
    plan.save_manifest("finished")


def _require_whole(engines: list[tuple[Plan, EngineProcess]]) -> None:
    for plan, engine in engines:
        require_whole(plan.traces, plan.manifest, engine.log_path)


def _remove_unused(plans: list[Plan], error: SchedtraceError) -> None:
    """Remove folders with no useful content, so that their names can be used again."""
    for plan in plans:
        if isinstance(error, UsageError) and not traces_in(plan.folder):
            shutil.rmtree(plan.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            plan.folder.rmdir()  # empty only


def _await_ready(plan: Plan, engine: EngineProcess, observer: Observer) -> None:
    for event in engine.events():
        if isinstance(event, run_spec.Phase):
            observer.phase(plan, event.name)
        elif isinstance(event, run_spec.Ready):
            _note(plan, event)
            _require_recording(plan, engine)
            observer.phase(plan, "ready")
            return
    msg = f"the engine stopped while it was starting; see {engine.log_path}"
    raise EngineError(msg)


def _require_recording(plan: Plan, engine: EngineProcess) -> None:
    """Raise RecordingError if there is no trace file although the scheduler exists."""
    plan.traces = begun_traces(plan.folder)
    if plan.traces:
        return
    if not plan.folder.exists():
        msg = f"{plan.folder} was removed while the engine was starting: run it again"
        raise RecordingError(msg)
    refusals = [line for line in log_lines(engine.log_path) if "schedtrace: not recording" in line]
    why = (
        refusals[-1].partition("schedtrace: ")[2]
        if refusals
        else "if VLLM_PLUGINS is set, it must name schedtrace"
    )
    msg = f"vLLM is up, but its scheduler is not recorded: {why}; see {engine.log_path}"
    raise RecordingError(msg)


def _note(plan: Plan, ready: run_spec.Ready) -> None:
    """Write the started engine's information into the manifest."""
    manifest, run = plan.manifest, plan.spec
    for name in set(manifest.__struct_fields__).intersection(ready.__struct_fields__):
        setattr(manifest, name, getattr(ready, name))
    manifest.workload = RunWorkload(
        dataset=run.dataset,
        num_prompts=ready.num_prompts,
        input_tokens=ready.input_tokens,
        output_tokens=ready.output_tokens,
        input_len=run.input_len if run.dataset == run_spec.RANDOM else None,
        output_len=run.output_len or (DEFAULT_RANDOM_OUTPUT_LEN if run.dataset == run_spec.RANDOM else None),
        range_ratio=run.range_ratio,
        request_rate=run.request_rate,
        own_times=ready.own_times,
        speedup=run.speedup,
        burstiness=run.burstiness,
        prequeue=run.prequeue,
        seed=run.seed,
        warmup_requests=run.warmup,
        keep_prefix_cache=run.keep_prefix_cache,
        notes=plan.notes,
    )


def _run_trial(plan: Plan, engine: EngineProcess, trial: int, observer: Observer) -> None:
    workload = plan.manifest.workload
    total = 0 if workload is None else workload.num_prompts
    if trial == 0:
        total = min(total, plan.spec.warmup)
    observer.progress(plan, trial, 0, total)
    engine.send_command(run_spec.RunTrial(trial))
    for event in engine.events():
        if isinstance(event, run_spec.Progress):
            observer.progress(plan, trial, event.finished, total)
        elif isinstance(event, run_spec.TrialDone):
            observer.trial_done(plan, event.result)
            if trial:
                plan.manifest.trials.append(event.result)
            require_recording(plan.traces, plan.manifest, engine.log_path)
            if trial:
                plan.save_manifest("running")
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
        with contextlib.suppress(RecordingError):  # what went wrong is about to be told
            plan.save_manifest(status, error)
