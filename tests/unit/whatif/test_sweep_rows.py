"""Objectives as they are typed, and the rows of a sweep that are judged by them."""

import pytest

from schedtrace.errors import UsageError
from schedtrace.model.what_if import Bound, ReplayOutcome
from schedtrace.whatif.sweep_rows import (
    bound_values,
    good_requests,
    meets,
    objectives,
    pareto_front,
    parse_slo,
    percentile,
    sweep_rows,
)
from tests.unit.whatif.conftest import an_outcome

OUTCOMES = [
    an_outcome("slow", {"max_num_seqs": 4}),
    an_outcome("base", extrapolated_steps=25, ttft_ms=[1.0, 2.0, 3.0]),
    an_outcome("beaten", {"max_num_batched_tokens": 9}, ttft_ms=[500.0] * 4),
    an_outcome(
        "refused", {"max_num_seqs": 99}, refused="why", steps=0, preemptions=None, duration_s=0,
        output_tokens=0, ttft_ms=[], tpot_ms=[], e2e_ms=[],
    ),
]  # fmt: skip


def test_the_figures_of_a_row():
    rows = sweep_rows(OUTCOMES[:2], parse_slo("ttft_p50=2ms,ttft_p99=2500us"), recorded="base")
    [_, base, *_] = rows[::-1]
    assert base.recorded
    assert base.changes == {}
    figures = {figure.name: figure.value for figure in base.figures}
    assert (figures["output"], figures["requests"]) == (8, 4 / 5)
    assert (base.finished, figures["TTFT mean"], figures["TTFT p50"]) == (4, 2, 2)
    assert figures["TTFT p90"] == pytest.approx(2.8)
    assert base.bounds_ms == [2, pytest.approx(2.98)]
    assert base.meets_slo is False
    assert base.goodput_requests_per_s == 2 / 5
    assert base.extrapolated_frac == 0.25


def test_the_front_is_marked_and_refused_rows_are_last_and_unknown():
    rows = sweep_rows(OUTCOMES, parse_slo("ttft_p99=10ms"), recorded="base")
    beaten, slow, too_many = ({"max_num_batched_tokens": 9}, {"max_num_seqs": 4}, {"max_num_seqs": 99})
    assert [row.changes for row in rows] == [{}, beaten, slow, too_many]
    assert [row.pareto for row in rows] == [True, False, False, False]
    refused = rows[-1]
    assert (refused.refused, refused.meets_slo, refused.goodput_requests_per_s) == ("why", None, None)
    assert (refused.figures, refused.steps, refused.finished, refused.extrapolated_frac) == (
        [],
        None,
        None,
        None,
    )


def test_a_configuration_is_compared_with_the_recorded_one():
    base, slow = sweep_rows(OUTCOMES[:2], [], recorded="base")
    output = slow.figure("output")
    assert (output.before, output.value, output.change_frac, output.low_frac) == (8, 4, -0.5, None)
    assert (base.figure("output").before, base.figure("output").change_frac) == (None, None)


def test_without_bounds_nothing_is_judged():
    [row] = sweep_rows(OUTCOMES[:1], [], recorded=None)
    assert (row.bounds_ms, row.meets_slo, row.goodput_requests_per_s, row.recorded) == ([], None, None, False)


@pytest.mark.parametrize(
    ("slo", "front"),
    [
        ("", ["ttft_p99", "tpot_p99"]),
        ("tpot_p50=1s", ["tpot_p50", "ttft_p99"]),
        ("e2e_p90=1s,ttft_p95=1s,tpot_p95=1s", ["e2e_p90", "ttft_p95", "tpot_p95"]),
    ],
)
def test_the_front_is_about_the_percentiles_of_the_objective(slo, front):
    assert objectives(parse_slo(slo) if slo else []) == ["output_tokens_per_s", *front]


def outcome(ttft, tpot, e2e=None, **fields):
    defaults = {"key": "k", "changes": {}, "requests": len(ttft), "e2e_ms": e2e or ttft}
    return ReplayOutcome(ttft_ms=ttft, tpot_ms=tpot, **{**defaults, **fields})


