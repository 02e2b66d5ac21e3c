import errno
import os

import pytest

from schedtrace.engine import plan as folder_module
from schedtrace.engine.plan import folder_of, make_folders
from schedtrace.errors import UsageError
from tests.makers import manifest, run_folder, step


def make_folder(output, name, *, force):
    folder = folder_of(output, name)
    make_folders([folder], force=force)
    return folder


def test_a_new_folder_is_made_with_its_parents(tmp_path):
    folder = make_folder(tmp_path / "a" / "b", "run", force=False)
    assert (folder, folder.is_dir()) == (tmp_path / "a" / "b" / "run", True)


def test_an_empty_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "run").mkdir()
    assert make_folder(tmp_path, "run", force=False) == tmp_path / "run"


@pytest.mark.parametrize(
    ("label", "name"), [("a b/c", "a_b_c"), ("x=1,y=2", "x=1_y=2"), ("v1.2+k-_", "v1.2+k-_"), ("ü", "ü")]
)
def test_a_label_becomes_one_folder_name(tmp_path, label, name):
    assert make_folder(tmp_path, label, force=False) == tmp_path / name


def test_a_folder_with_something_in_it_is_refused_without_force(tmp_path):
    run_folder(tmp_path / "run", step(0))
    with pytest.raises(UsageError, match=r"run exists: .*--force"):
        make_folder(tmp_path, "run", force=False)
    assert (tmp_path / "run" / "engine-0.jsonl").exists()


def test_force_empties_a_run_folder(tmp_path):
    run_folder(tmp_path / "run", step(0), about=manifest())
    (tmp_path / "run" / "vllm.log").touch()
    assert list(make_folder(tmp_path, "run", force=True).iterdir()) == []


def test_force_takes_a_run_that_recorded_nothing_for_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    assert list(make_folder(tmp_path, "run", force=True).iterdir()) == []


@pytest.mark.parametrize("name", ["thesis.tex", "engine.jsonl", "run.json.bak"])
def test_force_never_empties_a_folder_that_is_no_run(tmp_path, name):
    (tmp_path / "run").mkdir()
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


def test_force_never_empties_a_folder_of_runs(tmp_path):
    run_folder(tmp_path / "logs" / "one", step(0))
    with pytest.raises(UsageError, match="logs is no run folder"):
        make_folder(tmp_path, "logs", force=True)
    assert (tmp_path / "logs" / "one" / "engine-0.jsonl").exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made"):
        make_folder(tmp_path / "file", "run", force=False)


def test_no_folder_is_touched_if_one_of_them_cannot_be_made(tmp_path):
    run_folder(tmp_path / "old", step(0))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is no folder"):
        make_folders([tmp_path / "new", tmp_path / "old", tmp_path / "file"], force=True)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old" / "engine-0.jsonl").exists()


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_an_impossible_name_is_told(tmp_path, name):
    if "\0" in name:
        assert folder_of(tmp_path, name).name == "a_b"
        return
    with pytest.raises(UsageError, match=r"cannot be made \(File name too long\)"):
        make_folder(tmp_path, name, force=False)


def test_a_folder_that_may_not_be_written_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module.os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="run: cannot be written to; give another --output"):
        make_folder(tmp_path, "run", force=False)


def test_a_folder_that_may_not_be_looked_into_is_told(tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(folder_module.Path, "exists", denied)
    with pytest.raises(UsageError, match=r"run: cannot be made \(Permission denied\)"):
        make_folder(tmp_path, "run", force=False)
