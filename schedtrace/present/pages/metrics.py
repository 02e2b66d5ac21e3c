"""The metrics of a comparison: both sides, the change, and how sure it is."""

from schedtrace.model.comparison import Comparison, MetricChange, Outcome, Sample
from schedtrace.present.numbers import counted, integer, number, percent, settled
from schedtrace.present.sections import Cell, Column, Style, Styled, Table

TWO_DIGITS_FRAC = 0.1
"""Of an interval: from here on, two digits are more than it knows."""


def metrics_table(metrics: list[MetricChange]) -> Table:
    """One row per metric: means with the ranges of the trials."""
    columns = [
        Column("mean (range)\nof trials"),
        Column("base", numeric=True),
        Column("new", numeric=True),
        Column("change\n(95 %)", numeric=True),
        Column("result"),
    ]
    rows: list[list[Cell]] = [
        [
            f"{metric.name} {metric.unit}".strip(),
            sample_text(metric.base),
            sample_text(metric.new),
            change_text(metric),
            Styled(str(metric.outcome), _style(metric)),
        ]
        for metric in metrics
    ]
    return Table(columns, rows)


def _style(metric: MetricChange) -> Style | None:
    if metric.worsened:
        return Style.BAD
    if not metric.significant:
        return Style.DIM
    judged = metric.higher_is_better is not None and metric.outcome != Outcome.DIFFERS
    return Style.GOOD if judged else Style.STRONG


def sample_text(sample: Sample) -> str:
    """``817 (800..833)``: mean and range of the trials; ``5`` if all are alike."""
    if sample.min == sample.max:
        return number(sample.mean)
    return f"{number(sample.mean)} ({number(sample.min)}..{number(sample.max)})"


def change_text(metric: MetricChange) -> str:
    """``+10.2 % (+7.1..+13)``: change of the means and its 95 % interval, in percent of the base."""
    if metric.change_frac is None and metric.new.mean:
        return "from 0"
    change = percent(metric.change_frac, signed=True)
    if metric.ci_low_frac is None or metric.ci_high_frac is None:
        return change
    return f"{change} ({_end(metric.ci_low_frac)}..{_end(metric.ci_high_frac)})"


def _end(fraction: float) -> str:
    decimals = 0 if round(abs(fraction), 6) >= TWO_DIGITS_FRAC else 1
    return f"{settled(100 * fraction, decimals):+.{decimals}f}"


def noise_floors(metrics: list[MetricChange]) -> str:
    """What could not have been seen; empty where nothing varies. One of several in other units is enough."""
    floors: dict[str, str] = {}
    for metric in metrics:
        if metric.unit and metric.trials_needed is not None:
            floor = "not known" if metric.noise_floor_frac is None else percent(metric.noise_floor_frac)
            floors.setdefault(
                f"{floor} (5 % takes {integer(metric.trials_needed)} trials a side)", metric.name
            )
    listed = ", ".join(f"{name} {floor}" for floor, name in floors.items())
    return f"Noise floor: {listed}." if listed else ""


def legend(comparison: Comparison) -> str:
    """How the figures were judged."""
    if comparison.compared_by == "requests":
        if not comparison.tests:
            return "One server against one: too few requests, or different loads, so nothing is tested."
        return (
            "Blocks of a fifth of the requests, or of the time, are drawn anew (circular block bootstrap). "
            f"Student's t at 5 %, corrected for {counted(comparison.tests, 'test')} (Holm)."
        )
    if not comparison.tests:
        return "Nothing varies between the trials of a side, or one has a single trial: nothing to test."
    return (
        "The noise floor is the smallest change that these trials would show in 4 of 5 cases. Rank test "
        f"(Mann-Whitney U) at 5 %, corrected for {counted(comparison.tests, 'test')} (Holm): with "
        f"{comparison.trials_least} trials a side a difference in any metric can be significant."
    )
