"""Checks of ``doctor`` that need vLLM: whether the marks fit its source, and what can be recorded.

``python -m schedtrace.engine.vllm_probe FILE [CLASS]`` writes a JSON list of checks to the file. That
separate process imports vLLM, wraps its methods and records a synthetic load, none of which should happen in
a server's process.
"""

import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from schedtrace.errors import reason_of
from schedtrace.model.checkup import Check
from schedtrace.model.printable import error_text, shortened

SCHEDULERS = (
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
)
"""Scheduler classes between which vLLM chooses."""
MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
ENGINE: dict[str, Any] = {"num_blocks": 30, "max_num_seqs": 4}
"""Settings that are too small for the synthetic load, so that requests are refused and preempted."""
LOAD: dict[str, Any] = {"num_prompts": 8, "input_len": 90, "output_len": 40, "prequeue": True}
LONGEST_WHY = 600
"""Maximum number of characters quoted from an error or a guard."""
REPORT = "open an issue with this line and your vLLM's release"


def vllm_checks(scheduler: str | None) -> list[Check]:
    """Return the checks of the vLLM in this process.

    Args:
        scheduler: Class of ``--scheduler-cls``, as ``package.module.Class``; None for only vLLM's own
            classes.
    """
    names = [*SCHEDULERS, *([scheduler] if scheduler else [])]
    parts: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("device", device_checks),
        ("exits", lambda: (exits for name in names for exits in exit_checks(name))),
        ("allocations", allocation_checks),
        ("hooks", hook_checks),
        ("recording", recording_checks),
    ]
    checks: list[Check] = []
    for subject, part in parts:
        try:
            checks += part()
        except Exception as error:  # noqa: BLE001  # a new release may do anything, and that is the answer
            why = shortened(error_text(error), LONGEST_WHY)
            checks.append(Check(name=subject, state="wrong", text=why, advice=REPORT))
    return checks


def exit_checks(name: str) -> Iterator[Check]:
    """Check whether a scheduler class's source can be marked to record its exits, and report unknown guards.

    Args:
        name: ``package.module.Class``.
    """
    from schedtrace.record.marks.exits import places, unknown_guards
    from schedtrace.record.marks.marking import instrument

    module, _, class_name = name.rpartition(".")
    try:
        chosen = pkgutil.resolve_name(
            f"{module}:{class_name}"
        )  # with a colon, it raises the module's own error
        instrumented = instrument(chosen)
    except Exception as error:  # noqa: BLE001  # a user's module may raise anything
        text = f"{name} cannot be loaded: {shortened(error_text(error), LONGEST_WHY)}"
        advice = "give a class, as package.module.Class"
        if isinstance(error, ModuleNotFoundError) and error.name and not module.startswith(error.name):
            advice = f"install {error.name}, which {module} imports"
        yield Check(name="exits", state="wrong", text=text, advice=advice)
        return
    for refused in instrumented.refused:
        text = f"{name}: exits are inferred, not recorded: {shortened(refused, LONGEST_WHY)}"
        advice = "see docs/recording.md, How exits are recorded"
        yield Check(name="exits", state="wrong", text=text, advice=advice)
    marked = places(instrumented.sites)
    if instrumented.classes and not instrumented.refused:
        text = f"{name}: {marked} exits, skips and caps, all recorded by a marked copy of the source"
        yield Check(name="exits", state="ok", text=text)
    for guard in unknown_guards(instrumented.sites):
        text = f"{name}: no cause is known for {shortened(guard, LONGEST_WHY)}; it is recorded as other"
        yield Check(name="exits", state="wrong", text=text, advice="name it: CONTRIBUTING.md, A new cause")


def allocation_checks() -> Iterator[Check]:
    """Check whether the limit behind a failed allocation of KV blocks can be recorded."""
    from schedtrace.record.allocation import stand_in

    refused = stand_in(pkgutil.resolve_name(MANAGER)).refused
    if refused:
        text = f"which limit makes an allocation fail is not recorded: {shortened(refused, LONGEST_WHY)}"
        yield Check(name="allocations", state="wrong", text=text, advice=REPORT)
    else:
        yield Check(name="allocations", state="ok", text="the limit behind a failed allocation is recorded")


