import os
import subprocess
import sys

import pytest

from schedtrace import __version__
from schedtrace.cli import main as command

HEAVY = ["polars", "vllm", "torch", "scipy", "numpy", "rich", "yaml"]
ENGINE = ["vllm", "torch"]


def python(*arguments, **environment):
    """The exit code, stdout and stderr of a fresh interpreter."""
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def imported_by(arguments, modules):
    """Which of ``modules`` a fresh interpreter has imported once the command has ended."""
    program = (
        "import sys; from schedtrace.cli.main import main; code = main(sys.argv[2:]); "
        "print([name for name in sys.argv[1].split() if name in sys.modules], file=sys.stderr); "
        "sys.exit(code)"
    )
    code, _, err = python("-c", program, " ".join(modules), *arguments)
    assert code == 0, err
    return err.strip()


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"], ["run", "--help"], ["--version"]])
def test_help_answers_at_once(arguments):
    assert imported_by(arguments, HEAVY) == "[]"


def test_analyze_needs_no_engine(quiet):
    assert imported_by(["analyze", quiet], ENGINE) == "[]"


def test_the_version_is_the_packages(cli):
    assert cli("--version") == (0, f"schedtrace {__version__}\n", "")


@pytest.mark.parametrize("line", ["", "--help", "analyze --help", "diff --help", "run --help"])
def test_every_command_explains_itself_on_stdout(cli, line):
    code, out, err = cli(*line.split())
    assert (code, err) == (0, "")
    assert out.startswith("Usage: ")
    assert {*line.split(), "[OPTIONS]"} - {"--help"} <= set(out.splitlines()[0].split())
    assert "--help" in out


@pytest.mark.parametrize(
    ("words", "completions"),
    [("schedtrace an", ["analyze"]), ("schedtrace analyze --format ", ["text", "markdown", "json", "html"])],
)
def test_the_shell_completes_commands_and_formats(words, completions):
    asked = {"_SCHEDTRACE_COMPLETE": "complete_bash", "COMP_WORDS": words}
    asked["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    code, out, _ = python("-c", "from schedtrace.cli.main import entry; entry()", **asked)
    assert (code, out.split()) == (0, completions)


@pytest.mark.parametrize("output_format", ["text", "markdown", "html"])  # cli/test_stories.py has JSON
@pytest.mark.parametrize("command", ["analyze", "step", "request", "diff", "findings"])
def test_every_command_takes_every_format(cli, quiet, command, output_format):
    arguments = {
        "analyze": [quiet],
        "step": [quiet, 0],
        "request": [quiet, "a"],
        "diff": [quiet, quiet],
        "findings": [],
    }
    code, out, err = cli(command, *arguments[command], "--format", output_format)
    assert (code, err) == (0, "")
    assert out.startswith("<!doctype html>") is (output_format == "html")
    assert out.endswith("\n")


def test_python_m_schedtrace_is_the_same_command():
    assert python("-m", "schedtrace", "--version") == (0, f"schedtrace {__version__}\n", "")


def test_an_interruption_ends_with_130(cli, quiet, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("schedtrace.read.run.look_for_runs", interrupted)
    assert cli("analyze", quiet) == (130, "", "schedtrace: interrupted\n")


@pytest.mark.parametrize("output_format", ["text", "json"])
def test_a_reader_that_has_seen_enough_is_no_error(output_format):
    run = [sys.executable, "-m", "schedtrace", "findings", "--format", output_format]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)


def test_a_terminal_without_our_characters_gets_question_marks(quiet):
    code, out, err = python("-m", "schedtrace", "analyze", quiet, "--details", PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "budget use  ?\n" in out


def test_the_console_script_exits_with_what_main_returns(monkeypatch):
    monkeypatch.setattr(command, "main", lambda: 3)
    with pytest.raises(SystemExit) as end:
        command.entry()
    assert end.value.code == 3


def test_help_lists_every_command_below_one_heading(cli):
    _, text, _ = cli("--help")
    sections = [
        section.splitlines() for section in text.split("\n\n") if section.startswith(tuple(command.COMMANDS))
    ]
    assert {heading.rstrip(":"): [row.split()[0] for row in rows] for heading, *rows in sections} == {
        heading: [function.__name__ for function in functions]
        for heading, functions in command.COMMANDS.items()
    }
