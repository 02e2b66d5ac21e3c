"""A case of the exam: a load on vLLM's real scheduler in virtual time, and the answer that is expected."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedtrace.record.traced import traced_class
from schedtrace.simulate import Simulation, VirtualClock
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.constants import Constants, HostTimes

HOST = HostTimes(100, 0, 0, 0, 100, 0)
"""An engine whose host work is 2 to 3 % of a step."""


@dataclass(frozen=True)
class Machine(Constants):
    """A device and its host; ``slower`` says how many times as long a batch takes as the constants say."""

    host: HostTimes = HOST
    slower: Callable[[Batch], float] = lambda _: 1.0

    def device_us(self, batch: Batch) -> float:
        return super().device_us(batch) * self.slower(batch)


MACHINE = Machine(6000, 20, 30, 0.01)
"""Like one large GPU with a model of some billion parameters."""
ROOM = {
    "num_blocks": 4001,
    "max_model_len": 16_384,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
}
"""Where nothing else is given, nothing is scarce."""

Load = Callable[[Simulation], Any]


@dataclass(frozen=True)
class Case:
    """One run of an engine, or of several ranks, and what must be said of it."""

    name: str
    load: Load
    """Has the requests arrive, and runs the engine to its end."""
    engine: dict[str, Any]
    """Options of ``Simulation``."""
    code: tuple[str, ...]
    """Codes of which one must lead; empty: no finding may be a warning."""
    says: tuple[str, ...] = ()
    """Regular expressions that verdict, holder, evidence and advice of the leading finding must match."""
    silent: tuple[str, ...] = ()
    """Regular expressions that nothing on the page may match."""
    exits: dict[str, int] = field(default_factory=dict)
    """Cause to how many refusals there are at least: the load does what it is meant to do."""
    preemptions: int = 0
    """At least."""
    ranks: int = 1
    missing: str = ""
    """Why no answer is expected yet."""


CASES: dict[str, Case] = {}
"""By name: the number in the list of questions, then a word; a letter after the number is a variation."""


def case(
    name: str, *code: str, engine: dict[str, Any] | None = None, **expected: Any
) -> Callable[[Load], Load]:
    """Register a load as a case; its engine has ``ROOM`` where ``engine`` says nothing else."""

    def register(load: Load) -> Load:
        assert name not in CASES
        options = {"times": MACHINE, **ROOM, **(engine or {})}
        CASES[name] = Case(name, load, options, code, **expected)
        return load

    return register


def record(one: Case, folder: Path, **changes: Any) -> Path:
    """Run a case into a run folder; returns it.

    Args:
        one: The case.
        folder: Does not exist yet.
        changes: Options of the engine that replace the case's.
    """
    before = os.environ.get("SCHEDTRACE_RUN_DIR")
    os.environ["SCHEDTRACE_RUN_DIR"] = str(folder)
    try:
        for rank in range(one.ranks):
            with VirtualClock() as clock:
                engine = Simulation(clock, traced_class, rank=rank, **{**one.engine, **changes})
                one.load(engine)
                engine.close()
    finally:
        if before is None:
            del os.environ["SCHEDTRACE_RUN_DIR"]
        else:
            os.environ["SCHEDTRACE_RUN_DIR"] = before
    return folder
