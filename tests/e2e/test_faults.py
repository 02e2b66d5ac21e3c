"""Disks that are full, slow or gone under a real run, and wrong arguments: the truth, in time."""

import os
import re
import threading
import time

import pytest

from schedtrace.read.trace import read_trace
from tests.disks import small_disk
from tests.e2e.conftest import MODEL, REPO, run_options, schedtrace, write_plugin

BUSY = {"input_len": 64, "output_len": 64, "num_prompts": 16, "trials": 8, "lines": "full"}
BUSY |= {"executor": "simulated", "gpu": "h100"}  # the engine core records, and needs no worker for it


@pytest.fixture
def disk(tmp_path):
    """A disk with room for vLLM's log and a few trials."""
    with small_disk(tmp_path / "disk", 600) as folder:
        yield folder


def once(condition, deed):
    """Do something, in a thread, as soon as ``condition`` holds."""

    def wait():
        until = time.monotonic() + 120
        while not condition() and time.monotonic() < until:
            time.sleep(0.02)
        deed()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_disk_that_fills_up_ends_the_run_with_4_and_how_far_it_came(disk, workplace):
    ended = schedtrace("run", *run_options(label="full", output=disk, **BUSY), cwd=workplace)
    path = disk / "full" / "engine-0.jsonl"
    assert (ended.code, ended.out) == (4, "")
    assert "Traceback" not in ended.err
    *_, fact, advice = ended.err.splitlines()
    told = re.fullmatch(
        rf"schedtrace: recording to {path} stopped: the disk is full; recorded: steps 0 to (\d+), "
        r"up to trial (\d) of 8; missing: the rest of trial (\d)(?: and trials? .*8)?",
        fact,
    )
    assert told, fact
    assert advice.startswith("make room or choose another disk with --output, and run again; ")
    last = read_trace(path).steps.row(-1, named=True)
    assert (last["step"], last["trial"]) == (int(told[1]), int(told[2]))
    read = schedtrace("analyze", path.parent, "--format", "json", cwd=workplace)
    (run,) = read.json()["runs"]
    cut = run["trials"][-1]  # by chance the disk was full just when the last of its requests had ended
    assert cut["complete"] == (cut["requests_finished"] == BUSY["num_prompts"])
    assert "not closed" in " ".join(problem["text"] for problem in run["problems"])


def test_a_run_folder_that_is_removed_ends_the_run_with_4_and_one_line(workplace):
    folder = workplace / "logs" / "removed"
    about = folder / "run.json"
    gone = folder.with_name("gone")  # removed file by file it stays, if one is written meanwhile
    removing = once(lambda: about.exists() and '"trial"' in about.read_text(), lambda: folder.rename(gone))
    options = {**BUSY, "output_len": 200}
    ended = schedtrace("run", *run_options(label="removed", **options), cwd=workplace)
    removing.join()
    assert (ended.code, ended.out) == (4, "")
    assert "Traceback" not in ended.err
    last = ended.err.splitlines()[-1]
    fact = r"schedtrace: logs/removed was removed while the run wrote to it; "
    assert re.fullmatch(fact + r"trials? 1( to \d)? ran and left no record: run it again", last), last
    assert not folder.exists()


def test_a_disk_too_slow_for_the_end_of_the_trace_is_no_success(workplace, tmp_path, monkeypatch):
    write_plugin(tmp_path, "slow_disk")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{REPO}")
    options = {**BUSY, "trials": 1}
    ended = schedtrace("run", *run_options(label="slow", **options), cwd=workplace)
    assert (ended.code, ended.out) == (4, "")
    assert ended.err.splitlines()[-2] == (
        "schedtrace: recording to logs/slow/engine-0.jsonl stopped: the engine ended before the last steps "
        "were on disk; no step was recorded; missing: trial 1"
    )


def test_a_wrong_option_imports_vllm_the_first_time_only(workplace, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []
    for _ in range(2):
        ended = schedtrace("run", "--model", MODEL, "--label", "bad", "--max_num_seqz", "4", cwd=workplace)
        assert ended.code == 2
        assert ended.err.splitlines()[-1] == (
            "schedtrace: unknown option --max-num-seqz; did you mean --max-num-seqs?"
        )
        assert not (workplace / "logs" / "bad").exists()
        seen.append("importing vLLM" in ended.err)
    assert seen == [True, False]
