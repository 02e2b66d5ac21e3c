"""Processor times of the threads of engine, workers and front end."""

from typing import Any

import polars as pl

SCHEMA = {
    "at_us": pl.Int64,
    "role": pl.String,
    "pid": pl.Int64,
    "tid": pl.Int64,
    "ran_us": pl.Int64,
    "waited_us": pl.Int64,
}


def cpu_times(lines: list[Any]) -> pl.DataFrame:
    """One row per ``cpu`` line and thread: the line's ``at_us`` and the fields of ``ThreadTime``.

    ``ran_us`` and ``waited_us`` count from the thread's beginning.
    """
    names = list(SCHEMA)[1:]
    rows = [(line.at_us, *(getattr(t, name) for name in names)) for line in lines for t in line.threads]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")
