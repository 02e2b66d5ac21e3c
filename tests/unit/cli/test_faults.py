"""Wrong arguments are refused before vLLM is imported, and a run that went wrong never says it went well."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schedtrace.cli import run
from schedtrace.cli.main import main
from schedtrace.engine import execute, plan
from schedtrace.engine.run_spec import OWN_OPTIONS, RunSpec
from schedtrace.engine.supervise import _environment
from schedtrace.engine.vllm_config import Option
from schedtrace.errors import UsageError
from tests.makers import manifest, run_folder, step

pytestmark = pytest.mark.vllm  # commands that look for vLLM before they begin

OPTIONS = [
    Option(names=["--max-num-seqs"], refuses=["word"]),
    Option(names=["--enforce-eager", "--no-enforce-eager"], values=0),
    Option(names=["--kv-cache-dtype"], choices=["auto", "fp8"]),
    Option(names=["--max-model-len"]),
]


@pytest.fixture
def known(monkeypatch, tmp_path):
    """vLLM's options are in the cache, and files of options in the working folder."""
    monkeypatch.setattr(plan, "read_options", lambda: OPTIONS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text("model: tiny\nmax-num-seqs: 4\n")
    (tmp_path / "typo.yaml").write_text("model: tiny\nmax_num_seqz: 4\n")
    (tmp_path / "value.yaml").write_text("model: tiny\nkv-cache-dtype: fp9\n")
    (tmp_path / "long.yaml").write_text("model: tiny\nmax-model-len: 1000\n")


STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
FP9 = "'fp9' is none of auto, fp8; did you mean fp8?"
FILES_FIRST = "the two files come first, then options of the runs"
SEQZ = "unknown option --max-num-seqz; did you mean --max-num-seqs?"
LONG = (
    "a request of 1024 prompt tokens + 4 output tokens exceeds the limit of 1000 (--max-model-len): lower "
    "--input-len or --output-len, or raise --max-model-len"
)
REFUSED = [
    ("run --model tiny --max-num-seqz 4", SEQZ),
    ("run --model tiny --num-promts 4", "unknown option --num-promts; did you mean --num-prompts?"),
    ("run --model tiny --enforce_eager yes", "unexpected argument yes: --enforce-eager takes no value"),
    ("run --config typo.yaml", f"--config typo.yaml: {SEQZ}"),
    ("run --config good.yaml --max-num-seqs many", "--max-num-seqs: 'many' is not a number"),
    ("run --config value.yaml", f"--config value.yaml: --kv-cache-dtype: {FP9}"),
    ("run --config long.yaml --output-len 4", LONG),
    ("diff --run good.yaml typo.yaml", f"--config typo.yaml: {SEQZ}"),
    ("diff --run good.yaml long.yaml --interleav", "unknown option --interleav; did you mean --interleave?"),
    ("diff --run --max-num-seqs 4 good.yaml long.yaml", f"--max-num-seqs: {FILES_FIRST}"),
    ("diff --fial-on regression a b", "unknown option --fial-on; did you mean --fail-on?"),
    ("diff a b --max-num-seqs 4", "unknown option --max-num-seqs; engine options go with --run only"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED)
@pytest.mark.usefixtures("known")
def test_a_wrong_argument_is_one_line_and_leaves_no_folder(cli, plans, tmp_path, line, says):
    assert cli(*line.split()) == (2, "", f"schedtrace: {says}\n")
    assert plans == []
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".yaml"] * 4


@pytest.mark.usefixtures("known")
def test_a_wrong_second_file_does_not_cost_the_first_ones_old_run(cli, tmp_path):
    run_folder(tmp_path / "logs" / "good", step(0))
    assert cli("diff", "--run", "good.yaml", "typo.yaml", "--force")[0] == 2
    assert (tmp_path / "logs" / "good" / "engine-0.jsonl").exists()


@pytest.mark.usefixtures("known")
def test_two_labels_for_one_folder_are_refused(cli, tmp_path):
    (tmp_path / "a b.yaml").write_text("model: tiny\n")
    (tmp_path / "a_b.yaml").write_text("model: tiny\n")
    says = "both runs would be called a_b: give each file a label of its own"
    assert cli("diff", "--run", "a b.yaml", "a_b.yaml") == (2, "", f"schedtrace: {says}\n")


def test_what_the_engine_refused_is_told_by_the_place_where_it_stands(cli, tmp_path, monkeypatch):
    """The first time for a vLLM: its options are known only once the engine process has asked it."""
    (tmp_path / "typo.yaml").write_text("model: tiny\nmax_num_seqz: 4\n")

    def refuses(*_, **__):
        monkeypatch.setattr(plan, "read_options", lambda: OPTIONS)
        msg = "unknown option --max-num-seqz"
        raise UsageError(msg)

    monkeypatch.setattr(execute, "execute_plans", refuses)
    typo = tmp_path / "typo.yaml"
    ended = cli("run", "--config", typo, "--output", tmp_path / "logs")
    assert ended == (2, "", f"schedtrace: --config {typo}: {SEQZ}\n")


def test_every_option_of_run_can_be_proposed():
    import typer

    names = {
        name
        for option in typer.main.get_command(main.__globals__["app"]).commands["run"].params
        for name in option.opts
    }
    assert set(OWN_OPTIONS) | {"--help"} == names | {"--help"}


@pytest.mark.parametrize(
    ("text", "typed", "lines"),
    [("", [], None), ("lines: full\n", [], "full"), ("lines: full\n", ["--lines", "delta"], "delta")],
)
def test_lines_may_be_asked_for_in_full(cli, plans, tmp_path, monkeypatch, text, typed, lines):
    (tmp_path / "run.yaml").write_text(f"model: tiny\n{text}")
    code, _, err = cli("run", "--config", tmp_path / "run.yaml", "--output", tmp_path / "logs", *typed)
    assert (code, err) == (0, "")
    assert plans[0].spec.lines == lines
    assert _environment(plans[0].spec, tmp_path).get("SCHEDTRACE_LINES") == lines
    monkeypatch.setenv("SCHEDTRACE_LINES", "full")  # an option that is not given leaves the variable alone
    assert _environment(RunSpec(engine_args=[]), tmp_path)["SCHEDTRACE_LINES"] == "full"


def test_the_outcome_names_what_is_wrong_with_the_recording(cli, tmp_path, monkeypatch):
    def run_plans(made):
        run_folder(made[0].folder, step(0, trial=1), step(4, trial=1), about=made[0].manifest)

    monkeypatch.setattr(run, "run_plans", run_plans)
    code, out, _ = cli("run", "--model", "tiny", "--output", tmp_path, "--label", "x")
    assert code == 0
    lacks = "3 steps are missing, and so is any request that arrived or ended in them"
    assert f"! {tmp_path / 'x' / 'engine-0.jsonl'}: {lacks}" in " ".join(out.split())


@pytest.fixture
def _as_started_by_a_terminal():
    """Signals have no handlers yet, and are not ignored as where nohup runs the tests."""
    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("asked", STOPS)
@pytest.mark.usefixtures("_as_started_by_a_terminal")
def test_an_interrupted_run_names_what_there_is_to_read(cli, tmp_path, monkeypatch, recorded, asked):
    def interrupted(plans, *_, **__):
        if recorded:
            run_folder(plans[0].folder, step(0), about=manifest())
        signal.raise_signal(asked)
        pytest.fail("it goes on")

    monkeypatch.setattr(execute, "execute_plans", interrupted)
    code, _, err = cli("run", "--model", "tiny", "--output", tmp_path, "--label", "x")
    rest = f"what was recorded: schedtrace analyze {tmp_path / 'x'}" if recorded else "nothing was recorded"
    assert (code, err) == (130, f"schedtrace: interrupted; {rest}\n")


def test_a_full_disk_under_the_output_is_one_line(tmp_path):
    path = run_folder(tmp_path / "r", step(0, got={"a": 1}))
    for words in (["analyze", path], ["findings", "--format", "json"]):
        with Path("/dev/full").open("wb") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "schedtrace", *map(str, words)],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            )
        assert (ended.returncode, ended.stderr) == (3, "schedtrace: output: No space left on device\n")
