"""Every ``schedtrace`` command that README and docs print runs, on a simulated device or a CPU.

Sizes are cut, since 300 prompts show no more than 8. Commands that start engines are only planned; those that
read runs read simulated ones. What is not run stands in ``NOT_RUN``, with its reason.
"""

import json
import re
import shlex
import shutil
from concurrent.futures import Future

import pytest

from schedtrace.cli.main import main
from schedtrace.engine.vllm_config import parse_engine_args
from schedtrace.step_times.shapes import SHAPES, hf_config
from schedtrace.whatif.prediction import Predictor
from tests.e2e.conftest import MODEL, REPO

NOT_RUN = {
    "schedtrace watch logs": "follows a run until a person ends it; --once is run",
    **dict.fromkeys(
        ["schedtrace queue", "schedtrace attach --for 60s"],
        "a running server; tests/e2e/test_attach.py has one",
    ),
    **dict.fromkeys(
        ["schedtrace probe", "schedtrace probe all"],
        "likewise; tests/unit/engine/test_running_engines.py has sockets that answer",
    ),
    "schedtrace attach --metrics on": "likewise; tests/contract/test_metrics.py switches metrics on",
    "schedtrace attach --metrics otlp": "likewise; tests/contract/test_otlp.py has a receiver",
    "schedtrace fleet s3://bucket/traces --jobs 8": "a bucket; tests/unit/fleet/test_s3.py has one",
    **dict.fromkeys(
        ["schedtrace fleet logs --router least-running", "schedtrace fleet logs --replay-engines 12"],
        "minutes of replays; tests/contract/test_fleet_replay.py has a small fleet",
    ),
    "schedtrace snapshot": "likewise; tests/e2e/test_snapshot.py",
    **dict.fromkeys(
        ["schedtrace doctor PID", "schedtrace doctor --url http://localhost:8000"],
        "likewise; tests/unit/engine/test_doctor.py has a socket and an address that answer",
    ),
    "schedtrace analyze --url http://127.0.0.1:8000": "likewise; tests/unit/read/test_metrics.py has one",
    "schedtrace doctor --scheduler-cls my.Scheduler": "a user's class; tests/contract/test_doctor.py",
}
INSTEAD = {"--model MODEL": "--model Qwen3-8B --executor simulated --gpu h100"}
SERVED = {
    "model_id": "m",
    "completed": 16,
    "total_input_tokens": 1024,
    "request_throughput": 40.0,
    "median_ttft_ms": 20.0,
    "p99_ttft_ms": 90.0,
}
"""What ``vllm bench serve`` writes of a load like ``LOAD``."""
MOST = {"--num-prompts": 8, "--trials": 2}
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
LOAD = ["--model", "Qwen3-8B", "--gpu", "h100", "--num-prompts", "16", "--request-rate", "40"]
LOAD += ["--input-len", "64", "--output-len", "32", "--num-gpu-blocks-override", "500"]  # cheap to replay


def printed(text):
    """The commands in a page's fenced blocks; where lines begin with a prompt, the others are output."""
    for block in FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in prompted or lines:
            if re.match(r"(\w+=\S+ )*schedtrace ", line):
                yield shlex.join(shlex.split(line, comments=True))


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in printed(page.read_text())))
RUN = [command for command in COMMANDS if command not in NOT_RUN]
STARTS_ENGINES = re.compile(r"schedtrace (run|diff --run) ")
PLANNED = [command for command in COMMANDS if STARTS_ENGINES.match(command)]
"""Commands of which each would start engines as other tests do: everything before that is run."""


def arguments(command):
    """What is run for a command: as printed, but for a reader's model and for sizes."""
    for placeholder, real in INSTEAD.items():
        command = command.replace(placeholder, real)
    schedtrace, *words = shlex.split(command)
    assert schedtrace == "schedtrace", "a variable before a command: nothing here sets it"
    for place, word in enumerate(words[:-1]):
        if word in MOST:
            words[place + 1] = str(min(MOST[word], int(words[place + 1])))
    return words


