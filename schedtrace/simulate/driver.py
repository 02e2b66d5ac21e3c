"""Drives vLLM's real scheduler and KV cache manager: only the model's outputs are made up.

The calls come in the order of ``EngineCore``: ``schedule()`` and then ``update_from_output()``, or, with
async scheduling or pipeline parallelism, as many ``schedule()`` calls before each output as vLLM keeps
batches in flight. There is no clock: ``Simulation`` adds one.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch
from vllm import SamplingParams
from vllm.v1.core.sched import interface
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from schedtrace.errors import UsageError
from schedtrace.model.trace_facts import CacheGroup
from schedtrace.simulate import releases
from schedtrace.simulate.config import engine_config
from schedtrace.simulate.executor import STOP_AT, STOP_TOKEN, ModelRunner

FULL = {"FullAttention", "MLAAttention", "UniformTypeKVCacheSpecs"}
"""Kinds of cache groups that keep every token, so that a scheduler treats them alike."""
_NOTHING = dict.fromkeys(
    ("pooling_params", "eos_token_id", "multi_modal_inputs", "multi_modal_hashes", "multi_modal_placeholders")
)
"""Arguments of ``Request`` that have no default in some release."""


def kv_cache_groups(config: Any) -> list[Any]:
    """Return a single group of full attention layers, as dense models have it."""
    return [KVCacheGroupSpec(["layer"], _spec(FullAttentionSpec, config.cache_config.block_size))]


def _spec(kind: type, block_size: int, sliding_window: int | None = None) -> Any:
    shape = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16, "use_mla": False}
    if kind is SlidingWindowSpec:
        shape["sliding_window"] = sliding_window
    return kind(block_size=block_size, **releases.supported_arguments(kind, shape))


def scheduler_arguments(config: Any, groups: list[Any]) -> dict[str, Any]:
    """Return the keyword arguments of ``Scheduler``; each release takes those that it knows."""
    block_size, hash_block_size = releases.block_sizes(config, groups)
    arguments = {
        "vllm_config": config,
        "kv_cache_config": releases.kv_cache_config(config, groups),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": block_size,
        "hash_block_size": hash_block_size,
        "log_stats": True,
    }
    return releases.supported_arguments(Scheduler.__init__, arguments)


class RequestArguments(TypedDict, total=False):
    """Arguments of vLLM's ``Request``, as far as its release has them."""

    arrival_time: float
    """Time at which the front end took it in, in seconds."""
    priority: int
    client_index: int
    cache_salt: str
    lora_request: Any
    mm_features: Any
    prompt_embeds: Any
    resumable: bool
    """Whether it is a streaming session, whose client may send more."""


class SampledArguments(RequestArguments, total=False):
    """Arguments of a request and of its sampling."""

    stop_at: int | None
    """Output token at which it stops early."""
    structured_outputs: Any
    """Argument of ``SamplingParams``."""


class RequestOptions(SampledArguments, total=False):
    """Options of a made-up request."""

    shared: int
    """Number of the prompt's first tokens that are the same in all requests."""
    text: int | None
    """A number: requests with the same one have the same tokens."""


def make_request(
    request_id: str,
    tokens: list[int],
    max_tokens: int,
    stop_token: int,
    hasher: Any,
    *,
    stop_at: int | None = None,
    structured_outputs: Any = None,
    **arguments: Unpack[RequestArguments],
) -> Any:
    """Make vLLM's ``Request``."""
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        stop_token_ids=[stop_token],
        extra_args={STOP_AT: stop_at},
        **releases.structured(structured_outputs),
    )
    available = {**_NOTHING, "block_hasher": hasher, **releases.structured_request(params), **arguments}
    return Request(
        request_id,
        tokens,
        sampling_params=params,
        **releases.supported_arguments(Request.__init__, available),
    )


def recorded_groups(groups: Sequence[CacheGroup], block_size: int) -> list[Any]:
    """Return the cache groups of a recorded engine; empty where there is only one of full attention.

    Raises:
        UsageError: If a kind of layers that cannot be built from what a trace says.
    """
    if {group.kind for group in groups} <= FULL and len(groups) <= 1:
        return []
    built = []
    for number, group in enumerate(groups):
        kind = {"SlidingWindow": SlidingWindowSpec, **dict.fromkeys(FULL, FullAttentionSpec)}.get(group.kind)
        if kind is None:
            msg = f"the model has {group.kind} layers, whose KV cache cannot be simulated yet"
            raise UsageError(msg)
        spec = _spec(kind, group.block_size or block_size, group.window)
        built.append(KVCacheGroupSpec([f"layer.{number}"], spec))
    return built


