from dataclasses import replace

import pytest

from schedtrace.errors import InputError, UsageError
from schedtrace.step_times.constants import Constants
from schedtrace.whatif import sweep
from schedtrace.whatif.replays import RecordedEngine
from schedtrace.whatif.sweep import SweepLog, digest, key
from tests.makers import header
from tests.unit.whatif.conftest import a_load, an_outcome


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    monkeypatch.setattr(sweep, "required_vllm_version", lambda: "0.32.0")


def test_outcomes_are_read_back(tmp_path):
    outcomes = [an_outcome("a", {"max_num_seqs": 4}), an_outcome("b", refused="why", tpot_ms=[None, 1.5])]
    log = SweepLog(tmp_path / "new" / "folder")
    for outcome in outcomes:
        log.add(outcome)
    again = SweepLog(tmp_path / "new" / "folder")
    assert list(again.finished.values()) == outcomes == list(log.finished.values())
    assert again.path.stat().st_mode & 0o777 == 0o600


def test_a_cut_line_is_dropped_and_the_next_one_is_whole(tmp_path):
    log = SweepLog(tmp_path)
    log.add(an_outcome("a"))
    with log.path.open("ab") as file:
        file.write(b'{"key":"b","cha')
    log = SweepLog(tmp_path)
    log.add(an_outcome("c"))
    assert list(SweepLog(tmp_path).finished) == ["a", "c"]


def test_another_sort_of_line_is_named(tmp_path):
    SweepLog(tmp_path).add(an_outcome("a"))
    with (tmp_path / "sweep.jsonl").open("ab") as file:
        file.write(b'{"no":"key"}\n')
    with pytest.raises(InputError, match=r"sweep\.jsonl:2: not a line of a sweep"):
        SweepLog(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/out: Not a directory"):
        SweepLog(tmp_path / "file" / "out")


def test_the_order_of_changes_does_not_matter():
    assert key("d", {"a": 1, "b": 2}) == key("d", {"b": 2, "a": 1})
    assert len({key("d", {"a": 1}), key("e", {"a": 1}), key("d", {"a": 2}), key("d", {})}) == 4


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"loads": [a_load(requests=5)]}, id="load"),
        pytest.param({"loads": [replace(a_load(), prefix_block=16)]}, id="prefix block"),
        pytest.param({"engine": RecordedEngine(header(), Constants(1.0))}, id="step times"),
        pytest.param({"engine": RecordedEngine(header(token_budget=1), Constants())}, id="engine"),
        pytest.param({"keep_prefix_cache": True}, id="prefix cache"),
        pytest.param({"warmups": 1}, id="warm-up"),
    ],
)
def test_whatever_decides_an_outcome_is_in_the_digest(work, changed):
    assert digest(work) == digest(replace(work, loads=[a_load("another name")])) == digest(work.portable())
    assert digest(replace(work, **changed)) != digest(work)


@pytest.mark.parametrize("name", ["required_vllm_version", "schedtrace"])
def test_another_version_replays_anew(work, monkeypatch, name):
    before = digest(work)
    if name == "schedtrace":
        monkeypatch.setattr(sweep, "__version__", "9")
    else:
        monkeypatch.setattr(sweep, name, lambda: "9")
    assert digest(work) != before
