"""Driver of vLLM's real scheduler and KV cache manager, with made-up model outputs.

Calls follow the order of ``EngineCore``: ``schedule()`` and then ``update_from_output()``, or, with async
scheduling or pipeline parallelism, as many ``schedule()`` calls before each output as vLLM keeps batches in
flight. There is no clock; ``Simulation`` adds one. vLLM itself resolves the configuration of the engine,
which never loads a model.
"""

import atexit
import itertools
import json
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
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
from schedtrace.simulate.executor import STOP_AT, STOP_TOKEN, ModelRunner

TINY_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 1_048_576,
    "torch_dtype": "bfloat16",
}
"""Configuration of a tiny model; scheduling depends only on a model's length, cache groups and encoder."""

SMALL: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
    "enable_prefix_caching": False,
    "block_size": 16,
}
"""Defaults for settings that the caller does not state, small enough to follow by hand."""


def engine_config(
    *,
    num_blocks: int = 1000,
    async_scheduling: bool = False,
    model: str | None = None,
    rank: int = 0,
    experts: int = 0,
    usage_context: str | None = None,
    **engine_args: Any,
) -> Any:
    """Return a ``VllmConfig`` built by ``EngineArgs``.

    Args:
        num_blocks: Number of KV cache blocks, which a real engine determines by profiling the model.
        async_scheduling: Whether two batches are in flight; vLLM itself would never choose this on a CPU.
        model: Folder with a ``config.json``; None for a tiny dense model.
        rank: Data-parallel rank.
        experts: Number of experts of the tiny model. With experts, ``data_parallel_size`` ranks run in
            lock-step; ranks of a dense model are independent engines.
        usage_context: ``LLM_CLASS``, ``OPENAI_API_SERVER``, ...: some defaults depend on it.
        engine_args: Fields of ``EngineArgs``; the others come from ``SMALL`` or are vLLM's defaults.

    Raises:
        ValueError: If vLLM does not accept the arguments.
    """
    arguments = {**SMALL, "load_format": "dummy", "skip_tokenizer_init": True, **engine_args}
    context = None if usage_context is None else UsageContext[usage_context]
    config = EngineArgs(model=model or tiny_model(experts), **arguments).create_engine_config(context)
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = async_scheduling
    if rank:
        config.parallel_config.data_parallel_index = rank
        if experts:
            config.parallel_config.data_parallel_rank = rank
    return config


@cache
def tiny_model(experts: int = 0) -> str:
    """Return a folder with ``TINY_MODEL``, which exists until the process ends.

    Because of ``num_experts`` in its configuration, vLLM treats a model with experts as a mixture of experts.
    """
    folder = Path(tempfile.mkdtemp(prefix="schedtrace-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(
        json.dumps(TINY_MODEL | ({"num_experts": experts} if experts else {}))
    )
    return str(folder)


FULL = {"FullAttention", "MLAAttention", "UniformTypeKVCacheSpecs"}
"""Kinds of cache groups that keep every token, and that a scheduler therefore treats alike."""
_NOTHING = dict.fromkeys(
    ("pooling_params", "eos_token_id", "multi_modal_inputs", "multi_modal_hashes", "multi_modal_placeholders")
)
"""Values for arguments of ``Request`` that have no default in some releases."""


def kv_cache_groups(config: Any) -> list[Any]:
    """Return a single group of full attention layers, as dense models have."""
    return [KVCacheGroupSpec(["layer"], _spec(FullAttentionSpec, config.cache_config.block_size))]


def _spec(kind: type, block_size: int, sliding_window: int | None = None) -> Any:
    shape = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16, "use_mla": False}
    if kind is SlidingWindowSpec:
        shape["sliding_window"] = sliding_window
    return kind(block_size=block_size, **releases.supported_arguments(kind, shape))


def scheduler_arguments(config: Any, groups: list[Any]) -> dict[str, Any]:
    """Return the keyword arguments of ``Scheduler`` that this release accepts."""
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
    """Arguments of vLLM's ``Request``; a release uses those that it supports."""

    arrival_time: float
    """Time in seconds at which the front end received the request."""
    priority: int
    client_index: int
    cache_salt: str
    lora_request: Any
    mm_features: Any
    prompt_embeds: Any
    resumable: bool
    """Whether the request is a streaming session, whose client may send more input."""


