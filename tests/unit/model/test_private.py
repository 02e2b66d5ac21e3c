import os
from stat import S_IMODE

import pytest

from schedtrace.model import private


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return S_IMODE(path.stat().st_mode)


def test_files_and_folders_are_the_owners_only_whatever_the_umask(tmp_path, umask):
    private.make_folder(tmp_path / "above" / "run")
    assert mode(tmp_path / "above" / "run") == 0o700
    assert mode(tmp_path / "above") == 0o777 & ~umask
    private.create(tmp_path / "created")
    private.replace(tmp_path / "replaced", b"a")
    with private.writable(tmp_path / "written") as file:
        file.write(b"b")
    assert {mode(tmp_path / name) for name in ("created", "replaced", "written")} == {0o600}


def test_what_is_replaced_becomes_private_and_links_are_not_followed(tmp_path):
    target = tmp_path / "mine"
    target.write_text("keep")
    for name, make in (("a", private.create), ("b", lambda path: private.replace(path, b"x"))):
        (tmp_path / name).symlink_to(target)
        make(tmp_path / name)
        assert not (tmp_path / name).is_symlink()
        assert mode(tmp_path / name) == 0o600
    assert target.read_text() == "keep"


def test_nothing_is_left_behind_where_replacing_fails(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        private.replace(tmp_path / "folder", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        private.replace(tmp_path / "pipe", b"x")
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 1
