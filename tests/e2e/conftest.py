"""End to end: the real CLI on vLLM's real engine, as a person would run it. CPU build only."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / "examples" / "tiny-qwen3"
START_LIMIT_S = 180


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session", autouse=True)
def _needs_vllm():
    pytest.importorskip("vllm", reason="vLLM is not installed")


@dataclass
class Ended:
    """A finished command."""

    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SCHEDTRACE_")}
    return kept | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "COLUMNS": "100"} | more


def schedtrace(*arguments, cwd):
    """Run the command to its end."""
    ended = subprocess.run(
        [sys.executable, "-m", "schedtrace", *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def run_options(**options):
    """Options of ``schedtrace run`` on the tiny model, as arguments."""
    defaults = {"model": MODEL, "load-format": "dummy", "max-num-batched-tokens": 16384}
    arguments = []
    for name, value in (defaults | {k.replace("_", "-"): v for k, v in options.items()}).items():
        arguments += [f"--{name}"] if value is True else [f"--{name}", value]
    return arguments


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def record(workplace):
    """Record a run once per session; gives its folder."""
    done = {}

    def make(label, **options):
        if label not in done:
            ended = schedtrace("run", *run_options(label=label, **options), cwd=workplace)
            assert ended.code == 0, ended.err
            done[label] = workplace / "logs" / label
        return done[label]

    return make


@pytest.fixture(scope="session")
def analyzed(workplace):
    """The one run's report of ``schedtrace analyze --format json``."""

    def analyze(folder):
        ended = schedtrace("analyze", folder, "--format", "json", cwd=workplace)
        assert ended.code == 0, ended.err
        (run,) = ended.json()["runs"]
        return run

    return analyze


def findings(run, code):
    """Those with this code, symptoms included."""
    every = [one for finding in run["findings"] for one in (finding, *finding["symptoms"])]
    return [finding for finding in every if finding["code"] == code]
