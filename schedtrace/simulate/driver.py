"""Drives vLLM's real scheduler and KV cache manager: only the model's outputs are made up.

The calls come in the order of ``EngineCore``: ``schedule()`` and then ``update_from_output()``, or, with
async scheduling or pipeline parallelism, as many ``schedule()`` calls before each output as vLLM keeps
batches in flight. There is no clock: ``Simulation`` adds one.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched import interface
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from schedtrace.simulate import releases
from schedtrace.simulate.config import engine_config
from schedtrace.simulate.parts import (
    block_hasher,
    is_prefill_chunk,
    kv_cache_groups,
    make_request,
    scheduler_arguments,
)

TOKEN, STOP_TOKEN = 7, 8


class Driver:
    """One scheduler and the hands that work it.

    Args:
        wrap: Makes the class to build from the one vLLM would choose, for instance
            ``schedtrace.record.traced.traced_class``; None: vLLM's own.
        kv_groups: vLLM's ``KVCacheGroupSpec`` objects; one group of full attention if not given.
        drafts: Tokens that a speculative method proposes per step and request; the scheduler must be
            configured for them (``speculative_config``).
        accepted: How many of a request's drafts are right, from its id and their number.
        options: ``num_blocks``, ``async_scheduling``, ``model``, ``rank`` and any field of vLLM's
            ``EngineArgs``.

    Raises:
        ValueError: vLLM does not accept the options.
    """

    def __init__(
        self,
        wrap: Callable[[type], type] | None = None,
        *,
        kv_groups: list[Any] | None = None,
        drafts: int = 0,
        accepted: Callable[[str, int], int] = lambda _, drafts: drafts,
        **options: Any,
    ) -> None:
        self.config = engine_config(**options)
        overlapped = self.config.scheduler_config.async_scheduling
        plain: type = AsyncScheduler if overlapped else Scheduler
        groups = kv_groups or kv_cache_groups(self.config)
        self.scheduler: Any = (wrap(plain) if wrap else plain)(**scheduler_arguments(self.config, groups))
        self.depth: int = getattr(self.config, "max_concurrent_batches", 2 if overlapped else 1)
        """``schedule()`` calls before the first output comes back: batches in flight at once."""
        self.requests: dict[str, Any] = {}
        """Every request ever added, as vLLM's ``Request``."""
        self.in_flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
        """``SchedulerOutput`` and the tokens that will come back for it."""
        self._stop_at: dict[str, int | None] = {}
        self._drafts, self._accepted = drafts, accepted
        caching = self.config.cache_config.enable_prefix_caching
        self._hasher = block_hasher(self.config) if caching else None

    def make_request(
        self, request_id: str, prompt: int = 10, max_tokens: int = 4, *, shared: int = 0, **options: Any
    ) -> Any:
        """vLLM's ``Request`` with a prompt of so many tokens.

        Args:
            request_id: Any string.
            prompt: Tokens.
            max_tokens: Output tokens at most.
            shared: How many of the prompt's first tokens are the same in all requests.
            options: ``stop_at`` (output token at which it stops early), ``text`` (a number: requests with
                the same one have the same tokens), ``structured_outputs`` (for ``SamplingParams``), or
                arguments of ``Request``: ``priority``, ``lora_request``, ...
        """
        number = options.pop("text", len(self.requests))
        self._stop_at[request_id] = options.pop("stop_at", None)
        tokens = [100] * shared + [101 + number % 1800] * (prompt - shared)
        options.setdefault("arrival_time", time.time())
        return make_request(request_id, tokens, max_tokens, STOP_TOKEN, self._hasher, **options)

    def add(self, request_id: str, prompt: int = 10, max_tokens: int = 4, **options: Any) -> Any:
        """Put a request (see ``make_request``) into the waiting queue; returns it."""
        return self.enqueue(self.make_request(request_id, prompt, max_tokens, **options))

    def enqueue(self, request: Any) -> Any:
        """Put a request that was made before into the waiting queue; returns it."""
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def pause(self, state: str) -> None:
        """``UNPAUSED``, ``PAUSED_NEW`` or ``PAUSED_ALL`` (vLLM 0.17 and newer)."""
        self.scheduler.set_pause_state(interface.PauseState[state])

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; everything that runs is preempted."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def schedule(self, *args: Any) -> Any:
        """One ``schedule()``; returns its ``SchedulerOutput``.

        Every request that ends its prefill or decodes in it will be given one token, and its accepted drafts.
        """
        output = self.scheduler.schedule(*args)
        sampled = {request_id: self._sample(request_id, output) for request_id in output.num_scheduled_tokens}
        self.in_flight.append((output, sampled))
        return output

    def update(self) -> dict[int, Any]:
        """The output of the oldest step in flight comes back; returns vLLM's ``EngineCoreOutputs``."""
        output, sampled = self.in_flight.popleft()
        drafts = [[TOKEN] * self._drafts if tokens else [] for tokens in sampled.values()]
        result = releases.model_output(
            list(sampled), list(sampled.values()), drafts if self._drafts else None
        )
        told: dict[int, Any] = self.scheduler.update_from_output(output, result)
        if self._drafts:
            proposed = {request_id: draft for request_id, draft in zip(sampled, drafts, strict=True) if draft}
            releases.tell_drafts(self.scheduler, list(proposed), list(proposed.values()))
        return told

    def step(self, *args: Any) -> Any:
        """One turn of the engine's loop; returns the ``SchedulerOutput``."""
        output = self.schedule(*args)
        if len(self.in_flight) == self.depth:
            self.update()
        return output

    def finish(self, most_steps: int = 3000) -> None:
        """Step until every request is done, then close.

        Raises:
            RuntimeError: requests are left after so many steps.
        """
        for _ in range(most_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        while self.in_flight:
            self.update()
        if self.scheduler.requests:
            msg = f"{len(self.scheduler.requests)} requests are not done after {most_steps} steps"
            raise RuntimeError(msg)
        self.scheduler.shutdown()

    def _sample(self, request_id: str, output: Any) -> list[int]:
        request = self.requests[request_id]
        if request.num_computed_tokens < request.num_prompt_tokens or is_prefill_chunk(request):
            return []
        place = request.num_output_tokens + max(request.num_output_placeholders, 1)
        if place == self._stop_at[request_id]:
            return [STOP_TOKEN]
        drafted = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        return [TOKEN] * (1 + (self._accepted(request_id, drafted) if drafted else 0))
