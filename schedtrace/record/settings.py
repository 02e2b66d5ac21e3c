"""What to record and where to: environment variables, since they reach every process of vLLM."""

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

DIR = "SCHEDTRACE_DIR"
"""Folder that gets one run folder per vLLM start; setting it switches recording on."""

RUN_DIR = "SCHEDTRACE_RUN_DIR"
"""The run folder itself; found by the first vLLM process and inherited by the others."""

TRIAL_IDS = "SCHEDTRACE_TRIAL_IDS"
"""Set by ``schedtrace run``: request ids are its own and tell the trial."""

HASH_IDS = "SCHEDTRACE_HASH_IDS"
"""Set to 1: request ids are written as hashes."""

LINES = "SCHEDTRACE_LINES"
"""How steps are written: ``delta`` (as what they change, the default) or ``full``."""


@dataclass(frozen=True)
class Settings:
    """Where the recorder of this process writes, and how."""

    run_dir: Path
    trial_ids: bool
    hash_ids: bool
    lines: str = "delta"


def enabled() -> bool:
    """Whether this process is asked to record."""
    return bool(os.environ.get(RUN_DIR) or os.environ.get(DIR))


def claim_run_dir(base: str | None = None) -> Path:
    """The run folder of this vLLM start.

    The first process (the front end) names it and leaves the name in the environment, where the engine
    processes of all data-parallel ranks find it.
    """
    if not os.environ.get(RUN_DIR):
        folder = Path(base or os.environ[DIR]).expanduser().absolute()
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{_model_name() or 'vllm'}-{os.getpid()}"
        os.environ[RUN_DIR] = str(folder / name)
    return Path(os.environ[RUN_DIR])


def from_environment() -> Settings:
    """The settings of this process; the run folder is claimed if nobody did before."""
    return Settings(
        run_dir=claim_run_dir(),
        trial_ids=os.environ.get(TRIAL_IDS) == "1",
        hash_ids=os.environ.get(HASH_IDS) == "1",
        lines=os.environ.get(LINES) or "delta",
    )


def _model_name() -> str | None:
    """The served model as far as the command line tells it, fit for a folder name."""
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
