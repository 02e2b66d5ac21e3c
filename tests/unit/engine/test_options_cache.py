import os
import sys

import pytest

from schedtrace.engine import vllm_config
from schedtrace.engine.vllm_config import Option, cache_path, read_options, write_options

OPTIONS = [Option(names=[name]) for name in ("--model", "--max-num-seqs", "--max-model-len")]
OPTIONS += [Option(names=["--dtype"], values="+", choices=["a"], refuses=["word"])]


@pytest.fixture(autouse=True)
def vllm(tmp_path, monkeypatch):
    """A vLLM to be found, and a cache folder of one's own."""
    package = tmp_path / "site" / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "engine" / "arg_utils.py").write_text("x = 1")
    (package.parent / "vllm-1.0.dist-info").mkdir()
    (package.parent / "vllm-1.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return package


def test_what_was_written_is_read_again_by_its_user_alone(tmp_path):
    assert read_options() is None
    write_options(OPTIONS)
    assert read_options() == OPTIONS
    [file] = (tmp_path / "cache" / "schedtrace").iterdir()
    assert file == cache_path()
    assert file.name.startswith("vllm-options-1.0")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_what_stands_there_already_is_not_written_again():
    write_options(OPTIONS)
    before = cache_path().stat()
    write_options(OPTIONS)
    assert cache_path().stat().st_ino == before.st_ino


def test_another_vllm_has_another_cache(vllm, monkeypatch):
    paths = [cache_path()]
    source = vllm / "engine" / "arg_utils.py"
    dates = source.stat()
    source.write_text("x = 22")
    os.utime(source, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    paths.append(cache_path())
    source.touch()
    paths.append(cache_path())
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    paths.append(cache_path())
    monkeypatch.setattr(vllm_config, "_versions", lambda: ["2.0"])
    paths.append(cache_path())
    monkeypatch.setattr("sys.prefix", "/elsewhere")
    paths.append(cache_path())
    assert len(set(paths)) == 6


def test_a_damaged_cache_is_no_cache():
    write_options(OPTIONS)
    path = cache_path()
    whole = path.read_bytes()
    for content in (b"", b"{}", b"[1]", b"\xff", whole[:-1], whole.replace(b"--dtype", b"--dtypo")):
        path.write_bytes(content)
        assert read_options() is None
    path.write_bytes(whole)
    assert read_options() == OPTIONS


def test_every_byte_of_it_counts(monkeypatch):
    write_options(OPTIONS)
    path = cache_path()
    monkeypatch.setattr(vllm_config, "cache_path", lambda: path)  # to look for it takes 5 ms
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_options() in (None, OPTIONS)


@pytest.mark.parametrize("options", [[], OPTIONS[:2]])
def test_a_parser_without_vllms_options_is_not_kept(options):
    write_options(options)
    assert read_options() is None


def test_a_cache_that_cannot_be_written_is_not_missed(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_options(OPTIONS)
    assert read_options() is None


def test_a_full_disk_leaves_no_part(monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(vllm_config.Path, "replace", full)
    write_options(OPTIONS)
    assert list(cache_path().parent.iterdir()) == []


def test_without_vllm_there_is_none(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert cache_path() is None
    assert read_options() is None


def test_without_a_home_there_is_none(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless():
        raise RuntimeError

    monkeypatch.setattr(vllm_config.Path, "home", homeless)
    assert cache_path() is None
