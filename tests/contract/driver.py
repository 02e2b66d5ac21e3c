"""Drives vLLM's real scheduler and KV cache manager without a model: its outputs are made by hand.

The calls come in the order of ``EngineCore``: ``schedule()`` and then ``update_from_output()``, or, with
async scheduling, one more ``schedule()`` before each output (two batches in flight).
"""

from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = Path(__file__).parents[2] / "examples" / "tiny-qwen3"
BLOCK_SIZE = 16
TOKEN, STOP_TOKEN = 7, 8
ARRIVAL_S = 1_000_000.0


def engine_config(*, num_blocks: int = 1000, async_scheduling: bool = False, **engine_args: Any) -> Any:
    """vLLM's own resolved configuration; what is not given is small."""
    given = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
        "enable_prefix_caching": False,
        "block_size": BLOCK_SIZE,
        **engine_args,
    }
    arguments = EngineArgs(model=str(MODEL), load_format="dummy", skip_tokenizer_init=True, **given)
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = async_scheduling  # the CPU platform forces False before
    return config


def scheduler_arguments(config: Any) -> dict[str, Any]:
    """What ``EngineCore`` builds a scheduler with: one group of full attention layers."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(config.cache_config.num_gpu_blocks, [], groups),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": BLOCK_SIZE,
        "hash_block_size": BLOCK_SIZE,
        "log_stats": True,
    }


@cache
def block_hasher() -> Any:
    """As ``EngineCore`` makes it when prefix caching is on."""
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    return get_request_block_hasher(BLOCK_SIZE, hash_function)


class Engine:
    """One scheduler and the hands that work it.

    Args:
        wrap: Makes the class to build from the one vLLM would choose (``traced_class``, or nothing).
        options: ``num_blocks``, ``async_scheduling`` and fields of ``EngineArgs``.
    """

    def __init__(self, wrap: Any = None, **options: Any) -> None:
        config = engine_config(**options)
        plain = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        self.scheduler = (wrap(plain) if wrap else plain)(**scheduler_arguments(config))
        self.depth = 2 if config.scheduler_config.async_scheduling else 1
        self.caching = config.cache_config.enable_prefix_caching
        self.in_flight: deque[tuple[SchedulerOutput, dict[str, list[int]]]] = deque()
        self.requests: dict[str, Request] = {}
        self.stop_at: dict[str, int | None] = {}

    def make_request(self, request_id: str, prompt: int = 10, max_tokens: int = 4, **options: Any) -> Request:
        """A request with ``prompt`` tokens, the first ``shared`` of them common to all requests.

        ``stop_at`` is the output token at which it stops before ``max_tokens``.
        """
        shared, number = options.pop("shared", 0), len(self.requests)
        self.stop_at[request_id] = options.pop("stop_at", None)
        tokens = [100] * shared + [101 + number % 1800] * (prompt - shared)
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=[STOP_TOKEN],
            structured_outputs=options.pop("structured_outputs", None),
        )
        hasher = block_hasher() if self.caching else None
        options.setdefault("arrival_time", ARRIVAL_S + number)
        return Request(request_id, tokens, params, None, block_hasher=hasher, **options)

    def add(self, request_id: str, *args: Any, **options: Any) -> None:
        request = self.make_request(request_id, *args, **options)
        self.requests[request_id] = request
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def pause(self, state: str) -> None:
        self.scheduler.set_pause_state(PauseState[state])

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def schedule(self, *args: Any) -> SchedulerOutput:
        """One ``schedule()``; each request that ends its prefill or decodes will be given one token."""
        output = self.scheduler.schedule(*args)
        sampled = {}
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            place = request.num_output_tokens + max(request.num_output_placeholders, 1)
            token = STOP_TOKEN if place == self.stop_at[request_id] else TOKEN
            sampled[request_id] = [] if request.is_prefill_chunk else [token]
        self.in_flight.append((output, sampled))
        return output

    def update(self) -> dict[int, Any]:
        """The output of the oldest step in flight comes back."""
        output, sampled = self.in_flight.popleft()
        places = {request_id: place for place, request_id in enumerate(sampled)}
        result = ModelRunnerOutput(list(sampled), places, list(sampled.values()))
        return self.scheduler.update_from_output(output, result)

    def step(self, *args: Any) -> None:
        """One turn of the engine's loop."""
        self.schedule(*args)
        if len(self.in_flight) == self.depth:
            self.update()

    def finish(self, most_steps: int = 3000) -> None:
        """Step until every request is done, then close."""
        for _ in range(most_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        while self.in_flight:
            self.update()
        assert not self.scheduler.requests
        self.scheduler.shutdown()
