"""Run folders of recordings: their names and files, and the removal of old ones beside a new recording.

Old recordings are removed so that restarted servers do not fill a disk; only folders that are provably ended
recordings of schedtrace are removed (``_ended_run``).
"""

import fcntl
import os
import platform
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from schedtrace.model import safe_files
from schedtrace.model.manifest import FILE_NAME, Manifest, write_manifest
from schedtrace.model.printable import vllm_environment, without_secrets
from schedtrace.model.trace import Header
from schedtrace.model.trace_bounds import size_of
from schedtrace.record.log import logger
from schedtrace.record.processes import age_s
from schedtrace.record.switches import DIR, RUN_DIR, environment_value

DIR_MAX = "SCHEDTRACE_DIR_MAX"
"""Variable with the maximum total size of the recordings in ``SCHEDTRACE_DIR``; with ``off``, no recording is
removed."""
DEFAULT_DIR_MAX = "20G"
SETTLED_S = 600.0
"""Seconds without a change after which a folder cannot have a live recorder, which writes every few seconds.
"""
CLOCK_S = 60.0
"""Maximum assumed difference between the clocks of the disk and of processes, in seconds."""
_FOLDER_NAME = re.compile(r"\d{8}-\d{6}((?:-[\w.]+)+)")
"""Pattern of folder names made by ``claim_run_dir`` or the flight recorder; one number is a process id."""
_FILE_NAMES = re.compile(r"engine-\d+(\.\d+)?\.jsonl(\.zst)?|front-end-\d+\.jsonl|" + re.escape(FILE_NAME))


def claim_run_dir(base: str | None = None) -> Path:
    """Return the run folder of this vLLM start.

    The first process (the front end) chooses the name and stores it in the environment, where the engine
    processes of all data-parallel ranks find it.
    """
    if not os.environ.get(RUN_DIR):
        folder = Path(base or environment_value(DIR) or "logs").expanduser().absolute()
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{_model_name() or 'vllm'}-{os.getpid()}"
        os.environ[RUN_DIR] = str(folder / name)
    return Path(os.environ[RUN_DIR])


def _model_name() -> str | None:
    """Return the served model's name in a form that fits a folder name, if the command line states it."""
    arguments = sys.argv[1:]
    for at, argument in enumerate(arguments):
        value = None
        if argument in {"--model", "serve"} and at + 1 < len(arguments):
            value = arguments[at + 1]
        elif argument.startswith("--model="):
            value = argument.removeprefix("--model=")
        if value and not value.startswith("-"):
            return re.sub(r"[^\w.-]+", "_", Path(value).name)[:40]
    return None


def create_trace_file(run_dir: Path, name: str) -> tuple[Path, int]:
    """Create a new file for this engine; a second engine of the process gets a folder of its own."""
    folder, again = run_dir, 1
    while True:
        safe_files.make_folder(folder)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            return folder / name, os.open(folder / name, flags, safe_files.FILE_MODE)
        except FileExistsError:
            again += 1
            folder = run_dir.with_name(f"{run_dir.name}-{again}")


def write_manifest_if_missing(folder: Path, header: Header) -> None:
    """Write a manifest if there is none, as for an attached server; ``schedtrace run`` writes its own."""
    if (folder / FILE_NAME).exists():
        return
    manifest = Manifest(
        schedtrace_version=header.schedtrace_version,
        status="attached",
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=without_secrets(sys.argv),
        host=header.host,
        cpu_count=os.cpu_count(),
        python_version=header.python_version,
        vllm_version=header.vllm_version,
        torch_version=header.torch_version,
        device=header.device,
        environment=vllm_environment(),
        config_resolved={"scheduler_config": header.scheduler_config},
    )
    write_manifest(folder, manifest)


class OldRun(NamedTuple):
    """Recording that has ended."""

    changed_s: float
    """Time of the last write, as Unix time."""
    size: int
    files: list[Path]
    folder: Path


