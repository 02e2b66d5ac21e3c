"""Removal of old recordings beside the recording that begins, so that restarted servers do not fill a disk.

Only folders that are provably ended recordings of schedtrace are removed: see ``_ended_run``.
"""

import fcntl
import os
import platform
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from schedtrace.model.manifest import FILE_NAME
from schedtrace.model.trace_bounds import size_of
from schedtrace.record.log import logger
from schedtrace.record.processes import age_s
from schedtrace.record.switches import DIR, environment_value

VARIABLE = "SCHEDTRACE_DIR_MAX"
"""Variable with the maximum total size of the recordings in ``SCHEDTRACE_DIR``; ``off``: none is removed."""
DEFAULT = "20G"
SETTLED_S = 600.0
"""Seconds without a change after which a folder has no live recorder, which writes every few seconds."""
CLOCK_S = 60.0
"""Largest assumed difference between the clock of the disk and that of processes, in seconds."""
_NAME = re.compile(r"\d{8}-\d{6}((?:-[\w.]+)+)")
"""Pattern of a folder name that ``settings.claim_run_dir`` or the flight recorder forms; one number is a
process id.
"""
_FILES = re.compile(r"engine-\d+(\.\d+)?\.jsonl(\.zst)?|front-end-\d+\.jsonl|" + re.escape(FILE_NAME))


class OldRun(NamedTuple):
    """A recording that has ended."""

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
    """Remove the oldest ended recordings beside this one while all together exceed the limit; on a thread.

    Args:
        current: Run folder of the current recording.
    """
    text = os.environ.get(VARIABLE, "").strip() or DEFAULT
    if text.lower() == "off":
        return
    try:
        most = size_of(text)
    except ValueError as error:
        logger.warning("schedtrace: {}={}: {}; no old recording is removed", VARIABLE, text, error)
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
        OSError: If another engine has it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _size(folder: Path) -> int:
    """Return the bytes of a folder that has the name of a recording."""
    with suppress(OSError):
        if _NAME.fullmatch(folder.name) and not folder.is_symlink():
            return sum(path.lstat().st_size for path in folder.iterdir())
    return 0


def _remove_run(run: OldRun) -> None:
    """Remove a run, its manifest first: without one, a partly removed folder is no recording."""
    for path in sorted(run.files, key=lambda path: path.name != FILE_NAME):
        path.unlink()
    run.folder.rmdir()
    logger.info("schedtrace: removed the old recording {} ({}=off keeps all)", run.folder, VARIABLE)


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
    named, about = _NAME.fullmatch(folder.name), folder.lstat()
    if named is None or not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return None
    files = sorted(folder.iterdir())
    stats = [path.lstat() for path in files]
    ordinary = all(stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() for status in stats)
    if not ordinary or not all(_FILES.fullmatch(path.name) for path in files):
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
