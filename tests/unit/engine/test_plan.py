import errno
import os
from pathlib import Path

import pytest

from schedtrace.engine import plan
from schedtrace.engine.plan import Plan, both_fit, check_run, folder_of, make_folders
from schedtrace.engine.run_spec import RunSpec
from schedtrace.errors import RecordingError, SchedtraceError, UsageError
from schedtrace.model.manifest import read_manifest
from tests.makers import run_folder, step

pytestmark = pytest.mark.vllm  # commands that look for vLLM before they begin


def spec(*engine_args, **fields):
    return RunSpec(engine_args=["--model", "tiny", *engine_args], **fields)


def test_a_plan_begins_as_a_manifest_of_its_own(tmp_path):
    plan = Plan(spec(trials=3), tmp_path, "x", ["schedtrace", "run"])
    plan.save_manifest("failed", "no memory")
    told = read_manifest(tmp_path)
    assert (told.status, told.error, told.label) == ("failed", "no memory", "x")
    assert (told.command, told.trials_asked, told.trials) == (["schedtrace", "run"], 3, [])


def test_a_manifest_that_cannot_be_written_is_one_line_and_leaves_no_part(tmp_path):
    plan = Plan(spec(), tmp_path / "gone", "x", [])
    with pytest.raises(RecordingError) as raised:
        plan.save_manifest("running")
    assert str(raised.value) == f"{tmp_path / 'gone'}: run.json cannot be written (No such file or directory)"
    assert raised.value.exit_code == 4


def test_a_full_disk_keeps_the_manifest_that_was_there(tmp_path, monkeypatch):
    plan = Plan(spec(), tmp_path, "x", [])
    plan.save_manifest("running")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RecordingError, match="No space left on device"):
        plan.save_manifest("finished")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert read_manifest(tmp_path).status == "running"


def test_a_plan_keeps_no_secret_of_its_command(tmp_path):
    plan = Plan(spec(), tmp_path, "x", ["schedtrace", "run", "--hf-token", "hf_x", "--api-key=y"])
    assert plan.manifest.command == ["schedtrace", "run", "--hf-token", "(hidden)", "--api-key=(hidden)"]


def test_a_sound_spec_passes_the_check():
    assert check_run(spec(prequeue=True)) == []
    assert check_run(spec(request_rate=5.0)) == []


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
        check_run(run)


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


def make_folder(output, name, *, force):
    folder = folder_of(output, name)
    make_folders([folder], force=force)
    return folder


@pytest.mark.parametrize(
    ("label", "name"),
    [("a b/c", "a_b_c"), ("x=1,y=2", "x=1_y=2"), ("v1.2+k-_", "v1.2+k-_"), ("ü", "ü"), ("a\0b", "a_b")],
)
def test_a_label_becomes_one_new_folder_or_one_that_is_empty(tmp_path, label, name):
    for _ in range(2):
        folder = make_folder(tmp_path / "a" / "b", label, force=False)
        assert (folder, folder.is_dir()) == (tmp_path / "a" / "b" / name, True)


def test_a_folder_with_something_in_it_is_refused_without_force(tmp_path):
    run_folder(tmp_path / "run", step(0))
    with pytest.raises(UsageError, match=r"run exists: .*--force"):
        make_folder(tmp_path, "run", force=False)
    assert (tmp_path / "run" / "engine-0.jsonl").exists()


@pytest.mark.parametrize("name", ["engine-0.jsonl", "run.json"])
def test_force_empties_a_run_folder_whether_or_not_it_recorded(tmp_path, name):
    (tmp_path / "run").mkdir()
    for file in (name, "vllm.log"):
        (tmp_path / "run" / file).touch()
    assert list(make_folder(tmp_path, "run", force=True).iterdir()) == []


@pytest.mark.parametrize("name", ["thesis.tex", "engine.jsonl", "run.json.bak", "one/engine-0.jsonl"])
def test_force_never_empties_a_folder_that_is_no_run(tmp_path, name):
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_text("precious")
    with pytest.raises(UsageError, match="run is no run folder"):
        make_folder(tmp_path, "run", force=True)
    assert (tmp_path / "run" / name).read_text() == "precious"


@pytest.mark.parametrize("force", [True, False])
def test_a_file_or_a_link_of_that_name_is_no_folder(tmp_path, force):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(run_folder(tmp_path / "real", step(0)))
    for name in ("file", "link"):
        with pytest.raises(UsageError, match=f"{name} is no folder"):
            make_folder(tmp_path, name, force=force)
    assert (tmp_path / "real" / "engine-0.jsonl").exists()


def test_no_folder_is_touched_if_one_of_them_cannot_be_made(tmp_path):
    run_folder(tmp_path / "old", step(0))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is no folder"):
        make_folders([tmp_path / "new", tmp_path / "old", tmp_path / "file"], force=True)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old" / "engine-0.jsonl").exists()


def denied(*_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize(
    ("name", "patched", "says"),
    [
        ("file/run", {}, "cannot be made"),
        ("a" * 300, {}, r"cannot be made \(File name too long\)"),
        ("run", {"os.access": lambda *_: False}, "run: cannot be written to; give another --output"),
        ("run", {"Path.exists": denied}, r"run: cannot be made \(Permission denied\)"),
    ],
)
def test_a_folder_that_cannot_be_made_or_used_is_told(tmp_path, monkeypatch, name, patched, says):
    (tmp_path / "file").touch()
    for function, replaced in patched.items():
        monkeypatch.setattr(f"schedtrace.engine.plan.{function}", replaced)
    with pytest.raises(UsageError, match=says):
        make_folders([tmp_path / name], force=False)
