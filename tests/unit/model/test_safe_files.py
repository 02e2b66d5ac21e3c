import os
from stat import S_IMODE

import pytest

from schedtrace.model import safe_files


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return S_IMODE(path.stat().st_mode)


def test_files_and_folders_are_the_owners_only_whatever_the_umask(tmp_path, umask):
    safe_files.make_folder(tmp_path / "above" / "run")
    assert mode(tmp_path / "above" / "run") == 0o700
    assert mode(tmp_path / "above") == 0o777 & ~umask
    safe_files.create(tmp_path / "created")
    safe_files.replace(tmp_path / "replaced", b"a")
    with safe_files.writable(tmp_path / "written") as file:
        file.write(b"b")
    assert {mode(tmp_path / name) for name in ("created", "replaced", "written")} == {0o600}


def test_what_is_replaced_becomes_private_and_links_are_not_followed(tmp_path):
    target = tmp_path / "mine"
    target.write_text("keep")
    for name, make in (("a", safe_files.create), ("b", lambda path: safe_files.replace(path, b"x"))):
        (tmp_path / name).symlink_to(target)
        make(tmp_path / name)
        assert not (tmp_path / name).is_symlink()
        assert mode(tmp_path / name) == 0o600
    assert target.read_text() == "keep"


def test_nothing_is_left_behind_where_replacing_fails(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        safe_files.replace(tmp_path / "folder", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        safe_files.replace(tmp_path / "pipe", b"x")
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_is_written_anew_is_not_the_one_that_a_link_names(tmp_path):
    target, link, loose = tmp_path / "mine", tmp_path / "link", tmp_path / "loose"
    target.write_text("keep")
    link.symlink_to(target)
    loose.symlink_to(tmp_path / "outside")
    for path in (link, loose):
        with safe_files.writable(path) as file:
            file.write(b"new")
        assert (path.is_symlink(), path.read_text(), mode(path)) == (False, "new", 0o600)
    assert target.read_text() == "keep"
    assert not (tmp_path / "outside").exists()


def test_what_grows_is_no_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        safe_files.appendable(tmp_path / "link")
    for text in (b"a", b"b"):
        with os.fdopen(safe_files.appendable(tmp_path / "file"), "ab") as file:
            file.write(text)
    assert ((tmp_path / "file").read_bytes(), mode(tmp_path / "file")) == (b"ab", 0o600)
    assert not (tmp_path / "outside").exists()
