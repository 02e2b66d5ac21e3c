"""The columns that the page draws: steps as rows, requests' lives, sentences."""

import base64
import zlib

import polars as pl
import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Preemption
from schedtrace.present.report import data
from schedtrace.present.report.data import (
    BY_STEP,
    FIRST_CAUSE,
    STATES,
    Named,
    TimelineChart,
    lives_of,
    merged_steps,
)
from schedtrace.present.report.packed import Packed
from schedtrace.present.report.step_sentences import NOT_DRAWN
from schedtrace.timeline.per_step import CHART_SCHEMA, per_step
from tests.makers import arrival, finish, step


def test_columns_of_an_engine(view_of, unpacked):
    refused = Exit("waiting", "break", Cause.KV_BLOCKS, "b", 900, blocks_needed=7, blocks_free=99)
    timeline = view_of(
        step(0, got={"a": 100}, new="a", arrived=[arrival("a", 0, 0)], prefill_tokens=100),
        step(
            1, got={"a": 1}, waiting=1, ended=refused, arrived=[arrival("b", 9_000, 9_500)], decode_tokens=1
        ),
        step(2, got={"a": 1}, preempted=[Preemption("a", 101, "gone", 1)], decode_tokens=1),
        step(3, got={"a": 1, "b": 5}, new="b", finished=[finish(name, finished_us=35_000) for name in "ab"]),
    )
    chart = TimelineChart()
    chart.add_engine(timeline, run=0, offset_us=1_000, named=Named())
    columns = unpacked(chart.packed)
    assert columns["0.gap"] == [1_000, 9_000, 9_000, 9_000]
    assert columns["0.length"] == [1_000] * 4
    assert columns["0.decode_tokens"][1:3] == [1, 1]
    assert columns["0.preempted"] == [0, 0, 1, 0]
    kv, next_step = chart.causes.index("kv_blocks"), chart.causes.index("next_step")
    assert columns["0.cause"] == [-1, kv, -1, -1]
    assert columns["0.ids"] == ["a", "b"]
    kinds = [(STATES[kind % len(STATES)], kind // len(STATES)) for kind in columns["0.kind"]]
    of_b = kinds[columns["0.pieces"][0] :]
    assert of_b[:3] == [
        ("front_end", 0),
        ("waiting", next_step + FIRST_CAUSE),
        ("waiting", BY_STEP),
    ]
    assert columns["0.first"] == [1_000, 10_000]
    at = columns["0.stops.step"].index(1)
    assert [columns[f"0.stops.{name}"][at] for name in ("needed", "free", "left", "named")] == [7, 1, 99, 1]
    assert columns["0.stops.request"] == [1]
    assert (columns["0.preempted.victim"], columns["0.preempted.for"]) == ([0], [NOT_DRAWN])


def queue():
    """``b`` waits through a step that refused for KV blocks, then one for seats, then one for KV blocks."""
    refused = [Cause.KV_BLOCKS, Cause.MAX_NUM_SEQS, Cause.KV_BLOCKS]
    return [
        step(0, got={"a": 1}, new="a", arrived=[arrival("a", 0, 0)]),
        *(
            step(
                at,
                got={"a": 1},
                waiting=1,
                ended=cause,
                arrived=[arrival("b", 9_000, 9_500)] if at == 1 else [],
            )
            for at, cause in enumerate(refused, 1)
        ),
        step(4, got={"a": 1, "b": 5}, new="b", finished=[finish(name, finished_us=45_000) for name in "ab"]),
    ]


def test_a_wait_with_the_causes_of_its_steps_is_one_piece(view_of):
    timeline = view_of(*queue())
    shown, pieces = lives_of(timeline, per_step(timeline), [], 1)
    assert shown.select("request_id", "pieces").rows() == [("a", 1), ("b", 4)]
    own = pieces.filter(request_id="b").select("state", "by_step", "begin_us", "end_us")
    assert own.rows() == [
        ("front_end", False, 9_000, 9_500),
        ("waiting", False, 9_500, 10_000),
        ("waiting", True, 10_000, 40_000),
        ("prefill", False, 40_000, 45_000),
    ]


def test_a_sample_is_even_and_keeps_what_is_named(view_of, monkeypatch):
    monkeypatch.setattr(data, "MOST_REQUESTS", 2)
    arrivals = [arrival(name, at, at) for at, name in enumerate("abcdef")]
    timeline = view_of(step(0, got=dict.fromkeys("abcdef", 1), new="abcdef", start=10, arrived=arrivals))
    shown, _ = lives_of(timeline, per_step(timeline), ["b"], 1)
    assert shown["request_id"].to_list() == ["a", "b", "d"]


def steps(count, **columns):
    """Steps 10 us apart, each with 1 token of 10 decoded, and what is given of others."""
    given = {name: [0] * count for name in CHART_SCHEMA} | {
        "step": list(range(count)),
        "begin_us": list(range(0, 10 * count, 10)),
        "end_us": list(range(9, 10 * count + 9, 10)),
        "decode_tokens": [1] * count,
        "token_budget": [10] * count,
        "cause": [None] * count,
        **columns,
    }
    return pl.DataFrame(given, schema=CHART_SCHEMA)


def test_few_steps_stay_single():
    found = merged_steps(steps(4), [], 4)
    assert found["count"].to_list() == [1, 1, 1, 1]
    assert found.columns == [*CHART_SCHEMA, "offered_tokens", "count"]


def test_many_steps_are_summed_and_peaks_kept():
    found = merged_steps(steps(6, waiting=[0, 5, 0, 1, 2, 0], cause=["a", "a", "b", "b", None, "b"]), [], 2)
    assert found.select(
        "step", "count", "begin_us", "end_us", "decode_tokens", "waiting", "cause"
    ).rows() == [
        (0, 3, 0, 29, 3, 5, "a"),
        (3, 3, 30, 59, 3, 2, "b"),
    ]


def test_the_budget_of_steps_that_scheduled_nothing_was_not_offered():
    given = steps(4, requests=[1, 0, 0, 2], token_budget=[10, 10, 10, 7])
    assert merged_steps(given, [], 4)["offered_tokens"].to_list() == [10, 0, 0, 7]
    assert merged_steps(given, [], 2).select("token_budget", "offered_tokens").rows() == [(20, 10), (17, 7)]


def test_a_row_ends_with_its_trial():
    found = merged_steps(steps(6, trial=[1, 1, 1, 1, 2, 2]), [], 2)
    assert found.select("step", "count", "trial").rows() == [(0, 3, 1), (3, 1, 1), (4, 2, 2)]


def test_steps_near_a_named_one_stay_single(monkeypatch):
    monkeypatch.setattr(data, "DETAIL", 1)
    found = merged_steps(steps(20), [10], 8)
    assert found.select("step", "count").rows() == [
        *[(0, 4), (4, 4), (8, 1)],
        *[(9, 1), (10, 1), (11, 1)],
        *[(12, 4), (16, 4)],
    ]


@pytest.mark.parametrize("differences", [True, False])
def test_numbers_come_back(differences, unpacked):
    numbers = [0, 1, -1, 63, 64, -64, -65, 8191, 8192, 1 << 40, -(1 << 40), 7, None]
    packed = Packed()
    packed.add("a", pl.Series(numbers, dtype=pl.Int64), differences=differences)
    packed.add("none", pl.Series([], dtype=pl.Int64))
    packed.add("yes", pl.Series([True, False]))
    assert unpacked(packed) == {"a": [*numbers[:-1], -1], "none": [], "yes": [1, 0]}


def test_bytes_are_varints_of_zigzag_codes():
    packed = Packed()
    packed.add("a", pl.Series([0, -1, 1, 64, 65]), differences=True)
    # differences 0, -1, 2, 63, 1: codes 0, 1, 4, 126, 2
    assert zlib.decompress(base64.b64decode(packed.packed_text()), -zlib.MAX_WBITS) == bytes(
        [0, 1, 4, 126, 2]
    )
    packed = Packed()
    packed.add("a", pl.Series([64, 8192]), differences=False)  # codes 128 and 16,384
    assert zlib.decompress(base64.b64decode(packed.packed_text()), -zlib.MAX_WBITS) == bytes(
        [128, 1, 128, 128, 1]
    )


def test_texts_come_back_between_numbers(unpacked):
    packed = Packed()
    packed.add_texts("ids", ["t1-0", "ü", ""])
    packed.add("a", pl.Series([5]))
    assert unpacked(packed) == {"ids": ["t1-0", "ü", ""], "a": [5]}
