import pytest

from schedtrace.errors import UsageError
from schedtrace.model.sweep_result import Bound, Outcome
from schedtrace.whatif.sweep_rows import good_requests, measured, meets, parse_slo, percentile


def outcome(ttft, tpot, e2e=None, **fields):
    given = {"key": "k", "changes": {}, "requests": len(ttft), "e2e_ms": e2e or ttft}
    return Outcome(ttft_ms=ttft, tpot_ms=tpot, **{**given, **fields})


def test_every_unit_and_latency():
    assert parse_slo("ttft_p99=1s, TPOT_P99.9=50ms,e2e_p50=1.5m,ttft_p50=500us") == [
        Bound(latency="ttft", percentile=99, limit_ms=1000),
        Bound(latency="tpot", percentile=99.9, limit_ms=50),
        Bound(latency="e2e", percentile=50, limit_ms=90_000),
        Bound(latency="ttft", percentile=50, limit_ms=0.5),
    ]


def test_a_bound_has_the_name_that_was_typed():
    assert [bound.name for bound in parse_slo("tpot_p99.9=50ms,ttft_p50=1s")] == ["tpot_p99.9", "ttft_p50"]


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
    assert measured(of, parse_slo("ttft_p50=1s,tpot_p50=1s,e2e_p100=1s")) == [200, 15, 4]


@pytest.mark.parametrize(
    ("slo", "holds"),
    [
        ("ttft_p50=200ms", True),
        ("ttft_p50=199ms", False),
        ("ttft_p50=200ms,tpot_p100=19ms", False),
        ("ttft_p50=200ms,tpot_p100=20ms", True),
    ],
)
def test_an_objective_is_met_if_every_bound_holds(slo, holds):
    assert meets(outcome([100, 200, 300], [None, 10, 20]), parse_slo(slo)) is holds


def test_an_objective_is_not_met_while_a_request_did_not_finish():
    assert not meets(outcome([100], [10], requests=2), parse_slo("ttft_p50=1s"))
    assert not meets(outcome([], [], requests=0), parse_slo("ttft_p50=1s"))


def test_one_output_token_has_no_time_per_output_token_and_meets_any():
    assert meets(outcome([100], [None]), parse_slo("tpot_p99=1ms"))


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
    """Three requests: TTFT of 100, 200 and 300 ms, TPOT of none, 10 and 20 ms, E2E of 1, 2 and 4 ms."""
    assert good_requests(outcome([100, 200, 300], [None, 10, 20], [1, 2, 4]), parse_slo(slo)) == good
