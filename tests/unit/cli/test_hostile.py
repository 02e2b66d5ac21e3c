"""Texts from strangers, as a person sees them; ``tools/bench/fuzz_hostile.py`` tries many more."""

import json
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from schedtrace.cli.options import stderr_console
from schedtrace.errors import EngineError
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Preemption
from schedtrace.present.progress import RunProgress
from schedtrace.present.renderers.text import make_console
from tests import makers
from tests.fuzz.hostile_commands import check
from tests.makers import arrival, finish, step

ID = "\x1b]0;owned\x07[red]\u202e|`a"
SHOWN = r"\x1b]0;owned\x07[red]\u202e|`a"
OTHER = "=1+1\n[/red]"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run, by a relative path, in which ``ID`` preempts ``OTHER``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    refused = Exit("waiting", "break", Cause.OTHER, ID, 5, guard="x[red] > \x9b")
    come = [arrival(name, 0, 1, lora="[b]\u202e") for name in (ID, OTHER)]
    makers.run_folder(
        tmp_path / "run\x1b[1m",
        step(0, got={ID: 4, OTHER: 6}, new=[ID, OTHER], arrived=come),
        step(
            1,
            got={ID: 1},
            waiting=1,
            waiting_tokens_after=9,
            ended=refused,
            preempted=[Preemption(OTHER, 6, ID, 1)],
        ),
        step(2, got={ID: 1}, finished=[finish(OTHER, "[blink]")]),
        model="[link=http://x]tiny\x07",
        notices=["\rnot really"],
    )
    return "run\x1b[1m"


def test_step_shows_ids_and_guards_as_they_are(cli, run):
    code, out, err = cli("step", run, 1, "--all")
    assert (code, err) == (0, "")
    assert out.startswith(r"Step 1 of run\x1b[1m" + "\n")
    assert f"{SHOWN} " in out
    assert r"=1+1\n[/red] " in out
    assert r"(x[red] > \x9b)" in out


def test_request_is_found_by_the_raw_id_and_by_the_one_on_the_screen(cli, run):
    raw = cli("request", run, ID)
    assert raw[0] == 0
    assert raw[1].startswith(f"Request {SHOWN} of " + r"run\x1b[1m" + "\n")
    assert cli("request", run, SHOWN) == raw
    assert cli("request", run, SHOWN[:8]) == raw
    assert cli("request", run, r"=1+1\n[/red]")[1].startswith(r"Request =1+1\n[/red] of ")


def test_errors_name_ids_and_paths_visibly(cli, run):
    assert cli("request", run, "\x1b[2J\u202e") == (
        2,
        "",
        r"schedtrace: request \x1b[2J\u202e: no request of run\x1b[1m matches; it has 2 requests, such as "
        + SHOWN
        + r", =1+1\n[/red]"
        + "\n",
    )
    assert cli("analyze", "no\nschedtrace: all is well") == (
        3,
        "",
        r"schedtrace: no\nschedtrace: all is well: no such file or folder" + "\n",
    )
    assert cli("\x1b[1m")[2] == "schedtrace: No such command '\\\\x1b[1m'.\n"  # typer quotes it, too


def test_analyze_shows_models_and_notices_as_they_are(cli, run):
    _, out, _ = cli("analyze", run, "--details")
    assert r"  [link=http://x]tiny\x07 on cpu, vLLM 0.32.0" in out
    assert r"not really" in out
    assert r"\rnot really" in out


def test_json_has_the_very_ids(cli, run):
    _, out, _ = cli("step", run, 1, "--format", "json")
    told = json.loads(out)
    assert told["scheduled"][0]["request_id"] == ID
    assert told["label"] == run
    assert r"\u001b]0;owned\u0007[red]\u202e|`a" in out


def test_markdown_has_ids_in_code_spans(cli, run, tmp_path):
    makers.run_folder(tmp_path / "other", step(0, got={"b": 4}, new="b"))
    _, out, _ = cli("diff", run, "other", "--format", "markdown")
    assert r"* base: `run\x1b[1m`" in out.splitlines()
    assert "* new: `other`" in out.splitlines()
    assert r"`[link=http://x]tiny\x07`" in out


def test_csv_has_ids_that_are_neither_commands_nor_formulas(cli, run, tmp_path):
    cli("export", run, "--to", "csv", "--output", "out")
    rows = (tmp_path / "out" / "finishes.csv").read_text().splitlines()
    assert r",'=1+1\n[/red],[blink]," in rows[1]


def test_a_cause_is_no_format_string(cli, tmp_path):
    ended = Exit("waiting", "break", "new {0} {seats.real}", budget_left=5)
    blocked = step(0, got={"a": 1}, waiting=1, waiting_tokens_after=9, ended=ended)
    folder = makers.run_folder(tmp_path / "run", blocked)
    assert "cause new {0} {seats.real}" in " ".join(cli("analyze", folder, "--details")[1].split())
    assert "(inferred): cause new {0} {seats.real}; " in " ".join(cli("step", folder, 0)[1].split())


@pytest.mark.parametrize("number", range(1))  # more by tests/fuzz/hostile_commands.py
def test_no_output_of_any_command_holds_what_cannot_be_seen(number, tmp_path):
    choices = Random(number)  # noqa: S311  # to be repeatable is the point
    assert list(check(tmp_path / "home", choices)) == []


def test_arguments_that_are_not_utf_8_are_named_and_refused_or_read(cli, run, tmp_path):
    (tmp_path / run).rename(tmp_path / "r\udcff")
    assert cli("step", "r\udcff", 1)[1].startswith(r"Step 1 of r\udcff" + "\n")
    assert json.loads(cli("step", "r\udcff", 1, "--format", "json")[1])["path"] == r"r\udcff"
    code, out, err = cli("export", "r\udcff")
    assert (code, out) == (2, "")
    assert err.startswith(r"schedtrace: r\udcff/export: its name is not UTF-8, which Polars needs; --output ")
    assert cli("run", "--model", "m\udcff") == (
        2,
        "",
        r"schedtrace: m\udcff: not UTF-8, so it cannot be handed to the engine's process" + "\n",
    )


def test_an_engine_that_fails_is_told_line_by_line(cli, tmp_path, monkeypatch):
    died = EngineError("died\n\x1b", "  | log\x9b", "full log: x")
    monkeypatch.setattr("schedtrace.cli.run.run_plans", Mock(side_effect=died))
    monkeypatch.setattr("schedtrace.engine.plan.check_run", lambda _: [])
    assert cli("run", "--model", "m", "--output", tmp_path) == (
        4,
        "",
        "schedtrace: died\\n\\x1b\n  | log\\x9b\nfull log: x\n",
    )


def test_progress_shows_labels_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plan = SimpleNamespace(label="[red]a\x1b[2J\n", spec=SimpleNamespace(trials=2))
    with RunProgress(stderr_console(), several=True) as progress:
        progress.phase(plan, "[b]ready\x9b")
        progress.progress(plan, 1, 1, 2)
    assert capsys.readouterr().err.split("] ", 1)[1] == r"[red]a\x1b[2J\n: [b]ready\x9b" + "\n"


def test_the_bar_of_a_run_shows_labels_as_they_are():
    plan = SimpleNamespace(label="[red]a\x1b", spec=SimpleNamespace(trials=2))
    console = make_console(width=100)
    progress = RunProgress(console, several=True)
    progress.progress(plan, 1, 1, 2)
    with console.capture() as captured:
        console.print(progress._bars.make_tasks_table(progress._bars.tasks))
    assert captured.get().startswith(r"[red]a\x1b: trial 1/2 ")
