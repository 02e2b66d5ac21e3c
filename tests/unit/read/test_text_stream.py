"""Text in every packing: gzip, zstd, JSON log lines, lines that a container runtime split, escapes."""

import gzip
import io
import json
import tracemalloc

import pytest
import zstandard

from schedtrace.errors import InputError
from schedtrace.read import text_stream
from schedtrace.read.text_stream import LatestLines, marked_lines, spooled, text_lines, unwrapped

TEXT = "first\nsecond [mark]\nthird\n"


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "x"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(text_stream, "_BLOCK", 50)


@pytest.mark.parametrize(
    "pack",
    [
        str.encode,
        lambda text: gzip.compress(text.encode()),
        lambda text: gzip.compress(text[:8].encode()) + gzip.compress(text[8:].encode()),
        lambda text: zstandard.compress(text.encode()),
        lambda text: zstandard.compress(text[:8].encode()) + zstandard.compress(text[8:].encode()),
    ],
)
def test_packed_text_is_read_like_unwrapped(file, pack):
    path = file(pack(TEXT))
    assert list(text_lines(path)) == [(1, "first"), (2, "second [mark]"), (3, "third")]
    assert list(marked_lines(path, (b"[mark]",))) == [(2, "second [mark]")]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_packed_file_that_is_cut_off_ends_where_it_is_cut(file, pack):
    text = "".join(f"line {number} {number * 7919 % 10_007}\n" for number in range(20_000))
    packed = pack(text.encode())
    lines = list(text_lines(file(packed[: len(packed) * 3 // 4])))
    assert 100 < len(lines) < 20_000
    whole = text.split("\n")
    assert [line for _, line in lines[:-1]] == whole[: len(lines) - 1]


@pytest.mark.parametrize("content", [b"\x1f\x8bnonsense", b"\x28\xb5\x2f\xfdnonsense"])
def test_broken_packed_data_are_refused(file, content):
    with pytest.raises(InputError, match="broken compressed data"):
        list(text_lines(file(content)))


@pytest.mark.parametrize(
    "line",
    [
        '{"log": "hello [mark]\\n", "stream": "stdout"}',
        '{"message": "hello [mark]", "level": "info"}',
        '{"ts": 1, "msg": "hello [mark]"}',
        '{"MESSAGE": "\\u001b[0;36mhello\\u001b[0m [mark]"}',
        "\x1b[0;36mhello\x1b[0m [mark]",
        "\x1b[01;31m\x1b[Khello\x1b[m\x1b[K [mark]",
        "\x1b]0;title\x07hello [mark]",
    ],
)
def test_a_line_is_unwrapped(file, line):
    assert unwrapped(line.encode()) == "hello [mark]"
    assert list(marked_lines(file(f"x\n{line}\n"), (b"[mark]",))) == [(2, "hello [mark]")]


@pytest.mark.parametrize(
    "line", ['{"a": 1}', '{"message": 1}', '{"message"', "{'token_budget': 1}", '{"message": ""}']
)
def test_a_line_without_a_message_stays(line):
    assert unwrapped(line.encode()) == line


def test_lines_that_cri_split_are_joined_by_stream(file):
    stamp = "2026-08-31T17:43:37.867962742Z"
    content = (
        f"{stamp} stderr P one [ma\n{stamp} stdout F other\n{stamp} stderr P rk]\n{stamp} stderr F  end\n"
        f"{stamp} stdout P never finished\n"
    )
    assert list(marked_lines(file(content), (b"[mark]",))) == [(1, f"{stamp} stderr P one [mark] end")]
    assert [number for number, _ in text_lines(file(content))] == [2, 1, 5]


def test_messages_that_docker_split_are_joined(file):
    begin = "x" * (16 * 1024 - 3) + "[ma"
    lines = [
        json.dumps({"log": text, "stream": "stderr"}, separators=(",", ":"))
        for text in (begin, "rk] end\n", "next\n")
    ]
    [(number, line)] = marked_lines(file("\n".join(lines)), (b"[mark]",))
    assert (number, line) == (1, begin + "rk] end")


def test_a_docker_line_with_broken_characters_stays(file):
    [(_, line)] = text_lines(file(b'{"log":"\xb6\\n","stream":"stdout"}'))
    assert "\ufffd" in line


def test_short_messages_without_a_line_break_are_not_joined(file):
    lines = [json.dumps({"log": text}, separators=(",", ":")) for text in ("a", "b", "c")]
    assert [line for _, line in text_lines(file("\n".join(lines)))] == ["a", "b", "c"]


@pytest.mark.usefixtures("small_blocks")
def test_only_the_latest_lines_of_dense_blocks_are_yielded(file):
    lines = [f"line {number:03} [mark]" for number in range(60)]
    lines[20] += " [other]"
    latest = LatestLines(b"[mark]", 8)
    shown = list(marked_lines(file("\n".join(lines)), (b"[mark]", b"[other]"), latest))
    numbers = [number for number, _ in shown]
    assert [text for _, text in shown] == [lines[number - 1] for number in numbers]
    assert numbers == sorted(numbers)
    assert 21 in numbers
    assert numbers[-8:] == list(range(53, 61))
    assert len(numbers) + latest.left_out == 60
    assert len(numbers) < 40


@pytest.mark.usefixtures("small_blocks")
def test_lines_that_are_few_among_others_are_all_yielded(file):
    lines = [f"line {number:03}{' [mark]' * (number % 5 == 0)}" for number in range(100)]
    latest = LatestLines(b"[mark]", 2)
    assert len(list(marked_lines(file("\n".join(lines)), (b"[mark]", b"[other]"), latest))) == 20
    assert latest.left_out == 0


@pytest.mark.usefixtures("small_blocks")
def test_marked_lines_keep_their_numbers_across_blocks(file):
    lines = [f"line {number}{' [mark]' * (number % 7 == 0)}" for number in range(100)]
    shown = list(marked_lines(file("\n".join(lines)), (b"[mark]", b"line 14")))
    assert shown == [(number + 1, lines[number]) for number in range(0, 100, 7)]


def test_noise_costs_no_memory(file):
    path = file(b"noise without end " * 3_000_000 + b"\n" + b"a [mark]\n" * 10)
    tracemalloc.start()
    assert len(list(marked_lines(path, (b"[mark]",)))) == 10
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20


def test_a_stream_is_spooled_up_to_a_limit(tmp_path, monkeypatch):
    assert spooled(io.BytesIO(b"abc"), tmp_path).read_bytes() == b"abc"
    monkeypatch.setattr(text_stream, "MOST_PIPED", 2)
    with pytest.raises(InputError, match="larger than 2 bytes"):
        spooled(io.BytesIO(b"abc"), tmp_path)


@pytest.mark.usefixtures("small_blocks")
def test_a_block_is_searched_once_for_all_that_read_it(file, monkeypatch):
    lines = [f"line {number}{' [mark]' * (number % 7 == 0)}" for number in range(100)]
    path = file("\n".join(lines))
    blocks = [found for _, found in text_stream.searched_blocks(path, (b"[mark]", b"[other]"))]
    assert sum(found.lines for found in blocks) == 99
    searches = []
    search = text_stream._searched
    monkeypatch.setattr(
        text_stream, "_searched", lambda block, markers: (searches.append(block), search(block, markers))[1]
    )
    assert len(list(marked_lines(path, (b"[mark]",)))) == 15
    assert len(searches) == 1  # the first block only
    searches.clear()
    assert len(list(marked_lines(path, (b"[mark]", b"new")))) == 15
    assert len(searches) == len(blocks)  # a marker that was not searched for
    with path.open("a") as appended:
        appended.write(" [mark]\n")
    assert len(list(marked_lines(path, (b"[mark]",)))) == 16
