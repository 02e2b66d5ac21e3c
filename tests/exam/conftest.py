"""The cases are recorded once, in a process of their own: the plugin's hooks stay out of other tests."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(folder, *wanted):
    """Record cases (see ``tests.exam.build``)."""
    command = [sys.executable, "-m", "tests.exam.build", str(folder), *wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """The folder with all cases' run folders, shared by the workers of a test run."""
    pytest.importorskip("vllm")
    from tests.exam.answers import KEPT

    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if shared.name.startswith("popen-") else shared
    folder = shared / "exam"
    with (shared / "exam.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build(folder)
            for run in folder.iterdir():
                (run / KEPT).touch()
    return folder
