"""Condition of ``diff --fail-on``: a metric that became worse, and by how much at least."""

from collections.abc import Callable, Sequence

from schedtrace.compare.metric_changes import METRICS
from schedtrace.errors import InputError, UsageError
from schedtrace.model.comparison import Comparison, MetricChange

NAMES = [metric.name for metric in METRICS if metric.higher_is_better is not None]
"""Metrics that have a direction, and can therefore become worse."""


def regressed(asked: Sequence[str]) -> Callable[[MetricChange], bool]:
    """Return a predicate for metrics that became worse in the sense of ``--fail-on``.

    Args:
        asked: ``regression`` (any metric), ``regression:METRIC`` or ``regression:METRIC:PERCENT``: this
            metric, by at least so many percent of the base. In names, dashes and spaces are the same, and
            case does not matter.

    Raises:
        UsageError: If ``asked`` has another form.
    """
    conditions = [_parsed(text) for text in asked]
    return lambda change: any(
        change.name in names
        and change.worsened
        and (change.change_frac is None or abs(change.change_frac) >= least_frac)
        for names, least_frac in conditions
    )


def require_compared(asked: Sequence[str], comparison: Comparison) -> None:
    """Raise InputError if a condition is about a metric that one of the records lacks.

    Args:
        asked: As for ``regressed``.
        comparison: Comparison of the two runs.

    Raises:
        InputError: If none of the metrics of a condition is in both.
    """
    compared = {change.name for change in comparison.metrics}
    for condition in asked:
        names, _ = _parsed(condition)
        if not compared.intersection(names):
            what = names[0] if len(names) == 1 else "a metric that can be worse"
            msg = (
                f"--fail-on {condition} cannot be judged: {comparison.base_path} and {comparison.new_path} "
                f"do not both record {what}"
            )
            raise InputError(msg)


def _parsed(asked: str) -> tuple[list[str], float]:
    """Return the metrics of a condition, and the smallest change that meets it."""
    kind, *rest = asked.split(":")
    if kind != "regression" or len(rest) > 2:  # noqa: PLR2004  # a metric and a percentage
        msg = f"--fail-on {asked}: expected regression, regression:METRIC or regression:METRIC:PERCENT"
        raise UsageError(msg)
    names = [name for name in NAMES if _plain(name) == _plain(rest[0])] if rest else NAMES
    if not names:
        listed = ", ".join(name.replace(" ", "-") for name in NAMES)
        msg = f"--fail-on {asked}: no metric {rest[0]} that can be worse; there are {listed}"
        raise UsageError(msg)
    percent = 0.0
    if rest[1:]:
        try:
            percent = float(rest[1].removesuffix("%"))
        except ValueError:
            percent = -1.0
    if not 0 <= percent < float("inf"):
        msg = f"--fail-on {asked}: {rest[1]} is no percentage, such as 5"
        raise UsageError(msg)
    return names, percent / 100


def _plain(name: str) -> str:
    return name.replace("-", " ").strip().lower()
