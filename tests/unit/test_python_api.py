"""What ``schedtrace`` exports, and what importing it costs vLLM's processes."""

import subprocess
import sys
from pathlib import Path

import pytest

import schedtrace

SAMPLE = Path(__file__).parents[1] / "docs" / "data" / "base"


@pytest.mark.parametrize("name", [name for name in schedtrace.__all__ if name != "Simulation"])
def test_every_public_name_can_be_imported(name):
    assert getattr(schedtrace, name) is not None


def test_a_run_is_read_and_analyzed():
    run = schedtrace.read_run(SAMPLE)
    report = schedtrace.analyze_run(run)
    timeline = schedtrace.make_timeline(run.traces[0])
    assert report.findings[0].code == "arrival-limited"
    assert timeline.steps.height == 23


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        schedtrace.nothing  # noqa: B018  # the access is what is tested


def test_importing_the_package_imports_no_other_part_of_it():
    code = "import sys, schedtrace; print(sorted(m for m in sys.modules if m.startswith('schedtrace')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['schedtrace', 'schedtrace.version']"
