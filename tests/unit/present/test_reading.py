import io

import pytest
from rich.console import Console

from schedtrace.present import progress
from schedtrace.present.progress import ReadingBar


@pytest.fixture
def shown():
    """``shown(terminal=True)``: what goes to the console for one large file."""

    def show(*, terminal):
        out = io.StringIO()
        with ReadingBar(
            Console(file=out, force_terminal=terminal, width=80, _environ={"TERM": "xterm"})
        ) as bar:
            bar(10**6, 10**9)
            bar(5 * 10**8, 10**9)
        return out.getvalue()

    return show


def test_what_takes_long_has_a_bar_on_a_terminal(shown, monkeypatch):
    monkeypatch.setattr(progress, "SOON_S", 0)
    assert "0.5/1.0 GB" in shown(terminal=True)


def test_elsewhere_a_line_now_and_then_says_how_far_it_is(shown, monkeypatch):
    monkeypatch.setattr(progress, "SOON_S", 0)
    assert shown(terminal=False) == ""
    monkeypatch.setattr(progress, "EVERY_S", 0)
    assert shown(terminal=False).splitlines()[1] == "[   0.0 s] reading: 500 of 1,000 MB"


def test_what_is_quick_has_none(shown):
    assert shown(terminal=True) == ""


def test_a_file_that_is_read_whole_has_no_bar_any_more(monkeypatch):
    """What comes next may print, while other files are still to be read."""
    monkeypatch.setattr(progress, "SOON_S", 0)
    out = io.StringIO()
    bar = ReadingBar(Console(file=out, force_terminal=True, width=80, _environ={"TERM": "xterm"}))
    bar(10**9, 10**9)
    shown = out.getvalue()
    assert "1.0/1.0 GB" in shown
    assert shown.rstrip().endswith("\x1b[2K")  # the line is erased