def test_every_unit_and_latency():
    bounds = parse_slo("ttft_p99=1s, TPOT_P99.9=50ms,e2e_p50=1.5m,ttft_p50=500us")
    assert bounds == [
        Bound(latency="ttft", percentile=99, limit_ms=1000),
        Bound(latency="tpot", percentile=99.9, limit_ms=50),
        Bound(latency="e2e", percentile=50, limit_ms=90_000),
        Bound(latency="ttft", percentile=50, limit_ms=0.5),
    ]
    assert [bound.name for bound in bounds] == ["ttft_p99", "tpot_p99.9", "e2e_p50", "ttft_p50"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "--slo : expected bounds such as"),
        ("ttft=1s", "--slo ttft=1s: expected bounds"),
        ("ttft_p99=1", "--slo ttft_p99=1: expected bounds"),
        ("ttft_p99=-1s", "expected bounds"),
        ("itl_p99=1s", "expected bounds"),
        ("ttft_p99=1s,", "--slo : expected bounds"),
        ("ttft_p101=1s", "--slo ttft_p101=1s: a percentile is 100 at most"),
        ("tpot_p50=0ms", "--slo tpot_p50=0ms: nothing takes no time"),
        ("ttft_p99=1s,ttft_p99=2s", "--slo ttft_p99=2s: given twice"),
    ],
)
def test_anything_else_is_refused(text, why):
    with pytest.raises(UsageError) as refused:
        parse_slo(text)
    assert why in str(refused.value)


def test_percentiles_are_interpolated_and_unknown_without_values():
    assert percentile([10, None, 20, 30], 50) == 20
    assert percentile([0, 100], 99) == 99
    assert percentile([None], 50) is None


def test_what_a_bound_is_about():
    of = outcome([100, 200, 300], [None, 10, 20], [1, 2, 4])
    assert bound_values(of, parse_slo("ttft_p50=1s,tpot_p50=1s,e2e_p100=1s")) == [200, 15, 4]


THREE = outcome([100, 200, 300], [None, 10, 20], [1, 2, 4])
"""TTFT of 100, 200 and 300 ms, TPOT of none, 10 and 20 ms, E2E of 1, 2 and 4 ms."""


@pytest.mark.parametrize(
    ("of", "slo", "holds"),
    [
        (THREE, "ttft_p50=200ms", True),
        (THREE, "ttft_p50=199ms", False),
        (THREE, "ttft_p50=200ms,tpot_p100=19ms", False),
        (THREE, "ttft_p50=200ms,tpot_p100=20ms", True),
        pytest.param(outcome([100], [10], requests=2), "ttft_p50=1s", False, id="one did not finish"),
        pytest.param(outcome([], [], requests=0), "ttft_p50=1s", False, id="none finished"),
        pytest.param(outcome([100], [None]), "tpot_p99=1ms", True, id="one output token has no such time"),
    ],
)
def test_an_objective_is_met_if_every_bound_holds_for_all(of, slo, holds):
    assert meets(of, parse_slo(slo)) is holds


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ("ttft_p99=200ms", 2),
        ("ttft_p50=100ms,ttft_p99=200ms", 2),
        ("ttft_p99=300ms,tpot_p99=10ms", 2),
        ("ttft_p99=200ms,tpot_p99=5ms", 1),
        ("e2e_p99=1ms", 1),
    ],
)
def test_good_requests_meet_every_bound_themselves(slo, good):
    assert good_requests(THREE, parse_slo(slo)) == good


@pytest.mark.parametrize(
    ("costs", "front"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([[3, 1]], [True], id="one row"),
        pytest.param([[1, 3], [2, 2], [3, 1]], [True, True, True], id="each best in something"),
        pytest.param([[1, 3], [2, 3], [2, 4]], [True, False, False], id="worse in one, equal in the other"),
        pytest.param([[1, 1], [1, 1], [2, 1]], [True, True, False], id="equal rows share it"),
        pytest.param([[1, 5, 5], [5, 1, 5], [5, 5, 1], [5, 5, 5]], [True, True, True, False], id="three"),
        pytest.param([[None, 0], [1, 1], [2, None]], [False, True, False], id="unknown beats nobody"),
        pytest.param([[None, None]], [False], id="only unknown"),
        pytest.param([[-100, 5], [-90, 6]], [True, False], id="negated: high is good"),
    ],
)
def test_the_front_has_what_nothing_beats(costs, front):
    assert pareto_front(costs) == front
