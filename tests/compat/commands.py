"""Every command that needs no GPU runs where there is none, on the release that is installed.

Not collected by name: ``make compat`` runs it on each release, without the platform that other tests get.
"""

import os
import subprocess
import sys

import pytest

from schedtrace.engine import doctor
from tests.compat.environment import PLATFORM

LOAD = [
    "--model",
    "Qwen3-8B",
    "--gpu",
    "h100",
    "--num-prompts",
    "12",
    "--input-len",
    "64",
    "--output-len",
    "8",
]
COMMANDS = {
    "simulate": ["simulate", *LOAD, "--max-num-seqs", "2", "--label", "base"],
    "run": ["run", "--executor", "simulated", *LOAD, "--max-model-len", "4096", "--label", "run"],
    "predict": ["analyze", "logs/base", "--predict"],
    "replay": ["replay", "logs/base", "--set", "max_num_seqs=4"],
    "sweep": ["sweep", "logs/base", "--vary", "max_num_seqs=1,4", "--jobs", "1"],
    "advise": ["advise", "logs/base", "--slo", "ttft_p99=1ms", "--jobs", "1"],
}
"""In this order: the first records what the others read."""
LACKS = {"no attribute 'get_lora_tokenizer'": "vLLM needs a tokenizer despite skip_tokenizer_init (0.10.0)"}
"""What a release's own front end cannot do, by what it says then."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("commands")


@pytest.fixture
def plain_path(monkeypatch):
    """The environment of a person, without the platform that other tests get."""
    path = [part for part in os.environ["PYTHONPATH"].split(os.pathsep) if part != str(PLATFORM)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.mark.usefixtures("plain_path")
def test_doctor_finds_nothing_wrong_with_this_release():
    checks = doctor._probe(None)
    assert {check.name for check in checks} >= {"exits", "allocations", "hooks", "recording", "replay"}
    assert [check for check in checks if check.state == "wrong"] == []


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("plain_path")
def test_a_command_runs_without_a_gpu(command, place):
    ended = subprocess.run(
        [sys.executable, "-m", "schedtrace", *COMMANDS[command]],
        cwd=place,
        env=os.environ | {"XDG_CACHE_HOME": str(place / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    for said, lack in LACKS.items():
        if ended.returncode and said in ended.stderr:
            pytest.skip(lack)
    assert ended.returncode == 0, ended.stderr
