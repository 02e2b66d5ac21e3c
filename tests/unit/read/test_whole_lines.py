import hashlib

import pytest

from schedtrace.errors import InputError
from schedtrace.read import lines
from schedtrace.read.lines import ReadOptions, WholeLines


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("content", [b"", b"a", b"\n", b"a\n", b"ab\n\ncd\nefghijk\n", b"ab\ncd\nrest"])
def test_chunks_of_any_size_give_the_same_lines_with_their_numbers(tmp_path, content, chunk_bytes):
    path = tmp_path / "file"
    path.write_bytes(content)
    read = WholeLines(path, ReadOptions(chunk_bytes=chunk_bytes))
    numbered = [(at + n, line) for at, chunk in read for n, line in enumerate(chunk)]
    *whole, rest = content.split(b"\n")
    assert numbered == list(enumerate(whole, start=1))
    assert read.cut_off == bool(rest)
    assert read.contents == {"file": (len(content), hashlib.blake2b(content, digest_size=16).hexdigest())}


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(InputError, match=r"gone: cannot be read \(No such file"):
        list(WholeLines(tmp_path / "gone"))


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100])
def test_a_line_without_end_is_cut_and_those_after_it_stay(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(lines, "LONGEST_LINE", 20)
    path = tmp_path / "file"
    path.write_bytes(b"a\n" + b"x" * 1000 + b"\nb\n" + b"y" * 1000)
    whole = WholeLines(path, ReadOptions(chunk_bytes=chunk_bytes))
    found = [line for _, chunk in whole for line in chunk]
    assert [line[:1] for line in found] == [b"a", b"x", b"b"]
    assert len(found[1]) <= 20 + 2 * chunk_bytes
    assert whole.cut_off
