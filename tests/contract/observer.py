"""An engine that keeps its own books, from vLLM's objects alone: what a trace must say."""

from functools import cache
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver as Engine


class _Refusing(KVCacheManager):
    """Remembers whose allocation failed last, and who gave up blocks without being done."""

    refused: str | None = None
    within = False
    """Within ``schedule()``, which frees the blocks of victims only."""
    victims: list[tuple[str, int, str | None]]

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = super().allocate_slots(request, *args, **kwargs)
        if blocks is None:
            self.refused = request.request_id
        return blocks

    def free(self, request: Any) -> Any:
        if self.within:
            self.victims.append((request.request_id, request.num_computed_tokens, self.refused))
        return super().free(request)


@cache
def observed_class(plain: type) -> type:
    """``plain`` with a list of its preemptions: victim, lost tokens, for whom, how many so far."""

    class Observed(plain):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.kv_cache_manager.__class__ = _Refusing
            self.kv_cache_manager.victims = []
            self.preemptions = []

        def schedule(self, *args: Any) -> Any:
            self.within = self.kv_cache_manager.within = True
            output = super().schedule(*args)
            self.within = self.kv_cache_manager.within = False
            victims, self.kv_cache_manager.victims = self.kv_cache_manager.victims, []
            if not hasattr(plain, "_preempt_request"):  # to vLLM 0.11
                self.preemptions += [(*victim, None, True) for victim in victims]
            return output

        if hasattr(plain, "_preempt_request"):

            def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
                lost = request.num_computed_tokens
                super()._preempt_request(request, *args, **kwargs)
                wants = self.kv_cache_manager.refused if self.within else None
                noted = (request.request_id, lost, wants, request.num_preemptions, self.within)
                self.preemptions.append(noted)

    return Observed


def _set_aside(scheduler: Any) -> int:
    """Before vLLM 0.31 they are in a queue of their own; before 0.18 they go back to where they were."""
    return len(getattr(scheduler, "deferred_waiting", getattr(scheduler, "skipped_waiting", ())))


class Observer(Engine):
    """A traced engine; afterwards ``steps``, ``rows`` and the like say what was seen from outside.

    Who came or went is noted with the number of the next step, the events of a life with that of theirs.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda plain: traced_class(observed_class(plain)), **options)
        self.steps: list[dict[str, Any]] = []
        self.rows: list[tuple[int, str, int, int, str]] = []
        self.preemptions: list[tuple[Any, ...]] = []
        self.waiting_tokens: list[int | None] = []
        self.came: dict[str, int] = {}
        self.went: dict[str, tuple[int, str]] = {}
        self.delivered: dict[str, int] = {}
        self.first_cached: dict[str, int] = {}
        self.life: dict[str, dict[str, int]] = {}
        self._lost: dict[str, int] = {}
        self._updated = 0

    def add(self, request_id: str, *args: Any, **options: Any) -> None:
        self.came[request_id] = len(self.steps)
        super().add(request_id, *args, **options)

    def abort(self, request_id: str) -> None:
        if request_id in self.scheduler.requests:
            self.went[request_id] = (len(self.steps), "ABORTED")
        super().abort(request_id)

    def schedule(self, *args: Any) -> Any:
        scheduler = self.scheduler
        number, before, was_running = len(self.steps), self._counts(), set(scheduler.running)
        output = super().schedule(*args)
        step = {"step": number} | {f"{name}_before": count for name, count in before.items()}
        step |= {f"{name}_after": count for name, count in self._counts().items()}
        for victim in scheduler.preemptions:
            self.preemptions.append((number, *victim))
            self._lost[victim[0]] = max(self._lost.get(victim[0], 0), victim[1])
        scheduler.preemptions.clear()
        scheduled = output.num_scheduled_tokens
        budget = scheduler.max_num_scheduled_tokens
        step |= {
            "token_budget": budget,
            "remaining_budget": budget - sum(scheduled.values()),
            "total_requests": len(scheduled),
            "max_num_running_reqs": scheduler.max_num_running_reqs,
            "kv_blocks_total": scheduler.cache_config.num_gpu_blocks,
            "num_not_ready_after": _set_aside(scheduler),
            "output_tokens": None,
        }
        step |= dict.fromkeys(("num_new", "num_resumed", "num_continued"), 0)
        step |= dict.fromkeys(("prefill_tokens", "decode_tokens", "recomputed_tokens", "cached_tokens"), 0)
        for request_id, tokens in scheduled.items():
            self._count(step, self.requests[request_id], tokens, was_running)
        self.steps.append(step)
        idle = getattr(scheduler, "num_waiting_for_streaming_input", 0)
        waiting = (*scheduler.waiting, *getattr(scheduler, "skipped_waiting", ()))
        # Of sessions that are idle nobody knows what they will want.
        self.waiting_tokens.append(None if idle else sum(request.num_tokens for request in waiting))
        return output

    def update(self) -> Any:
        outputs = super().update()
        told = [output for of_client in outputs.values() for output in of_client.outputs]
        for output in told:
            count = self.delivered.get(output.request_id, 0)
            self.delivered[output.request_id] = count + len(output.new_token_ids)
            if output.new_token_ids:
                life = self.life[output.request_id]
                life.setdefault("first_token_us", self._updated)
                life["last_token_us"] = self._updated
            if output.finish_reason is not None:
                status = {"length": "LENGTH_CAPPED", "stop": "STOPPED"}[str(output.finish_reason)]
                self.went[output.request_id] = (len(self.steps), status)
        self.steps[self._updated]["output_tokens"] = sum(len(output.new_token_ids) for output in told)
        self._updated += 1
        return outputs

    def _counts(self) -> dict[str, int]:
        running, waiting = self.scheduler.get_request_counts()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return {"num_running": running, "num_waiting": waiting, "kv_blocks_free": free}

    def _count(self, step: dict[str, Any], request: Any, tokens: int, was_running: set[Any]) -> None:
        """Token by token: which positions are prompt, computed again, or neither."""
        request_id, end = request.request_id, request.num_computed_tokens
        start = end - tokens
        if request in was_running:
            phase, column = "running", "num_continued"
        else:
            phase = "resumed" if request_id in self.first_cached else "new"
            column = f"num_{phase}"
            step["cached_tokens"] += start
            self.first_cached.setdefault(request_id, start)
            self.life.setdefault(request_id, {"scheduled_us": step["step"]})
        step[column] += 1
        self.rows.append((step["step"], request_id, start, tokens, phase))
        prompt, lost = request.num_prompt_tokens, self._lost.get(request_id, 0)
        for position in range(start, end):
            step["prefill_tokens"] += position < prompt
            step["recomputed_tokens"] += position < lost
            step["decode_tokens"] += position >= prompt and position >= lost
