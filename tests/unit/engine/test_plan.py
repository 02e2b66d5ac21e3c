import errno
import os
from pathlib import Path

import pytest

from schedtrace.engine import plan
from schedtrace.engine.plan import Plan, both_fit, check
from schedtrace.engine.run_spec import RunSpec
from schedtrace.errors import RecordingError, SchedtraceError
from schedtrace.model.manifest import read_manifest


def spec(*engine_args, **fields):
    return RunSpec(engine_args=["--model", "tiny", *engine_args], **fields)


def test_a_plan_begins_as_a_manifest_of_its_own(tmp_path):
    plan = Plan(spec(trials=3), tmp_path, "x", ["schedtrace", "run"])
    plan.save("failed", "no memory")
    told = read_manifest(tmp_path)
    assert (told.status, told.error, told.label) == ("failed", "no memory", "x")
    assert (told.command, told.trials_asked, told.trials) == (["schedtrace", "run"], 3, [])


def test_a_manifest_that_cannot_be_written_is_one_line_and_leaves_no_part(tmp_path):
    plan = Plan(spec(), tmp_path / "gone", "x", [])
    with pytest.raises(RecordingError) as raised:
        plan.save("running")
    assert str(raised.value) == f"{tmp_path / 'gone'}: run.json cannot be written (No such file or directory)"
    assert raised.value.exit_code == 4


def test_a_full_disk_keeps_the_manifest_that_was_there(tmp_path, monkeypatch):
    plan = Plan(spec(), tmp_path, "x", [])
    plan.save("running")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RecordingError, match="No space left on device"):
        plan.save("finished")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert read_manifest(tmp_path).status == "running"


def test_a_plan_keeps_no_secret_of_its_command(tmp_path):
    plan = Plan(spec(), tmp_path, "x", ["schedtrace", "run", "--hf-token", "hf_x", "--api-key=y"])
    assert plan.manifest.command == ["schedtrace", "run", "--hf-token", "(hidden)", "--api-key=(hidden)"]


def test_a_sound_spec_passes_the_check():
    assert check(spec(prequeue=True)) is None
    assert check(spec(request_rate=5.0)) is None


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (RunSpec(engine_args=["--seed", "0"]), "no model given"),
        (spec(prequeue=True, request_rate=5.0), "--prequeue"),
        (spec(dataset="x.csv"), "x.csv"),
        (spec(dataset="gone.jsonl"), "gone.jsonl"),
    ],
)
def test_what_cannot_work_is_found_before_anything_is_started(run, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SchedtraceError, match=says):
        check(run)


@pytest.mark.parametrize(
    ("shares", "fit"),
    [
        ([[], []], False),
        ([["--gpu-memory-utilization", "0.4"], ["--gpu-memory-utilization=0.5"]], True),
        ([["--gpu-memory-utilization", "0.4"], []], False),
        ([["--gpu-memory-utilization", "0.9"], ["--gpu-memory-utilization", "0.05"]], True),
        ([["--gpu-memory-utilization", "0.9"], ["--gpu-memory-utilization", "0.0501"]], False),
        ([["--gpu_memory_utilization", "0.4"], ["--gpu-memory-utilization", "0.6"]], False),
        ([["--gpu-memory-utilization", "half"], ["--gpu-memory-utilization", "0.04"]], False),
    ],
)
def test_on_a_gpu_both_engines_fit_if_their_shares_do(tmp_path, monkeypatch, shares, fit):
    plans = [Plan(spec(*arguments), tmp_path, "x", []) for arguments in shares]
    monkeypatch.setattr(plan, "is_cpu_build", lambda: False)
    assert both_fit(plans) is fit
    monkeypatch.setattr(plan, "is_cpu_build", lambda: True)
    assert both_fit(plans) is True
