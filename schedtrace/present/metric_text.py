"""A compared metric in words, alike in the terminal and in Markdown."""

from schedtrace.model.comparison import Comparison, MetricChange, Sample
from schedtrace.present.numbers import number, percent


def sample_text(sample: Sample) -> str:
    """``817 (800..833)``: mean and range of the trials; ``5`` if all are alike."""
    if sample.min == sample.max:
        return number(sample.mean)
    return f"{number(sample.mean)} ({number(sample.min)}..{number(sample.max)})"


def change_text(metric: MetricChange) -> str:
    """``+10.2 % (+7.1..+13)``: change of the means and its 95 % interval, in percent of the base."""
    if metric.change_frac is None and metric.new.mean:
        return "from 0"
    told = percent(metric.change_frac, signed=True)
    if metric.ci_low_frac is None or metric.ci_high_frac is None:
        return told
    return f"{told} ({_end(metric.ci_low_frac)}..{_end(metric.ci_high_frac)})"


def _end(fraction: float) -> str:
    """Of an interval, in percent: two digits are more than it knows."""
    return f"{100 * fraction:+.0f}" if abs(fraction) >= 0.1 else f"{100 * fraction:+.1f}"  # noqa: PLR2004


def noise_floors(metrics: list[MetricChange]) -> str:
    """What could not have been seen; empty where nothing varies. One of several in other units is enough."""
    told: dict[str, str] = {}
    for metric in metrics:
        if metric.unit and metric.trials_needed is not None:
            floor = percent(metric.noise_floor_frac) if metric.noise_floor_frac is not None else "unknown"
            told.setdefault(f"{floor} ({metric.trials_needed:,})", metric.name)
    listed = ", ".join(f"{name} {floor}" for floor, name in told.items())
    return f"Noise floor (trials a side for one of 5 %): {listed}." if listed else ""


def legend(comparison: Comparison) -> str:
    """How the figures were judged."""
    if not comparison.tests:
        return "Nothing varies between the trials of a side, or one has a single trial: nothing to test."
    tests = "1 test" if comparison.tests == 1 else f"{comparison.tests} tests"
    return (
        "The noise floor is the smallest change that these trials would show in 4 of 5 cases. Rank test "
        f"(Mann-Whitney U) at 5 %, corrected for {tests} (Holm): below {comparison.trials_least} trials a "
        "side nothing can be significant."
    )
