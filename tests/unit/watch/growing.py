"""A trace that grows under a fake clock: what it looks like is known to the step."""

import os
from pathlib import Path

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Step
from schedtrace.watch.find import Target
from schedtrace.watch.session import WatchSession
from tests.deltas import Deltas
from tests.makers import arrival, encoded, header, step

ANCHOR_S = 1_700_000_000
"""Unix time at which the traces' clocks read 0."""
STEP_US = 100_000
LATER_S = 2**32
"""A modification time that every clock has before it."""


class Growing:
    """Engine ``rank``: from ``begin`` to ``end`` steps, ten a second; ``a`` and ``b`` decode, others wait.

    Args:
        folder: The run folder.
        rank: Data-parallel rank.
        waiting: Ids of those who wait for a seat from the first step on.
    """

    def __init__(self, folder: Path, rank: int = 0, waiting: tuple[str, ...] = ("c",), **fields):
        self.path = folder / f"engine-{rank}.jsonl"
        folder.mkdir(exist_ok=True)
        self.names, self.waiting = {"a": 100, "b": 100}, waiting
        self.at, self.deltas = 0, Deltas(10)
        head = header(
            engine_rank=rank,
            wall_anchor_us=ANCHOR_S * 1_000_000,
            max_num_running_reqs=2,
            scheduler_config={"max_num_seqs": 2, "enable_chunked_prefill": True, "policy": "fcfs"},
            **fields,
        )
        self.path.write_bytes(encoded(head) + b"\n")

    def lines(self, steps: int) -> list[bytes]:
        """The lines of the next steps."""
        made = []
        for number in range(self.at, self.at + steps):
            first = number == 0
            made.append(encoded(self.deltas.line_of(self.one(number, first=first))))
        self.at += steps
        return made

    def one(self, number: int, *, first: bool) -> Step:
        got = self.names if first else dict.fromkeys(self.names, 1)
        full = Exit("waiting", "condition", Cause.MAX_NUM_SEQS, budget_left=1000 - sum(got.values()))
        made = step(
            number,
            start=number * STEP_US,
            back=STEP_US - 1000,
            got=got,
            new="ab" if first else "",
            waiting=len(self.waiting),
            ended=full if self.waiting else Cause.QUEUE_EMPTY,
            kv_blocks_free_after=60,
            max_num_running_reqs=2,
            prefill_tokens=200 if first else 0,
            decode_tokens=0 if first else 2,
            output_tokens=2,
            arrived=[arrival(name, -500, -400) for name in (*"ab", *self.waiting)] if first else [],
        )
        for at, row in enumerate(made.requests):
            made.requests[at].computed_tokens = 0 if first else 99 + number
            assert row.request_id in self.names
        return made

    def grow(self, steps: int, tail: bytes = b"") -> None:
        """Append the next steps, and perhaps a part of a line."""
        self.append(*self.lines(steps), tail=tail)

    def append(self, *lines: object, tail: bytes = b"") -> None:
        with self.path.open("ab") as file:
            file.write(b"".join(encoded(line) + b"\n" for line in lines) + tail)

    @property
    def now_s(self) -> float:
        """When the last step was over."""
        return ANCHOR_S + self.at * STEP_US / 1e6


def session_of(path: Path, growing: Growing, *, only: bool = True, judged: bool = True) -> WatchSession:
    """Looks at it with a clock that shows when its last step was over; files are as old as that says."""

    def clock() -> float:
        for file in path.rglob("engine-*.jsonl"):
            os.utime(file, (growing.now_s, growing.now_s))
        return growing.now_s

    session = WatchSession(Target(path, only), clock)
    if not judged:
        session.judges.clear()
    return session
