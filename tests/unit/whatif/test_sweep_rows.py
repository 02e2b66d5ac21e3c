import pytest

from schedtrace.whatif.sweep_rows import objectives, parse_slo, sweep_rows
from tests.unit.whatif.conftest import BASE, an_outcome

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
    [_, base, *_] = sweep_rows(
        OUTCOMES[:2], BASE, parse_slo("ttft_p50=2ms,ttft_p99=2500us"), recorded="base"
    )[::-1]
    assert base.recorded
    assert base.settings == BASE
    assert (base.output_tokens_per_s, base.requests_per_s) == (8, 4 / 5)
    assert (base.ttft_ms.count, base.ttft_ms.mean, base.ttft_ms.p50) == (3, 2, 2)
    assert base.ttft_ms.p90 == pytest.approx(2.8)
    assert base.bounds_ms == [2, pytest.approx(2.98)]
    assert base.meets_slo is False
    assert base.goodput_requests_per_s == 2 / 5
    assert base.extrapolated_frac == 0.25


def test_the_front_is_marked_and_refused_rows_are_last_and_unknown():
    rows = sweep_rows(OUTCOMES, BASE, parse_slo("ttft_p99=10ms"), recorded="base")
    assert [row.settings["max_num_seqs"] for row in rows] == [8, 8, 4, 99]
    assert [row.pareto for row in rows] == [True, False, False, False]
    refused = rows[-1]
    assert (refused.refused, refused.meets_slo, refused.goodput_requests_per_s) == ("why", None, None)
    assert (refused.output_tokens_per_s, refused.ttft_ms, refused.extrapolated_frac) == (None, None, None)


def test_without_bounds_nothing_is_judged():
    [row] = sweep_rows(OUTCOMES[:1], BASE, [], recorded=None)
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
