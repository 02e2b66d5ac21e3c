"""Step times that count what lies outside."""

from types import SimpleNamespace

import pytest

from schedtrace.step_times.batch import Batch
from schedtrace.step_times.fitted import Counted


def fitted(outside, total_frac=0.0):
    return SimpleNamespace(
        fit=SimpleNamespace(error=SimpleNamespace(total_frac=total_frac)),
        device_us=lambda batch: 100.0 * batch.prefill_tokens,
        most_tokens=2.0,
        extrapolates=lambda batch: batch.prefill_tokens in outside,
        gap_us=lambda arrivals: 7.0 * arrivals,
    )


def batch(tokens):
    return Batch({"a": tokens}, tokens, 0, 0)


def test_steps_outside_are_counted():
    counted = Counted(fitted({3}))
    assert counted.outside_frac == 0.0
    assert [counted.device_us(batch(tokens)) for tokens in (1, 2, 3, 3)] == [100.0, 200.0, 300.0, 300.0]
    assert (counted.steps, counted.outside, counted.outside_frac, counted.larger) == (4, 2, 0.5, 2)
    assert counted.gap_us(2) == 14.0  # all else is the fit's


@pytest.mark.parametrize(
    ("total_frac", "options", "times"),
    [
        (0.0, {}, [100.0, 100.0, 100.0]),
        (0.0, {"device_us": lambda batch: 1000.0 * batch.prefill_tokens}, [1000.0, 1000.0, 1000.0]),
        (0.0, {"noise": [2.0, 0.5]}, [200.0, 50.0, 200.0]),
        (0.25, {}, [125.0, 125.0, 125.0]),  # what outliers add to all steps together
        (0.25, {"noise": [2.0]}, [200.0, 200.0, 200.0]),
    ],
)
def test_noise_multiplies_one_step_after_the_other_and_begins_anew(total_frac, options, times):
    counted = Counted(fitted((), total_frac), **options)
    assert [counted.device_us(batch(1)) for _ in times] == times
