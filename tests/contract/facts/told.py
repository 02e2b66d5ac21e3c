"""A trace's lines as the format's page defines them, and a traced engine that writes to the test's folder."""

import json
from pathlib import Path
from typing import Any

from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from tests.contract.rebuilt import steps_of

Line = dict[str, Any]


class Traced(Driver):
    """A traced engine."""

    def __init__(self, wrap: Any = traced_class, **options: Any) -> None:
        super().__init__(wrap, **options)


def trace_file(run: Path) -> Path:
    """The one trace of a run."""
    [file] = run.glob("engine-*.jsonl")
    return file


def lines(run: Path) -> list[Line]:
    """All of its lines."""
    return [json.loads(line) for line in trace_file(run).read_text().splitlines()]


def steps(run: Path) -> list[Line]:
    """Its steps in full, in their order."""
    return list(steps_of(trace_file(run)).values())


def events(run: Path, name: str) -> list[Line]:
    """The entries of one of the steps' lists, and of the lines between."""
    return [entry for line in lines(run) for entry in line.get(name, ())]


def header(run: Path) -> Line:
    """The first line."""
    return lines(run)[0]
