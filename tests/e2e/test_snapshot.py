"""An engine that keeps its last seconds in memory, until somebody asks or it ends."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from schedtrace.read.run import read_run
from tests.e2e.test_attach import asked, benchmark


@pytest.fixture(scope="module")
def keeping(workplace):
    """A working engine that was started with SCHEDTRACE_KEEP."""
    variables = {"SCHEDTRACE_KEEP": "8s", "SCHEDTRACE_DIR": str(workplace / "kept")}
    with benchmark(workplace, **variables) as process:
        yield process


def test_a_snapshot_is_a_run_and_the_recording_goes_on(keeping, workplace, analyzed):
    listed = asked(workplace, "engines", keeping.pid).out
    assert re.search(
        r"in memory: the last 8 s, \d\.\d of at most 64 MiB \(schedtrace snapshot \d+ writes it\)", listed
    )
    assert not (workplace / "kept").exists()
    last = []
    for number in range(2):
        written = asked(workplace, "snapshot", keeping.pid, "-o", f"asked-{number}")
        assert written.code == 0, written.err
        (folder,) = (workplace / f"asked-{number}").iterdir()
        assert f"next: schedtrace analyze {folder}" in written.out
        problems = [problem["text"] for problem in analyzed(folder)["problems"]]
        expected = ("begins at step ", "present when the recording began")
        assert all(any(words in text for words in expected) for text in problems), problems
        last.append(read_run(folder).traces[0].steps["step"][-1])
        time.sleep(0.5)
    assert last[0] < last[1]
    refused = asked(workplace, "attach", keeping.pid, "-o", "unwanted")
    assert (refused.code, (workplace / "unwanted").exists()) == (4, False)
    assert "it keeps its last seconds in memory: schedtrace snapshot writes them" in refused.err


def test_it_leaves_a_snapshot_when_it_is_stopped(keeping, workplace, analyzed):
    engine = int(re.search(r"pid (\d+)", asked(workplace, "engines", keeping.pid).out)[1])
    os.kill(engine, signal.SIGTERM)
    until = time.monotonic() + 60
    while Path(f"/proc/{engine}").exists():  # its front end ends seconds of a processor later
        assert time.monotonic() < until
        time.sleep(0.2)
    (folder,) = (workplace / "kept").iterdir()
    assert re.search(r"-engine-ended-\w+$", folder.name)
    assert analyzed(folder)["statistics"]