class SampledArguments(RequestArguments, total=False):
    """Arguments of a request and of its sampling."""

    stop_at: int | None
    """Number, from 1, of the output token at which the request stops early."""
    structured_outputs: Any
    """Argument of ``SamplingParams``."""


class RequestOptions(SampledArguments, total=False):
    """Options of a made-up request."""

    shared: int
    """Number of the prompt's first tokens that are the same in all requests."""
    text: int | None
    """Number that identifies a text: prompts with the same number have the same tokens."""


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
    """Create vLLM's ``Request``."""
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
    """Return the cache groups of a recorded engine; empty if there is a single group of full attention.

    Raises:
        UsageError: If a kind of layers cannot be built from the trace.
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
        wrap: Function that maps the class that vLLM would choose to the class to build, such as
            ``schedtrace.record.traced.traced_class``; None for vLLM's own class.
        kv_groups: ``KVCacheGroupSpec`` objects of vLLM; None for one group of full attention.
        drafts: Number of tokens that a speculative method proposes per step and request; the scheduler must
            be configured for this (``speculative_config``).
        accepted: Function that maps a request's id and its number of draft tokens to the number of accepted
            ones.
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
        """Maximum number of batches in flight: ``schedule()`` calls before the first output comes back."""
        plain: type = AsyncScheduler if overlapped else Scheduler
        groups = kv_groups or kv_cache_groups(self.config)
        self.scheduler: Any = self._build(wrap(plain) if wrap else plain, groups)
        self.requests: dict[str, Any] = {}
        """Every request that was ever added, as vLLM's ``Request``."""
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
        """Create vLLM's ``Request``.

        Args:
            request_id: Any string.
            prompt: Tokens of the prompt, or their number.
            max_tokens: Maximum number of output tokens.
            shared: Number of the prompt's first tokens that are the same in all requests.
            text: Number that identifies a text; requests with the same number have the same tokens.
            options: Other arguments of the request.
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
        """Add a request (see ``make_request``) to the waiting queue and return it."""
        return self.enqueue(self.make_request(request_id, prompt, max_tokens, **options))

    def enqueue(self, request: Any) -> Any:
        """Add an existing request to the waiting queue and return it."""
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """Abort a request, as if its client had disconnected."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def pause(self, state: str) -> None:
        """Set the pause state: ``UNPAUSED``, ``PAUSED_NEW`` or ``PAUSED_ALL`` (vLLM 0.17 and newer)."""
        self.scheduler.set_pause_state(interface.PauseState[state])

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; all running requests are preempted."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)


class Driver(Engine):
    """Scheduler that is driven call by call; see ``Engine`` for its arguments."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.in_flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
        """Steps in flight: ``SchedulerOutput``, and the tokens that will come back."""

    def schedule(self, *args: Any) -> Any:
        """Call ``schedule()`` and return its ``SchedulerOutput``.

        Every request that completes its prefill or decodes in this step will get one token plus its accepted
        draft tokens.
        """
        output = self.scheduler.schedule(*args)
        self.in_flight.append((output, self.model_runner.execute(output)[1]))
        return output

    def update(self) -> dict[int, Any]:
        """Give the output of the oldest step in flight to the scheduler; return its ``EngineCoreOutputs``."""
        output, sampled = self.in_flight.popleft()
        proposed = self.model_runner.proposed(sampled)
        outputs: dict[int, Any] = self.scheduler.update_from_output(
            output, releases.model_output(sampled, proposed if self.model_runner.drafts else None)
        )
        if proposed:
            releases.tell_drafts(self.scheduler, list(proposed), list(proposed.values()))
        return outputs

    def step(self, *args: Any) -> Any:
        """Run the engine's loop once and return the ``SchedulerOutput``."""
        output = self.schedule(*args)
        if len(self.in_flight) == self.depth:
            self.update()
        return output

    def finish(self, most_steps: int = 3000) -> None:
        """Run steps until every request is finished, then close the engine.

        Raises:
            RuntimeError: If requests are left after the maximum number of steps.
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
