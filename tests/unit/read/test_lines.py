"""Lines of a trace: whole ones in chunks of any size, and the structs and columns that they become."""

import hashlib

import msgspec
import polars as pl
import pytest

from schedtrace.model import trace
from schedtrace.read import lines
from schedtrace.read.lines import ReadOptions, WholeLines, readable_struct
from schedtrace.read.tables import FOLDED, schema_of


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


STRUCTS = [
    trace.Step,
    trace.Arrival,
    trace.Finish,
    trace.Exit,
    trace.Preemption,
    trace.ScheduledRequest,
    trace.Output,
    trace.Events,
]


@pytest.mark.parametrize("struct", STRUCTS)
def test_a_schema_has_every_field_of_its_struct_in_their_order_and_polars_takes_it(struct):
    columns = [name for name in struct.__struct_fields__ if name not in FOLDED]
    assert list(schema_of(struct)) == columns
    assert pl.DataFrame(schema=schema_of(struct)).columns == columns


def test_numbers_texts_and_flags_keep_their_kind_with_or_without_none():
    expected = {
        "request_id": pl.String,
        "arrived_us": pl.Int64,
        "queued_us": pl.Int64,
        "prompt_tokens": pl.Int64,
        "max_tokens": pl.Int64,
        "priority": pl.Int64,
        "lora": pl.String,
        "streaming_update": pl.Boolean,
    }
    schema = schema_of(trace.Arrival)
    assert {name: schema[name] for name in expected} == expected


def test_literals_and_causes_are_texts():
    schema = schema_of(trace.Exit)
    assert {schema[name] for name in ("loop", "kind", "cause", "via")} == {pl.String}


def test_lists_of_structs_are_nested():
    assert schema_of(trace.Step)["preempted"] == pl.List(pl.Struct(schema_of(trace.Preemption)))


def test_free_form_dicts_are_no_columns():
    assert set(trace.Header.__struct_fields__) - set(schema_of(trace.Header)) == {
        "scheduler_config",
        "settings",
        "registered_causes",
    }


def test_a_reader_takes_words_that_it_does_not_know():
    read = msgspec.convert(
        {"loop": "aside", "kind": "pause", "cause": "x", "via": "guess"}, readable_struct(trace.Exit)
    )
    assert (read.loop, read.kind, read.via, read.count) == ("aside", "pause", "guess", 1)


@pytest.mark.parametrize("wrong", [10**18, -(10**18), 1.5, "1", None, True])
def test_a_reader_takes_no_number_that_is_none_or_too_large(wrong):
    row = {"request_id": "a", "computed_tokens": 10**18 - 1, "scheduled_tokens": 1}
    assert msgspec.convert(row, readable_struct(trace.ScheduledRequest)).computed_tokens == 10**18 - 1
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(row | {"computed_tokens": wrong}, readable_struct(trace.ScheduledRequest))
