"""What a wider limit would gain, by the model of step times."""

from types import SimpleNamespace

import polars as pl
import pytest

from schedtrace.diagnose.gains import came_at_once, host_gain, per_step_us, throughput_gain
from tests.makers import arrival, step


def engine(**known):
    """An engine that was busy for 1,000 us."""
    return SimpleNamespace(busy_us=1000, **known)


def test_saved_time_is_more_throughput():
    """The same tokens in 800 us: a quarter more; at least 900 and at most 700 us."""
    gain = throughput_gain(engine(), 200, 100, 300)
    assert (gain.metric, gain.change_frac, gain.saved_frac) == ("output_tokens_per_s", 0.25, 0.2)
    assert (gain.low_frac, gain.high_frac) == pytest.approx((1 / 9, 3 / 7))


def test_a_run_always_takes_time():
    gain = throughput_gain(engine(), 5000)
    assert (gain.change_frac, gain.saved_frac) == (pytest.approx(19), 1.0)


@pytest.mark.parametrize(("busy_us", "saved_us"), [(0, 10), (1000, 0), (1000, -1)])
def test_nothing_saved_is_no_gain(busy_us, saved_us):
    assert throughput_gain(SimpleNamespace(busy_us=busy_us), saved_us) is None


def test_a_step_costs_the_models_base_and_the_hosts_time():
    """Two of three steps scheduled something; the host took 30 us for them."""
    spans = [("device", 0, 900), ("schedule", 900, 920), ("host_gap", 920, 930), ("idle", 930, 1000)]
    states = pl.DataFrame(spans, schema=["state", "begin_us", "end_us"], orient="row")
    steps = pl.DataFrame({"total_requests": [1, 0, 2]})
    model = SimpleNamespace(base_us=500.0)
    assert per_step_us(engine(steps=steps, engine_states=states, step_time=model)) == 515
    assert per_step_us(engine(steps=steps, engine_states=states, step_time=None)) is None
    assert per_step_us(engine(steps=steps[1:2], engine_states=states, step_time=model)) is None


def arriving(*moments):
    """Eleven steps of 10 ms; requests come at these."""
    lines = [step(number) for number in range(11)]
    for number, moment in enumerate(moments):
        lines[-(-moment // 10_000)].arrived.append(arrival(str(number), None, moment))
    return lines


@pytest.mark.parametrize(
    ("moments", "at_once"),
    [([0] * 10, True), ([0] * 9 + [50_000], True), ([0] * 8 + [50_000] * 2, False), ([], False)],
)
def test_nine_tenths_before_a_tenth_of_the_steps_came_at_once(view_of, moments, at_once):
    lines = arriving(*moments)
    for line in lines:
        line.arrived = list(line.arrived)
    assert came_at_once(view_of(*lines)) is at_once


@pytest.mark.parametrize(
    ("moments", "metric", "change"),
    [([0] * 3, "output_tokens_per_s", 0.25), ([50_000] * 3, "tpot_p50_ms", -0.2)],
)
def test_where_the_client_sets_the_pace_less_host_time_is_sooner_not_more(view_of, moments, metric, change):
    """The middle of a tenth and three tenths of the busy time is saved."""
    view = view_of(*arriving(*moments))
    gain = host_gain(view, least_us=0.1 * view.busy_us, most_us=0.3 * view.busy_us)
    assert (gain.metric, gain.change_frac) == (metric, pytest.approx(change))
    assert gain.low_frac < gain.change_frac < gain.high_frac
