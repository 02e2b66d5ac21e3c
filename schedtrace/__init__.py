"""schedtrace: why did vLLM's scheduler not schedule that request?

The public names are for programs that read a run, analyze it or simulate a load (``docs/python.md``). Each
name is imported when it is first used, because vLLM loads this package in all of its processes.
"""

from schedtrace.version import __version__

TYPE_CHECKING = False
"""Constant that type checkers treat as true; ``typing`` itself would be one more import in vLLM's processes.
"""
if TYPE_CHECKING:
    from schedtrace.diagnose.analyze import analyze_run
    from schedtrace.diagnose.rule import Rule
    from schedtrace.diagnose.rules.common import step_finding
    from schedtrace.errors import SchedtraceError
    from schedtrace.model.report import Evidence, Finding, RunReport
    from schedtrace.model.trace_facts import Fact
    from schedtrace.read.run import Run, find_runs, read_run
    from schedtrace.record.marks.guards import Guard
    from schedtrace.simulate.simulation import Simulation
    from schedtrace.timeline.timeline import Timeline, make_timeline

__all__ = [
    "Evidence",
    "Fact",
    "Finding",
    "Guard",
    "Rule",
    "Run",
    "RunReport",
    "SchedtraceError",
    "Simulation",
    "Timeline",
    "__version__",
    "analyze_run",
    "find_runs",
    "make_timeline",
    "read_run",
    "step_finding",
]

_HOMES = {
    "Evidence": "schedtrace.model.report",
    "Fact": "schedtrace.model.trace_facts",
    "Finding": "schedtrace.model.report",
    "Guard": "schedtrace.record.marks.guards",
    "Rule": "schedtrace.diagnose.rule",
    "Run": "schedtrace.read.run",
    "RunReport": "schedtrace.model.report",
    "SchedtraceError": "schedtrace.errors",
    "Simulation": "schedtrace.simulate",
    "Timeline": "schedtrace.timeline.timeline",
    "analyze_run": "schedtrace.diagnose.analyze",
    "find_runs": "schedtrace.read.run",
    "make_timeline": "schedtrace.timeline.timeline",
    "read_run": "schedtrace.read.run",
    "step_finding": "schedtrace.diagnose.rules.common",
}
"""Module of each public name."""


def __getattr__(name: str) -> object:
    """Return the object with a public name, imported from its module."""
    from importlib import import_module  # noqa: PLC0415  # likewise

    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_HOMES[name]), name)