class Here:
    """A pool of one process: this one, which has imported vLLM."""

    def __init__(self, work, _jobs):
        self._work = work

    def submit_replay(self, function, *given):
        future = Future()
        future.set_result(function(self._work, *given))
        return future

    def close(self):
        pass


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with everything that commands name: runs, configurations, loads, a model."""
    home = tmp_path_factory.mktemp("printed")
    shutil.copytree(REPO / "examples", home / "examples")
    shutil.copytree(REPO / "tests" / "data" / "findings", home / "tests" / "data" / "findings")
    files = shutil.copytree(REPO / "tests" / "data" / "files", home / "tests" / "data" / "files")
    shutil.copy(files / "12-console-v1.log", home / "vllm.log")
    for name in ("before.txt", "after.txt"):
        shutil.copy(files / "16-metrics.txt", home / name)
    (home / "incident").mkdir()
    shutil.copy(files / "12-console-v1.log", home / "incident" / "vllm.log")
    (home / "serve.json").write_text(json.dumps(SERVED))
    shutil.copy(REPO / "examples" / "workloads" / "mooncake.jsonl", home / "trace.jsonl")
    (home / "config.json").write_text(json.dumps(hf_config(SHAPES["Qwen3-8B"])))
    (home / "loads.jsonl").write_text(
        "".join(f'{{"input_len": 64, "output_len": 8, "data_parallel_rank": {rank}}}\n' for rank in (0, 1, 0))
    )
    engine = f"model: {MODEL}\nexecutor: simulated\ngpu: h100\nmax-model-len: 512\n"
    load = "num-prompts: 4\ninput-len: 64\noutput-len: 4\n"
    for name, seats in (("base", 4), ("new", 8)):
        (home / f"{name}.yaml").write_text(f"{engine}{load}max-num-seqs: {seats}\n")
        recorded = ["simulate", *LOAD, "--max-num-seqs", str(seats), "--label", name]
        assert main([*recorded, "--output", str(home / "logs")]) == 0
    for name in ("run", "first", "run=today/host=node009/engine-18"):
        shutil.copytree(home / "logs" / "base", home / "logs" / name)
    return home


@pytest.fixture
def plans(place, tmp_path, monkeypatch):
    """What would have been run; each plan leaves a recorded run in a folder that has no runs yet."""
    made = []

    def run_plans(asked, **_):
        for plan in asked:
            shutil.copytree(place / "logs" / "base", plan.folder, dirs_exist_ok=True)
            made.append(plan)

    monkeypatch.setattr("schedtrace.cli.run.run_plans", run_plans)
    for path in place.iterdir():
        if path.name != "logs":
            (tmp_path / path.name).symlink_to(path)
    return made


@pytest.fixture
def _in_this_process(monkeypatch):
    """Start no processes, and make one resample for each replay.

    ``tests/contract/test_sweep.py``, ``test_doctor.py`` and ``tests/unit/fleet/test_workers.py`` start such
    processes, ``test_doctor.py`` probes vLLM, and ``tests/contract/whatif/`` judges intervals.
    """
    spread = Predictor._spread

    def once(predictor, changes, resamples):
        return spread(predictor, changes, min(1, resamples))

    monkeypatch.setattr(Predictor, "_spread", once)
    monkeypatch.setattr("schedtrace.whatif.sweep.local_replays", Here)
    monkeypatch.setattr("schedtrace.cli.fleet.processes", lambda _: 1)
    monkeypatch.setattr("schedtrace.engine.doctor._probe", lambda _: [])


@pytest.mark.parametrize("command", [command for command in RUN if command not in PLANNED], ids=str)
@pytest.mark.usefixtures("_in_this_process")
def test_a_printed_command_runs(command, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    code = main(arguments(command))
    assert code == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", PLANNED, ids=str)
def test_vllm_knows_all_options_of_a_printed_run(command, plans, tmp_path, monkeypatch, capsys):
    """``test_simulated.py``, ``test_ranks.py`` and ``test_refusals.py`` start such engines."""
    monkeypatch.chdir(tmp_path)
    code = main(arguments(command))
    assert code == 0, capsys.readouterr().err
    assert plans
    for plan in plans:
        _, explicit = parse_engine_args(plan.spec.engine_args)
        assert explicit.keys() >= {"model", "seed"}


def test_what_is_not_run_is_printed():
    assert NOT_RUN.keys() <= set(COMMANDS)


def test_commands_are_found_in_fenced_blocks_only():
    page = (
        "schedtrace not-this\n```\nschedtrace analyze \\\n  logs # why\nA=1 schedtrace step\n"
        "schedtrace: output\n```\n```text\n$ schedtrace request x\nschedtrace output\n```\n"
    )
    assert list(printed(page)) == ["schedtrace analyze logs", "A=1 schedtrace step", "schedtrace request x"]
