"""Every option of every command, given what cannot be: an exit code, one line, no traceback."""

import os
import subprocess
import sys

import pytest
import typer

from schedtrace.cli import options
from schedtrace.cli.main import app
from schedtrace.model import live
from tests.makers import run_folder, step

COMMANDS = typer.main.get_command(app).commands
HOSTILE = ["~nosuchuser/x", "9" * 400, "-1", "nan", "inf", "1e400", "a\0b", "x" * 5000, ""]
GIVEN = {"slo": "ttft_p99=1s", "model": "Qwen3-8B", "gpu": "h100", "number": "0", "request_id": "a"}
"""Values of options and arguments that have to be given; elsewhere a run folder."""
ALWAYS = {
    "watch": ["--once"],
    "run": ["--model=tiny"],
    "attach": ["--for=0s"],
    "sweep": ["--vary=max_num_seqs=4"],
}


SHARE = 3
"""Number of parameters that share the hostile values: each gets one in so many."""


def parameters():
    """Each command with each of its options and arguments that take a value."""
    number = 0
    for name, command in sorted(COMMANDS.items()):
        for parameter in command.params:
            if not getattr(parameter, "is_flag", False):
                yield pytest.param(
                    name, parameter, HOSTILE[number % SHARE :: SHARE], id=f"{name}-{parameter.name}"
                )
                number += 1


def words(command, hostile, value):
    """The command line on which one parameter has this value, and those that are needed have theirs."""
    given, arguments = [], []
    for one in COMMANDS[command].params:
        if one is not hostile and not one.required:
            continue
        text = value if one is hostile else GIVEN.get(one.name, "good")
        if one.param_type_name == "argument":
            arguments.append(text)
        else:
            given.append(f"{max(one.opts, key=len)}={text}")
    return [command, *ALWAYS.get(command, []), *given, "--", *arguments]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A run to read; neither vLLM nor an engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live, "FOLDER", tmp_path)
    monkeypatch.setattr("schedtrace.engine.unprepared._processes", lambda _: [])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for name in ("analyze", "report"):  # of the recorded run, which takes its time
        monkeypatch.setattr(f"schedtrace.cli.demo.{name}", lambda *_, **__: None)
    run_folder(tmp_path / "good", step(0))


@pytest.mark.parametrize(("command", "parameter", "values"), list(parameters()))
@pytest.mark.usefixtures("here", "plans")
def test_a_hostile_value_is_refused_in_a_line(cli, command, parameter, values):
    for value in values:
        code, _, err = cli(*words(command, parameter, value))
        assert code in range(5), value
        assert len(err.splitlines()) == (1 if code > 1 else 0), (value, err)
        assert err.startswith("schedtrace: ") or not err, value
        assert "Traceback" not in err


def test_every_command_checks_its_values_and_knows_the_short_help(cli):
    for name, command in COMMANDS.items():
        assert isinstance(command, options.Command)
        assert cli(name, "-h") == cli(name, "--help")
    assert cli("-h")[0] == 0


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("--limit", 2**53 + 1, f"--limit {2**53 + 1}: expected a number up to 9,007,199,254,740,992"),
        ("--noise", float("nan"), "--noise nan: expected a number up to 1,000,000,000,000,000.0"),
        ("--speedup", float("inf"), "--speedup inf: expected a number up to 1,000,000,000,000,000.0"),
        ("--label", "a\0b", "--label a\0b: it has a NUL character"),
    ],
)
def test_bounds_of_every_value(name, value, said):
    with pytest.raises(options.UsageError) as error:
        options.checked(name, [value])
    assert str(error.value) == said
    assert options.checked("--request-rate", float("inf")) == float("inf")


def test_durations_end_at_ten_years():
    assert options.seconds("--for", "87840h") == live.LONGEST_S
    for text in ("87841h", "9" * 400, "99999999999s"):
        with pytest.raises(options.UsageError, match="longer than ten years"):
            options.seconds("--for", text)


@pytest.mark.parametrize("columns", ["9" * 5000, "0", "-1", "nan", "", "99999", "\uff11\uff12"])
def test_a_terminal_that_cannot_be_is_forgotten(cli, monkeypatch, columns):
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, columns)
    code, out, err = cli("findings")
    assert (code, err) == (0, "")
    assert 80 < max(map(len, out.splitlines())) <= 100
    assert "COLUMNS" not in os.environ


CLOSES = "import os, sys; [os.close(int(one)) for one in sys.argv[1]]; os.execv(sys.argv[2], sys.argv[2:])"


@pytest.mark.parametrize("closed", ["1", "012"])
def test_a_closed_stdout_is_no_traceback(closed, tmp_path):
    code = "import sys; sys.argv = ['schedtrace', 'findings']; from schedtrace.cli.main import entry; entry()"
    command = [sys.executable, "-c", CLOSES, closed, sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
