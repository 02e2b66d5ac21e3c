"""End to end: the real CLI on vLLM's real engine, as a person would run it. CPU build only.

Most commands run in processes that have imported vLLM already (``warm``); the thread's case, and the command
that is killed, in processes that were started as a person starts them.
"""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import pytest

from schedtrace.cli.main import main
from tests.e2e import warm

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / "examples" / "tiny-qwen3"
START_LIMIT_S = 180
CASE = {"input_len": 1024, "output_len": 64, "num_prompts": 16, "trials": 3}
"""The forum thread's case: 16 prompts of 1,024 + 64 tokens that fit the budget of 16,384 exactly."""
SHARED = {
    "default": CASE,
    "prequeued": CASE | {"prequeue": True},
    "async": {"input_len": 256, "output_len": 32, "num_prompts": 8, "async-scheduling": True},
}
"""Runs that several tests look at."""


CACHES = os.environ.get("XDG_CACHE_HOME") or f"{Path.home()}/.cache"
VLLM_CACHE = os.environ.get("VLLM_CACHE_ROOT") or f"{CACHES}/vllm"
"""The same for every run, whatever the scope of the fixture that records it: ``diff`` compares variables."""
WARM = "TESTS_WARM_VLLM"
"""Where ``warm`` listens: for all workers of a test run."""


def pytest_configure(config):
    """Start ``warm`` once, where several workers run these tests: few tests would not make up for it."""
    parallel = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not parallel or find_spec("vllm") is None:
        return
    home = TemporaryDirectory(prefix="warm-")
    os.environ[WARM] = f"{home.name}/socket"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.warm", os.environ[WARM]],
        cwd=REPO, env=environment(), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def end():
        server.stdin.close()
        server.wait()
        home.cleanup()

    config.add_cleanup(end)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session", autouse=True)
def _needs_vllm():
    if find_spec("vllm") is None:  # an import takes six seconds
        pytest.skip("vLLM is not installed")


@dataclass
class Ended:
    """A finished command."""

    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)


def environment(**more):
    ours = ("SCHEDTRACE_", "VLLM_LOGGING_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    kept["VLLM_CACHE_ROOT"] = VLLM_CACHE
    return kept | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "COLUMNS": "100"} | more


def started(program, *arguments, cwd, files, cold=False, **variables):
    """A process, with a group of its own, of ``schedtrace`` or of a script; ``cold``: no fork of ``warm``."""
    arguments = [str(argument) for argument in arguments]
    env = environment(**variables)
    if not cold and WARM in os.environ:
        return warm.Process(os.environ[WARM], str(program), arguments, cwd=cwd, env=env, files=files)
    command = ["-m", "schedtrace"] if program == "schedtrace" else [str(program)]
    out, err = files
    command = [sys.executable, *command, *arguments]
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=err, process_group=0)


class Command:
    """A command that runs: as ``started``."""

    def __init__(self, program, *arguments, cwd, cold=False, **variables):
        self._files = TemporaryFile("w+"), TemporaryFile("w+")  # noqa: SIM115  # closed once it has ended
        self.process = started(program, *arguments, cwd=cwd, files=self._files, cold=cold, **variables)

    def ended(self):
        """Wait for it; what it wrote."""
        try:
            code = self.process.wait(START_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            raise
        for file in self._files:
            file.seek(0)
        out, err = (file.read() for file in self._files)
        for file in self._files:
            file.close()
        return Ended(code, out, err)


def schedtrace(*arguments, cwd, cold=False):
    """Run the command to its end."""
    return Command("schedtrace", *arguments, cwd=cwd, cold=cold).ended()


def run_options(**options):
    """Options of ``schedtrace run`` on the tiny model, as arguments."""
    defaults = {"model": MODEL, "load-format": "dummy", "max-num-batched-tokens": 16384}
    arguments = []
    for name, value in (defaults | {k.replace("_", "-"): v for k, v in options.items()}).items():
        arguments += [f"--{name}"] if value is True else [f"--{name}", value]
    return arguments


def write_plugin(home, name):
    """Make ``register()`` of this module of ours a plugin of vLLM's, for whoever has ``home`` in its path."""
    plugin = home / f"{name}-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{name} = tests.e2e.{name}:register\n"
    (plugin / "entry_points.txt").write_text(entry)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture
def record(workplace):
    """Record a run; gives its folder."""
    return lambda label, **options: recorded(workplace, label, options)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """One of the runs of ``SHARED`` by its label, recorded once for all workers of a test run."""
    home = tmp_path_factory.getbasetemp()
    home = home.parent if home.name.startswith("popen-") else home

    def folder(label):
        with (home / f"{label}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = home / "logs" / label
            return done if done.exists() else recorded(home, label, SHARED[label], cold=label == "default")

    return folder


def recorded(home, label, options, *, cold=False):
    ended = schedtrace("run", *run_options(label=label, **options), cwd=home, cold=cold)
    assert ended.code == 0, ended.err
    return home / "logs" / label


@pytest.fixture(scope="session")
def analyzed(workplace):
    """The one run's report of ``schedtrace analyze --format json``, made once per folder."""

    @cache
    def analyze(folder):
        with redirect_stdout(io.StringIO()) as out, chdir(workplace):
            assert main(["analyze", str(folder), "--format", "json"]) == 0
        (run,) = json.loads(out.getvalue())["runs"]
        return run

    return analyze


def findings(run, code):
    """Those with this code, symptoms included."""
    every = [one for finding in run["findings"] for one in (finding, *finding["symptoms"])]
    return [finding for finding in every if finding["code"] == code]
