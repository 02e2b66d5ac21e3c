"""Traced plays of the families' loads, each made once for all workers of a test run."""

import fcntl
import pickle
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.timeline.timeline import Timeline, make_timeline
from tests.contract.deciding import Deciding, Decision
from tests.contract.loads import under_load


class Witness(Deciding):
    """Looks at vLLM's own queues after each ``schedule()``, and at what comes back: nothing of the trace."""

    def __init__(self, **options: Any) -> None:
        super().__init__(traced_class, **options)
        self.seen: list[dict[str, str]] = []
        """Of each step: request to what it is in."""
        self.queues: list[list[str]] = []
        """Of each step: who waits after it, in order."""
        self.outputs: Counter[str] = Counter()
        """Of each request: how often tokens of it came back."""
        self.fresh: set[str] = set()
        """Admitted to compute more than its next token, and no token has come back since."""
        self.had: dict[str, int] = {}
        """Tokens that each had computed when it was last seen running."""

    def schedule(self, *args: Any) -> Any:
        output = super().schedule(*args)
        got = output.num_scheduled_tokens
        self.fresh |= {request.req_id for request in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        found = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.fresh |= {
            name
            for name in cached.resumed_req_ids
            if found[name] < max(self.had.get(name, 0), self.requests[name].num_prompt_tokens)
        }
        queued = {r.request_id: r for r in (*self.scheduler.kv_holding_waiting, *self.scheduler.waiting)}
        now = {name: "preempted" if r.num_preemptions else "waiting" for name, r in queued.items()}
        for request in self.scheduler.running:
            name = request.request_id
            busy = "computing" if name in self.fresh else "decode"
            now[name] = busy if name in got else "nothing"
        self.seen.append(now)
        self.queues.append(list(queued))
        return output

    def update(self) -> Any:
        told = super().update()
        self.had |= {request.request_id: request.num_computed_tokens for request in self.scheduler.running}
        for outputs in told.values():
            returned = [one.request_id for one in outputs.outputs if one.new_token_ids]
            self.fresh.difference_update(returned)
            self.outputs.update(returned)
        return told


@dataclass
class Play:
    """What a witness saw of a load, and the trace of it."""

    name: str
    folder: Path
    depth: int
    seen: list[dict[str, str]]
    queues: list[list[str]]
    outputs: Counter[str]
    requests: list[str]
    decisions: list[Decision]

    @cached_property
    def trace(self) -> Any:
        [trace] = read_run(self.folder).traces
        return trace

    @cached_property
    def timeline(self) -> Timeline:
        return make_timeline(self.trace)


def witnessed(home: Path, name: str, seed: int) -> Play:
    """A family's load, played by whoever asks first and kept below ``home`` for the others."""
    folder = home / f"{name}-{seed}"
    kept = folder.with_suffix(".pickle")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_bytes(pickle.dumps(_play(folder, name, seed)))
    return pickle.loads(kept.read_bytes())  # noqa: S301  # of this test run


def _play(folder: Path, name: str, seed: int) -> Play:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
        engine = under_load(Witness, name, seed)
    seen = engine.seen, engine.queues, engine.outputs, list(engine.requests)
    return Play(name, folder, engine.depth, *seen, engine.decisions)
