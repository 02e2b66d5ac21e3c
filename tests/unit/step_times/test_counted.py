"""Step times that count what lies outside."""

from types import SimpleNamespace

from schedtrace.step_times.batch import Batch
from schedtrace.step_times.fitted import Counted


def fitted(outside, total_frac=0.0):
    return SimpleNamespace(
        fit=SimpleNamespace(error=SimpleNamespace(total_frac=total_frac)),
        device_us=lambda batch: 100.0 * batch.prefill_tokens,
        without_economies_us=lambda batch: 1000.0 * batch.prefill_tokens,
        most_tokens=2.0,
        outside=lambda batch: batch.prefill_tokens in outside,
        gap_us=lambda arrivals: 7.0 * arrivals,
    )


def batch(tokens):
    return Batch({"a": tokens}, tokens, 0, 0)


def test_steps_outside_are_counted():
    counted = Counted(fitted({3}))
    assert counted.outside_frac == 0.0
    assert [counted.device_us(batch(tokens)) for tokens in (1, 2, 3, 3)] == [100.0, 200.0, 300.0, 300.0]
    assert (counted.steps, counted.outside, counted.outside_frac, counted.larger) == (4, 2, 0.5, 2)


def test_without_economies_of_scale():
    assert Counted(fitted(()), economies=False).device_us(batch(2)) == 2000.0


def test_noise_multiplies_one_step_after_the_other_and_begins_anew():
    counted = Counted(fitted(()), noise=[2.0, 0.5])
    assert [counted.device_us(batch(1)) for _ in range(3)] == [200.0, 50.0, 200.0]


def test_outliers_are_part_of_the_devices_time():
    """All recorded steps took a quarter longer together than their fit, which outliers do not rule."""
    assert Counted(fitted((), total_frac=0.25)).device_us(batch(1)) == 125.0
    assert Counted(fitted((), total_frac=0.25), noise=[2.0]).device_us(batch(1)) == 200.0


def test_all_else_is_the_fits():
    assert Counted(fitted(())).gap_us(2) == 14.0
