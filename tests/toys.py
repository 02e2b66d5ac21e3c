"""Schedulers of a few lines in modules of their own, to be proven, marked and run."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from schedtrace.record.capture import Capture
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.marks.exits import to_lines
from schedtrace.record.marks.marking import _with_marks
from schedtrace.record.metrics.tally import Tally
from schedtrace.record.queues import READERS, Reader

TOY = """
class Toy:
    def schedule(self, token_budget=10):
        req_index = 0
        num_scheduled_tokens = {}
        while req_index < len(self.running) and token_budget > 0:
            request = self.running[req_index]
            req_index += 1
            if request.sits_out:
                continue
            num_new_tokens = min(request.wants, token_budget)
            num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens
        return num_scheduled_tokens, 0.0, token_budget in {1, 2}
"""
"""The source of a scheduler of what runs, in vLLM's words."""


@contextmanager
def module_of(folder: Path, source: str | bytes) -> Iterator[ModuleType]:
    """A module with this source, imported from a file in ``folder``, for as long as it is needed."""
    path = folder / "toy.py"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    spec: Any = importlib.util.spec_from_file_location("toy", path)
    module = sys.modules["toy"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["toy"]


class Now:
    """The test's thread is the engine's: it is always between two steps."""

    def do(self, what: Any, _timeout_s: float) -> None:
        what()


class Totals:
    """A receiver of metrics that keeps the totals of each recording, and publishes nothing."""

    histories: Any = None

    def __init__(self, make: Callable[[], Tally] = Tally) -> None:
        self.make, self.tallies = make, []

    def new_tally(self) -> Tally:
        self.tallies.append(self.make())
        return self.tallies[-1]

    def publish(self, tally: Tally) -> None:
        assert tally is self.tallies[-1]


def core_of(engine: Any) -> Any:
    """vLLM's engine core, as far as what attaches to it needs it."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(), model_config=SimpleNamespace(model="tiny"))
    return SimpleNamespace(scheduler=engine.scheduler, batch_queue=engine.in_flight, vllm_config=config)


class Queue(list):
    """vLLM's request queue, as far as anybody here needs it; one that the recorder can read."""

    def peek_request(self) -> Any:
        return self[0]

    def pop_request(self) -> Any:
        return self.pop(0)


READERS[Queue] = Reader(len, lambda queue: queue[0], list, list)


def request(request_id: str, **facts: Any) -> Any:
    """A request with whatever facts a toy looks at."""
    return SimpleNamespace(request_id=request_id, status=SimpleNamespace(name="RUNNING"), **facts)


def capture_of(**fields: Any) -> Capture:
    """A capture with these fields."""
    capture = Capture()
    rare = {"inferred": None, "preempted": (), "state": (), "happened": None, "ids": (), "result": None}
    for name, value in (rare | fields).items():
        setattr(capture, name, value)
    return capture


def told(
    owner: type, *given: Any, budget: int = 0, recorder: Any = None, **facts: Any
) -> tuple[Any, list[Any], list[Any]]:
    """What a marked ``schedule(*given)`` returns, and the exits and caps it notes.

    Args:
        owner: A class with a ``schedule()`` to be marked.
        given: Its arguments.
        budget: What an exit says where no ``token_budget`` is in sight.
        recorder: What keeps what is noted.
        facts: Attributes of the scheduler.
    """
    marked, _ = _with_marks(owner)
    assert marked is not None
    scheduler: Any = marked.__new__(marked)
    facts_noted = SimpleNamespace(head_refused=lambda *_: None)
    recorder = recorder or SimpleNamespace(
        num_waiting=lambda scheduler: len(scheduler.waiting), facts=facts_noted
    )
    vars(recorder).update(events=[], queued=True)
    vars(scheduler).update({"waiting": Queue()} | facts)
    RECORDERS.store(scheduler, recorder)
    returned = scheduler.schedule(*given)
    return returned, *to_lines(recorder.events, budget, 0)
