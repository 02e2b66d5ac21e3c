"""What a run prints while it runs: one line per event, one bar per run."""

import io
import re
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from schedtrace.present import progress as progress_module
from schedtrace.present.progress import CountBar, ReadingBar, RunProgress
from schedtrace.present.renderers.text import make_console
from tests.makers import result

BASE, NEW = (SimpleNamespace(label=label, spec=SimpleNamespace(trials=2)) for label in ("base", "new"))
RESULT = result(2, 2.0, num_requests=4, input_tokens=9000, output_tokens=4000)


@pytest.fixture
def console():
    return make_console(width=200)


@pytest.fixture
def lines_of(console):
    """The lines that a call prints, without their times."""

    def printed(call):
        with console.capture() as captured:
            call()
        lines = captured.get().splitlines()
        assert all(re.match(r"\[ {3}\d\.\d s\] ", line) for line in lines)
        return [line.split("] ", 1)[1] for line in lines]

    return printed


@pytest.mark.parametrize(("several", "name"), [(True, "new: "), (False, "")])
def test_lines_name_the_run_only_beside_others(console, lines_of, several, name):
    progress = RunProgress(console, several=several)
    assert lines_of(lambda: progress.phase(NEW, "engine is up")) == [f"{name}engine is up"]


def test_a_trial_ends_with_its_throughput(console, lines_of):
    progress = RunProgress(console, several=False)
    assert lines_of(lambda: progress.trial_done(BASE, RESULT)) == [
        "trial 2/2: 4 requests in 2.00 s, 2.00 requests/s, 6,500 total tokens/s, 2,000 output tokens/s"
    ]


def test_each_run_has_one_bar_that_follows_its_trials(console):
    progress = RunProgress(console, several=True)
    for plan, *at in ((BASE, 0, 0, 1), (NEW, 1, 1, 4), (BASE, 1, 3, 4)):
        progress.progress(plan, *at)
    bars = [(bar.description, bar.completed, bar.total) for bar in progress._bars.tasks]
    assert bars == [("base: trial 1/2", 3, 4), ("new: trial 1/2", 1, 4)]


def test_trial_0_is_the_warm_up(console):
    progress = RunProgress(console, several=False)
    progress.progress(BASE, 0, 0, 1)
    assert [bar.description for bar in progress._bars.tasks] == ["warm-up"]


def wait_for(condition):
    """Until it holds, a minute at most."""
    ends = time.monotonic() + 60
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    assert condition()


@pytest.fixture
def piped(monkeypatch):
    """A console that is no terminal, lines every 50 ms on it, and what was written."""
    monkeypatch.setattr(progress_module, "EVERY_S", 0.05)
    out = io.StringIO()
    return Console(file=out, width=80), out


def test_where_there_is_no_terminal_a_line_now_and_then_says_how_far_it_is(piped):
    console, out = piped
    with CountBar(console, "configurations") as bar:
        bar(3, 12)
        wait_for(lambda: out.getvalue().count("\n") >= 2)
    assert re.fullmatch(r"(\[ {3}\d\.\d s\] configurations: 3 of 12\n)+", out.getvalue())


def test_what_cannot_be_counted_says_that_it_still_goes_on(piped):
    console, out = piped
    with CountBar(console, "replaying", counted=False):
        wait_for(lambda: "\n" in out.getvalue())
    assert re.fullmatch(r"(\[ {3}\d\.\d s\] replaying\n)+", out.getvalue())


def test_what_is_quick_says_nothing(piped, monkeypatch):
    console, out = piped
    monkeypatch.setattr(progress_module, "EVERY_S", 60)
    with CountBar(console, "configurations") as bar:
        bar(12, 12)
    assert out.getvalue() == ""


def test_a_long_trial_says_how_far_it_is(piped, monkeypatch):
    console, out = piped
    monkeypatch.setattr(progress_module, "EVERY_S", 60)
    progress = RunProgress(console, several=False)
    progress.progress(BASE, 1, 1, 4)
    assert out.getvalue() == ""
    monkeypatch.setattr(progress_module, "EVERY_S", 0)
    progress.progress(BASE, 1, 2, 4)
    monkeypatch.setattr(progress_module, "EVERY_S", 60)
    progress.progress(BASE, 1, 3, 4)
    assert re.fullmatch(r"\[ {3}\d\.\d s\] trial 1/2: 2 of 4 requests\n", out.getvalue())


@pytest.fixture
def read():
    """``read(terminal=True)``: what goes to the console for one large file."""

    def show(*, terminal):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=80, _environ={"TERM": "xterm"})
        with ReadingBar(console) as bar:
            bar(10**6, 10**9)
            bar(5 * 10**8, 10**9)
        return out.getvalue()

    return show


def test_what_takes_long_has_a_bar_on_a_terminal(read, monkeypatch):
    monkeypatch.setattr(progress_module, "SOON_S", 0)
    assert "0.5/1.0 GB" in read(terminal=True)


def test_elsewhere_a_line_now_and_then_says_how_far_it_is(read, monkeypatch):
    monkeypatch.setattr(progress_module, "SOON_S", 0)
    assert read(terminal=False) == ""
    monkeypatch.setattr(progress_module, "EVERY_S", 0)
    assert read(terminal=False).splitlines()[1] == "[   0.0 s] reading: 500 of 1,000 MB"


def test_what_is_read_quickly_has_no_bar(read):
    assert read(terminal=True) == ""


def test_a_file_that_is_read_whole_has_no_bar_any_more(monkeypatch):
    """What comes next may print, while other files are still to be read."""
    monkeypatch.setattr(progress_module, "SOON_S", 0)
    out = io.StringIO()
    bar = ReadingBar(Console(file=out, force_terminal=True, width=80, _environ={"TERM": "xterm"}))
    bar(10**9, 10**9)
    shown = out.getvalue()
    assert "1.0/1.0 GB" in shown
    assert shown.rstrip().endswith("\x1b[2K")  # the line is erased
