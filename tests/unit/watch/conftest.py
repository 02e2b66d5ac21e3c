"""An engine that steps ten times a second under a fake clock, and a session that watches it."""

import time

import pytest

from tests.unit.watch.growing import Growing, session_of


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def growing(folder):
    return Growing(folder)


@pytest.fixture
def session(folder, growing):
    return session_of(folder, growing)


@pytest.fixture
def unjudged(folder, growing):
    """The same without verdicts, which take most of the time."""
    return session_of(folder, growing, judged=False)


@pytest.fixture
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()
