"""Loads on vLLM's real scheduler in virtual time, recorded into run folders."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from schedtrace.read.run import Run, read_run
from schedtrace.step_times.constants import Constants, HostTimes

TIMES = Constants(2000, 15, 120, 0.5, HostTimes(60, 2, 20, 1, 50, 10))
"""2 ms a step, 15 us a prompt token, 120 us an output token; the host takes some, too."""


@contextmanager
def recorded_in(folder: Path, **variables: str) -> Iterator[None]:
    """Record what is simulated into this run folder, as one plain file, whatever the environment says."""
    before = {name: value for name, value in os.environ.items() if name.startswith("SCHEDTRACE")}
    for name in before:
        del os.environ[name]
    variables = {"SCHEDTRACE_RUN_DIR": str(folder), "SCHEDTRACE_TRACE": "plain", **variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def simulated(
    folder: Path, load: Callable[[Any], Any], *, trial_ids: bool = False, times: Any = TIMES, **options: Any
) -> Run:
    """Record an engine, or ranks if there is a ``data_parallel_size``.

    Args:
        folder: Run folder.
        load: Puts requests on the engine, and runs it.
        trial_ids: Whether ids of requests begin with their trials.
        times: Step times.
        options: Of the engine.
    """
    from schedtrace.record.settings import TRIAL_IDS
    from schedtrace.record.traced import traced_class
    from schedtrace.simulate import Simulation, VirtualClock
    from schedtrace.simulate.ranks import Ranks

    make = Ranks if "data_parallel_size" in options else Simulation
    with (
        recorded_in(folder, **{TRIAL_IDS: str(int(trial_ids))}),
        VirtualClock() as clock,
        closing(make(clock, traced_class, times=times, **options)) as engine,
    ):
        load(engine)
    return read_run(folder)
