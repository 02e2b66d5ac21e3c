"""The run folder: its name, and making it without touching what is not ours."""

import os
import re
import shutil
from pathlib import Path

from schedtrace.engine.recording_check import TRACES
from schedtrace.errors import UsageError
from schedtrace.model import safe_files
from schedtrace.model.manifest import FILE_NAME


def folder_of(output: Path, name: str) -> Path:
    """The run folder for a label.

    Raises:
        UsageError: nothing of the label can stand in a folder's name.
    """
    folder = output / re.sub(r"[^\w.+=-]+", "_", name).lstrip(".")
    if folder == output:
        msg = f"--label {name}: no name for a folder"
        raise UsageError(msg)
    return folder


def make_folders(folders: list[Path], *, force: bool) -> None:
    """Make empty run folders; all are checked before the first is touched.

    Raises:
        UsageError: one holds something already and ``force`` is not given, or it cannot be made.
    """
    for folder in folders:
        try:
            _check(folder, force=force)
        except OSError as error:
            raise _cannot_be_made(folder, error) from error
    for folder in folders:
        try:
            _make(folder)
        except OSError as error:
            raise _cannot_be_made(folder, error) from error


def _cannot_be_made(folder: Path, error: OSError) -> UsageError:
    where = "" if error.filename in {None, str(folder)} else f": {error.filename}"
    return UsageError(f"{folder}: cannot be made ({error.strerror}{where}); give another --output")


def _check(folder: Path, *, force: bool) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        msg = f"{folder} is no folder: give another --label or --output"
        raise UsageError(msg)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        msg = f"{folder} exists: give another --label or --output, or --force to replace it"
        raise UsageError(msg)
    if not any(folder.glob(TRACES)) and not (folder / FILE_NAME).exists():
        msg = f"{folder} is no run folder: --force will not empty it"
        raise UsageError(msg)


def _make(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        shutil.rmtree(folder)
    safe_files.make_folder(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        msg = f"{folder}: cannot be written to; give another --output"
        raise UsageError(msg)
