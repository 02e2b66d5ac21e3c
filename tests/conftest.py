"""What holds for every test: the same width and no colour, whatever terminal the tests are run in."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from loguru import logger

import tests.perturbed  # noqa: F401  # before anything imports what fits
from tests.seeds import COUNT, SOAK

gc.disable()  # until all is collected: a sixth of the time that vLLM's import takes

settings.register_profile(
    "schedtrace", derandomize=not SOAK, deadline=None, database=None, max_examples=20 * COUNT
)
settings.load_profile("schedtrace")

TERMINAL_SAYS = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "PY_COLORS")
OURS = (
    "SCHEDTRACE_DIR",
    "SCHEDTRACE_RUN_DIR",
    "SCHEDTRACE_TRIAL_IDS",
    "SCHEDTRACE_HASH_IDS",
    "SCHEDTRACE_LINES",
    "SCHEDTRACE_TRACE",
    "SCHEDTRACE_KEEP",
    "SCHEDTRACE_SNAPSHOT_ON",
)

LONGEST = (
    "tests/exam/test_advice.py",
    "tests/contract/test_attach.py",
    "tests/contract/whatif/test_commands.py",
    "tests/contract/whatif/test_random_loads.py",
    "tests/contract/test_oracle.py",
    "tests/contract/whatif/test_prediction.py",
    "tests/contract/whatif/test_closed_loops.py",
    "tests/exam/test_cases.py",
    "tests/browser/test_report.py",
    "tests/contract/test_lines.py",
    "tests/contract/test_recorded_facts.py",
    *("tests/e2e/test_printed_commands.py", "tests/e2e/test_front_ends.py", "tests/e2e/test_attach.py"),
    *("tests/e2e/test_ends.py", "tests/e2e/test_faults.py"),
)
"""Files that take most of the time: begun last, one of them would leave the other workers without work."""


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish():
    """What is imported by now stays: or every full collection goes through all of vLLM again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    for name in (*TERMINAL_SAYS, *OURS):
        monkeypatch.delenv(name, raising=False)
    caches = os.environ.get("XDG_CACHE_HOME") or f"{Path.home()}/.cache"
    monkeypatch.setenv("VLLM_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT") or f"{caches}/vllm")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{os.devnull}/none")  # neither read nor written
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "25")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """``samples(code)``: the report of the recorded sample of a finding (``tests/samples.py``)."""
    from tests.samples import Samples

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if folder.name.startswith("popen-") else folder
    (folder / "samples").mkdir(exist_ok=True)
    return Samples(folder / "samples")


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What schedtrace warns of, in its log."""
    heard: list[str] = []
    sink = logger.add(lambda message: heard.append(message.record["message"]), level="WARNING")
    yield heard
    logger.remove(sink)