def hook_checks() -> Iterator[Check]:
    """Check whether the wrappers around engine, worker and front end can be installed."""
    from schedtrace.record.engine_hooks import wrap_engine
    from schedtrace.record.front_end_hooks import wrap_front_end
    from schedtrace.record.worker_hooks import wrap_worker

    failed = []
    for install in (wrap_engine, wrap_worker, wrap_front_end):
        try:
            install()
        except Exception as error:  # noqa: BLE001  # as the recorder does, which goes without these facts
            failed.append(f"{install.__name__}: {error_text(error)}")
    text = shortened("; ".join(failed), LONGEST_WHY)
    if failed:
        yield Check(name="hooks", state="wrong", text=f"facts will be missing: {text}", advice=REPORT)
    else:
        yield Check(name="hooks", state="ok", text="engine, worker and front end can be wrapped")


def device_checks() -> Iterator[Check]:
    """Yield vLLM's own name of its device, then give vLLM a platform if it has none.

    The modules that later checks import copy the platform.
    """
    from vllm.platforms import current_platform

    kind = str(getattr(current_platform, "device_type", "")) or "unknown"
    name = kind
    with suppress(Exception):
        name = str(current_platform.get_device_name()) or kind
    if kind in {"", "unknown"}:
        text, advice = (
            "vLLM finds no device that it can run on",
            "schedtrace run --executor simulated needs none",
        )
        yield Check(name="device", state="note", text=text, advice=advice)
    else:
        yield Check(name="device", state="ok", text=name if name == kind else f"{name} ({kind})")
    import schedtrace.simulate  # noqa: F401  # it gives vLLM the platform


def recording_checks() -> Iterator[Check]:
    """Check what the recording of a synthetic load contains, and whether the recording can be replayed."""
    from schedtrace.read.run import read_run
    from schedtrace.simulate.replay import play_loads
    from schedtrace.step_times.constants import Constants
    from schedtrace.workloads import from_trace, random_workload

    with tempfile.TemporaryDirectory(prefix="schedtrace-doctor-") as folder:
        recorded, replayed = Path(folder) / "recorded", Path(folder) / "replayed"
        play_loads([random_workload(**LOAD)], ENGINE, Constants(), recorded)
        trace = read_run(recorded).traces[0]
        taken = trace.exits().collect()
        inferred = int((taken["via"] == "inferred").sum())
        notices = [notice for notice in trace.header.notices if "has not been tested" not in notice]
        wrong = bool(notices or inferred or trace.header.exits_via != "source" or not taken.height)
        text = (
            f"a synthetic load on vLLM's scheduler: {trace.steps.height} steps and {taken.height} exits "
            f"recorded, {inferred} inferred"
        )
        text = "; ".join([text, *(shortened(notice, LONGEST_WHY) for notice in notices)])
        yield Check(
            name="recording", state="wrong" if wrong else "ok", text=text, advice=REPORT if wrong else ""
        )
        try:
            play_loads([from_trace(trace)], ENGINE, Constants(), replayed, by_step=True)
            again = read_run(replayed).traces[0]
            columns = ["total_requests", "prefill_tokens", "decode_tokens", "num_waiting_after"]
            same = trace.steps.select(columns).equals(again.steps.select(columns))
            why = "" if same else "vLLM's scheduler decided differently when the recording was replayed"
        except Exception as error:  # noqa: BLE001  # as above
            why = f"not possible with this vLLM: {shortened(reason_of(error), LONGEST_WHY)}"
        if why:
            yield Check(name="replay", state="wrong", text=why, advice=REPORT)
        else:
            yield Check(name="replay", state="ok", text="a replay of that recording makes the same decisions")


if __name__ == "__main__":
    _, file, *scheduler_classes = sys.argv
    checked = vllm_checks(scheduler_classes[0] if scheduler_classes else None)
    Path(file).write_bytes(msgspec.json.encode(checked))