class _About(msgspec.Struct):
    """Fields of a manifest that this module reads."""

    schedtrace_version: str
    status: str
    host: str = ""


def remove_old_runs(current: Path) -> None:
    """Start a thread that removes the oldest ended recordings beside this one until all fit the limit.

    Args:
        current: Run folder of the current recording.
    """
    text = os.environ.get(DIR_MAX, "").strip() or DEFAULT_DIR_MAX
    if text.lower() == "off":
        return
    try:
        most = size_of(text)
    except ValueError as error:
        logger.warning("schedtrace: {}={}: {}; no old recording is removed", DIR_MAX, text, error)
        return
    if current.parent != Path(environment_value(DIR)).expanduser().absolute():
        return  # SCHEDTRACE_RUN_DIR names a folder elsewhere
    work = threading.Thread(target=_remove, args=(current, most), name="schedtrace-old-runs", daemon=True)
    try:
        work.start()
    except RuntimeError as error:
        logger.warning("schedtrace: no old recording is removed: {}", error)


def _remove(current: Path, most: int) -> None:
    with suppress(Exception), _alone(current.parent):
        runs = sorted(ended_runs(current, time.time()))
        excess = sum(map(_size, current.parent.iterdir())) - most
        for run in runs:
            if excess <= 0:
                break
            try:
                _remove_run(run)
            except OSError as error:
                logger.warning("schedtrace: the old recording {} cannot be removed: {}", run.folder, error)
            else:
                excess -= run.size


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder against other engines that start at the same time.

    Raises:
        OSError: If another engine holds the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _size(folder: Path) -> int:
    """Return the size of a folder in bytes; 0 if its name is not that of a recording."""
    with suppress(OSError):
        if _FOLDER_NAME.fullmatch(folder.name) and not folder.is_symlink():
            return sum(path.lstat().st_size for path in folder.iterdir())
    return 0


def _remove_run(run: OldRun) -> None:
    """Remove a run, its manifest first: without one, a partly removed folder is not a recording."""
    for path in sorted(run.files, key=lambda path: path.name != FILE_NAME):
        path.unlink()
    run.folder.rmdir()
    logger.info("schedtrace: removed the old recording {} ({}=off keeps all)", run.folder, DIR_MAX)


def ended_runs(current: Path, now_s: float) -> list[OldRun]:
    """Return the ended recordings beside a run folder."""
    runs = []
    for folder in current.parent.iterdir():
        if folder != current and not folder.name.startswith(f"{current.name}-"):
            with suppress(OSError, msgspec.MsgspecError):
                run = _ended_run(folder, now_s)
                runs += [run] if run is not None else []
    return runs


def _ended_run(folder: Path, now_s: float) -> OldRun | None:
    """Return a folder if it is provably an ended recording of this user and host; otherwise None.

    Its name has schedtrace's form, and its manifest is that of a recorded server of this host. The process in
    its name has ended. It contains only regular files of a recording, and none of them has changed for
    ``SETTLED_S``.
    """
    named, about = _FOLDER_NAME.fullmatch(folder.name), folder.lstat()
    if named is None or not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return None
    files = sorted(folder.iterdir())
    stats = [path.lstat() for path in files]
    ordinary = all(stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() for status in stats)
    if not ordinary or not all(_FILE_NAMES.fullmatch(path.name) for path in files):
        return None
    manifest = msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=_About)
    changed_s = max([about.st_mtime, *(status.st_mtime for status in stats)])
    # A process of that number that is younger than the last write is another one: in a container all are 1.
    ages = [age_s(int(number)) for number in named[1].split("-") if number.isdecimal()]
    if any(age is not None and now_s - age < changed_s + CLOCK_S for age in ages):
        return None
    ours = manifest.status == "attached" and manifest.host == platform.node()
    if not ours or now_s - changed_s < SETTLED_S:
        return None
    return OldRun(changed_s, sum(status.st_size for status in stats), files, folder)
