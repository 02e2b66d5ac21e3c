"""An engine that keeps every decision its scheduler takes, to compare two of them step by step."""

from functools import partial
from itertools import compress, zip_longest
from typing import Any

from schedtrace.simulate import Driver as Engine
from tests.contract.loads import under_load

Decision = dict[str, Any]
LOAD = ("aborts", 1)
"""For ``decisions``: with all that most tests of the recorder need, preemptions among it."""


class Deciding(Engine):
    """Notes tokens, block ids, queues and results of everything that is done to the scheduler."""

    def __init__(self, wrap: Any = None, **options: Any) -> None:
        super().__init__(wrap, **options)
        self.decisions: list[Decision] = []

    def schedule(self, *args: Any) -> Any:
        ran = set(self._ids("running"))
        output = super().schedule(*args)
        cached = output.scheduled_cached_reqs
        decision = {
            "tokens": list(output.num_scheduled_tokens.items()),
            "new": [
                (new.req_id, new.num_computed_tokens, new.block_ids, len(new.prompt_token_ids))
                for new in output.scheduled_new_reqs
            ],
            "cached": list(
                zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
            ),
            "resumed": _resumed(cached),
            "finished": output.finished_req_ids,
            "preempted": getattr(output, "preempted_req_ids", ran.difference(self._ids("running"))),
            "in_flight": len(self.in_flight),
        }
        self.decisions.append(decision | self._queues())
        assert "allocate_slots" not in vars(
            self.scheduler.kv_cache_manager
        )  # nothing of the recorder's stays
        return output

    def update(self) -> Any:
        outputs = super().update()
        told = [
            (output.request_id, output.new_token_ids, output.finish_reason)
            for of_client in outputs.values()
            for output in of_client.outputs
        ]
        self.decisions.append({"told": told} | self._queues())
        return outputs

    def abort(self, request_id: str) -> None:
        aborted = request_id in self.scheduler.requests and request_id
        super().abort(request_id)
        self.decisions.append({"aborted": aborted} | self._queues())

    def _queues(self) -> Decision:
        scheduler = self.scheduler
        usage, blocks = scheduler.kv_cache_manager.usage, self.config.cache_config.num_gpu_blocks
        return {
            "running": self._ids("running"),
            "waiting": self._ids("waiting"),
            "holding": self._ids("kv_holding_waiting"),
            "skipped": self._ids("skipped_waiting"),
            "deferred": {*self._ids("deferred_waiting"), *self._ids("skipped_waiting")},
            "wants": scheduler.waiting.peek_request().num_tokens if scheduler.waiting else None,
            "usage": usage,
            "free": round((1 - usage) * (blocks - 1)),  # the null block is nobody's
        }

    def _ids(self, queue: str) -> list[str]:
        """Who is in a queue of the scheduler; nobody is in one that this vLLM does not have."""
        return [request.request_id for request in getattr(self.scheduler, queue, ())]


def _resumed(cached: Any) -> set[str]:
    """Who goes on after a preemption; to vLLM 0.11.0 there is a list of booleans."""
    if hasattr(cached, "resumed_req_ids"):
        return set(cached.resumed_req_ids)
    return set(compress(cached.req_ids, cached.resumed_from_preemption))


def decisions(name: str, seed: int, wrap: Any = None) -> list[Decision]:
    """All decisions taken for one load."""
    return list(under_load(partial(Deciding, wrap), name, seed).decisions)


def num_steps(taken: list[Decision]) -> int:
    """Return the number of decisions that are those of a step."""
    return sum("tokens" in decision for decision in taken)


def first_difference(one: list[Decision], other: list[Decision]) -> int | None:
    """Where two records part; None where they are equal to the end."""
    pairs = enumerate(zip_longest(one, other))
    return next((number for number, (left, right) in pairs if left != right), None)


def failing_from(call: int, function: Any, error: Exception) -> Any:
    """``function`` until its call number ``call``; from then on it raises."""
    calls = iter(range(call))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return function(*args, **kwargs)

    return failing
