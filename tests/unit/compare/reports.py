"""Reports by hand."""

from schedtrace.model.report import RunReport


def report(*, trials=(), findings=()):
    """A run's report of which only these are known."""
    unknown = {name: [] for name in RunReport.__struct_fields__}
    known = {"path": "", "label": "", "config": {}, "statistics": None, "warmup_steps": 0}
    return RunReport(**unknown | known | {"trials": list(trials), "findings": list(findings)})


def metrics_of(comparison):
    """The metrics of a comparison by name."""
    return {metric.name: metric for metric in comparison.metrics}