class Engine:
    """vLLM's scheduler and KV cache manager for a configuration; subclasses drive them.

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
        ValueError: If vLLM does not accept the options.
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
        self.model_runner = ModelRunner(drafts, accepted)
        overlapped = self.config.scheduler_config.async_scheduling
        self.depth: int = getattr(self.config, "max_concurrent_batches", 2 if overlapped else 1)
        """``schedule()`` calls before the first output comes back: batches in flight at once."""
        plain: type = AsyncScheduler if overlapped else Scheduler
        groups = kv_groups or kv_cache_groups(self.config)
        self.scheduler: Any = self._build(wrap(plain) if wrap else plain, groups)
        self.requests: dict[str, Any] = {}
        """Every request ever added, as vLLM's ``Request``."""
        caching = self.config.cache_config.enable_prefix_caching
        self._hasher = (
            releases.block_hasher(releases.block_sizes(self.config, groups)[1]) if caching else None
        )
        self._texts = itertools.count()

    def _build(self, scheduler_class: type, groups: list[Any]) -> Any:
        """Build the scheduler."""
        return scheduler_class(**scheduler_arguments(self.config, groups))

    def make_request(
        self,
        request_id: str,
        prompt: int | list[int] = 10,
        max_tokens: int = 4,
        *,
        shared: int = 0,
        text: int | None = None,
        **options: Unpack[SampledArguments],
    ) -> Any:
        """Make vLLM's ``Request``.

        Args:
            request_id: Any string.
            prompt: Its tokens, or how many.
            max_tokens: Output tokens at most.
            shared: How many of the prompt's first tokens are the same in all requests.
            text: A number: requests with the same one have the same tokens.
            options: Its other arguments.
        """
        number = next(self._texts) if text is None else text
        if isinstance(prompt, int):
            prompt = [100] * shared + [101 + number % 1800] * (prompt - shared)
        options.setdefault("arrival_time", time.time())
        return make_request(request_id, prompt, max_tokens, STOP_TOKEN, self._hasher, **options)

    def add(
        self,
        request_id: str,
        prompt: int | list[int] = 10,
        max_tokens: int = 4,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Put a request (see ``make_request``) into the waiting queue; returns it."""
        return self.enqueue(self.make_request(request_id, prompt, max_tokens, **options))

    def enqueue(self, request: Any) -> Any:
        """Put a request that was made before into the waiting queue; returns it."""
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """Abort a request whose client went away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def pause(self, state: str) -> None:
        """Set the pause state: ``UNPAUSED``, ``PAUSED_NEW`` or ``PAUSED_ALL`` (vLLM 0.17 and newer)."""
        self.scheduler.set_pause_state(interface.PauseState[state])

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; everything that runs is preempted."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)


class Driver(Engine):
    """A scheduler driven call by call; see ``Engine`` for how it is made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.in_flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
        """``SchedulerOutput`` and the tokens that will come back for it."""

    def schedule(self, *args: Any) -> Any:
        """Call ``schedule()`` and return its ``SchedulerOutput``.

        Every request that ends its prefill or decodes in it will be given one token, and its accepted drafts.
        """
        output = self.scheduler.schedule(*args)
        self.in_flight.append((output, self.model_runner.execute(output)[1]))
        return output

    def update(self) -> dict[int, Any]:
        """Give the scheduler the output of the oldest step in flight; return its ``EngineCoreOutputs``."""
        output, sampled = self.in_flight.popleft()
        proposed = self.model_runner.proposed(sampled)
        outputs: dict[int, Any] = self.scheduler.update_from_output(
            output, releases.model_output(sampled, proposed if self.model_runner.drafts else None)
        )
        if proposed:
            releases.tell_drafts(self.scheduler, list(proposed), list(proposed.values()))
        return outputs

    def step(self, *args: Any) -> Any:
        """Run a turn of the engine's loop and return the ``SchedulerOutput``."""
        output = self.schedule(*args)
        if len(self.in_flight) == self.depth:
            self.update()
        return output

    def finish(self, most_steps: int = 3000) -> None:
        """Step until every request is done, then close.

        Raises:
            RuntimeError: If requests are left after so many steps.
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
