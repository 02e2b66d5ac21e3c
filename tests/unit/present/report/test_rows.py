import polars as pl

from schedtrace.present.report import data
from schedtrace.present.report.data import merged
from schedtrace.timeline.chart import SCHEMA


def steps(count, **columns):
    """Steps 10 us apart, each with 1 token of 10 decoded, and what is given of others."""
    given = {name: [0] * count for name in SCHEMA} | {
        "step": list(range(count)),
        "begin_us": list(range(0, 10 * count, 10)),
        "end_us": list(range(9, 10 * count + 9, 10)),
        "decode_tokens": [1] * count,
        "token_budget": [10] * count,
        "cause": [None] * count,
        **columns,
    }
    return pl.DataFrame(given, schema=SCHEMA)


def test_few_steps_stay_single():
    found = merged(steps(4), [], 4)
    assert found["count"].to_list() == [1, 1, 1, 1]
    assert found.columns == [*SCHEMA, "offered_tokens", "count"]


def test_many_steps_are_summed_and_peaks_kept():
    found = merged(steps(6, waiting=[0, 5, 0, 1, 2, 0], cause=["a", "a", "b", "b", None, "b"]), [], 2)
    assert found.select(
        "step", "count", "begin_us", "end_us", "decode_tokens", "waiting", "cause"
    ).rows() == [
        (0, 3, 0, 29, 3, 5, "a"),
        (3, 3, 30, 59, 3, 2, "b"),
    ]


def test_the_budget_of_steps_that_scheduled_nothing_was_not_offered():
    given = steps(4, requests=[1, 0, 0, 2], token_budget=[10, 10, 10, 7])
    assert merged(given, [], 4)["offered_tokens"].to_list() == [10, 0, 0, 7]
    assert merged(given, [], 2).select("token_budget", "offered_tokens").rows() == [(20, 10), (17, 7)]


def test_a_row_ends_with_its_trial():
    found = merged(steps(6, trial=[1, 1, 1, 1, 2, 2]), [], 2)
    assert found.select("step", "count", "trial").rows() == [(0, 3, 1), (3, 1, 1), (4, 2, 2)]


def test_steps_near_a_named_one_stay_single(monkeypatch):
    monkeypatch.setattr(data, "DETAIL", 1)
    found = merged(steps(20), [10], 8)
    assert found.select("step", "count").rows() == [
        *[(0, 4), (4, 4), (8, 1)],
        *[(9, 1), (10, 1), (11, 1)],
        *[(12, 4), (16, 4)],
    ]
