"""Old recordings go, the oldest first; what may live, or is not provably schedtrace's, stays."""

import os
import platform
import time

import msgspec
import pytest

from schedtrace.record import run_folders

GONE = 4_000_000
"""No process has such a number (``pid_max`` is 2**22 at most)."""
HOUR_S = 3600


@pytest.fixture
def recorded(tmp_path):
    def make(name, *, size=1000, age_s=HOUR_S, status="attached", host=None, more=(), parent=tmp_path):
        folder = parent / name
        folder.mkdir(parents=True)
        manifest = {"schedtrace_version": "1", "status": status, "host": host or platform.node()}
        (folder / "run.json").write_bytes(msgspec.json.encode(manifest))
        (folder / "engine-0.000000.jsonl.zst").write_bytes(b"x" * size)
        for other in more:
            (folder / other).write_text("mine")
        for path in (*folder.iterdir(), folder):
            os.utime(path, (time.time() - age_s,) * 2)
        return folder

    return make


def named(number, pid=GONE + 1):
    return f"202601{number:02}-120000-tiny-{pid}"


def test_the_oldest_go_until_all_together_take_no_more(recorded):
    folders = [recorded(named(day), age_s=HOUR_S * (10 - day)) for day in range(1, 6)]
    current = recorded(named(9), age_s=0)
    run_folders._remove(current, 4_000)
    assert [folder.exists() for folder in (*folders, current)] == [False, False, False, True, True, True]


def test_a_process_that_began_after_the_last_write_is_no_recorder(recorded, monkeypatch):
    """In a container every server is process 1."""
    folder, current = recorded(named(1, pid=1)), recorded(named(9), age_s=0)
    monkeypatch.setattr(run_folders, "age_s", {1: HOUR_S + 10}.get)
    run_folders._remove(current, 0)
    assert folder.exists()
    monkeypatch.setattr(run_folders, "age_s", {1: HOUR_S - 100}.get)
    run_folders._remove(current, 0)
    assert not folder.exists()


def test_recordings_elsewhere_than_in_the_folder_that_is_bounded_stay(recorded, monkeypatch, tmp_path):
    folder, current = recorded(named(1)), recorded(named(9), age_s=0)
    monkeypatch.setenv("SCHEDTRACE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv(run_folders.DIR_MAX, "1M")
    monkeypatch.setattr(run_folders, "_remove", lambda *_: pytest.fail("it was looked at"))
    run_folders.remove_old_runs(current)
    assert folder.exists()


def test_what_is_not_provably_an_ended_recording_stays(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folders, "age_s", {os.getpid(): 10 * HOUR_S}.get)
    current = recorded(named(30), age_s=0)
    kept = [
        recorded(named(1, os.getpid())),
        recorded(f"{named(2, os.getpid())}-2"),
        recorded(named(3), age_s=60),
        recorded(named(4), host="another"),
        recorded(named(5), status="finished"),
        recorded(named(6), more=["notes.txt"]),
        recorded("my-own-run"),
        recorded(f"{current.name}-120000-stall-engine"),
    ]
    elsewhere = recorded("real", parent=tmp_path / "elsewhere")
    (tmp_path / named(7)).symlink_to(elsewhere)
    (tmp_path / named(8)).mkdir()
    run_folders._remove(current, 0)
    assert all(folder.exists() for folder in (*kept, elsewhere, current, tmp_path / named(8)))


def test_a_snapshot_of_an_ended_server_goes_as_well(recorded):
    current, snapshot = recorded(named(9), age_s=0), recorded(f"{named(1)}-130000-stall-engine")
    run_folders._remove(current, 0)
    assert not snapshot.exists()


@pytest.mark.parametrize(("value", "works"), [("off", False), ("much", False), ("1K", True), ("", True)])
def test_the_variable(recorded, monkeypatch, warnings, tmp_path, value, works):
    begun = []
    monkeypatch.setenv("SCHEDTRACE_DIR", str(tmp_path))
    monkeypatch.setenv(run_folders.DIR_MAX, value)
    monkeypatch.setattr(run_folders, "_remove", lambda _, most: begun.append(most))
    run_folders.remove_old_runs(recorded(named(1)))
    for thread in [one for one in run_folders.threading.enumerate() if one.name == "schedtrace-old-runs"]:
        thread.join(5)
    assert bool(begun) is works
    assert any("expected a size" in line for line in warnings) is (value == "much")
