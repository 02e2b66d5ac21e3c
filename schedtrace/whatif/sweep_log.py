"""``sweep.jsonl``: finished configurations, so that a sweep that was stopped goes on."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import schedtrace
from schedtrace.errors import InputError, UsageError
from schedtrace.model import safe_files
from schedtrace.model.sweep_result import Outcome
from schedtrace.whatif.installed import vllm_version
from schedtrace.whatif.sweep_play import Work

FILE_NAME = "sweep.jsonl"


class SweepLog:
    """The finished configurations of a folder.

    Args:
        folder: Made if it is not there.

    Raises:
        UsageError: it cannot be made.
        InputError: its file cannot be read, or has another sort of line.
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
        self.finished: dict[str, Outcome] = {}
        for number, line in enumerate(lines, 1):
            try:
                outcome = msgspec.json.decode(line, type=Outcome)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                msg = (
                    f"{self.path}:{number}: not a line of a sweep ({error}); remove it, "
                    "or name another --output"
                )
                raise InputError(msg) from error
            self.finished[outcome.key] = outcome

    def add(self, outcome: Outcome) -> None:
        """Write one down unless it is there; it stays even if the process is killed next."""
        if outcome.key in self.finished:
            return
        self.finished[outcome.key] = outcome
        line = msgspec.json.encode(outcome) + b"\n"
        with os.fdopen(safe_files.appendable(self.path), "ab", buffering=0) as stream:
            stream.write(line)


def digest(work: Work) -> str:
    """What of a sweep decides its outcomes, besides the changes of each configuration: hexadecimal."""
    hashed = hashlib.sha256()
    for load in work.loads:
        hashed.update(msgspec.json.encode([load.prefix_block, list(load)]))
    versions = (schedtrace.__version__, vllm_version())
    hashed.update(repr((work.engine, work.keep_prefix_cache, work.warmups, versions)).encode())
    return hashed.hexdigest()


def key(work_digest: str, changes: Mapping[str, Any]) -> str:
    """Of one configuration; the order of its changes does not matter."""
    content = msgspec.json.encode([work_digest, changes], order="deterministic")
    return hashlib.sha256(content).hexdigest()[:32]
