"""A ``schedule()`` of one's own, for text models without adapters, drafts, connectors or pipeline stages.

Written for vLLM 0.32. Where a thing is vLLM's, it has vLLM's name: then a reader knows what it is, and so
does schedtrace.
"""

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.request import Request, RequestStatus


class RankBalanceScheduler(Scheduler):
    """Admits a request only while every data-parallel rank runs fewer than ``max_running_per_rank``."""

    running_on_ranks: Callable[[], list[int]]
    """How many requests run on each rank; to be replaced by a function that knows the other ranks."""
    max_running_per_rank: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything as vLLM does it, then the two fields above."""
        super().__init__(*args, **kwargs)
        self._refuse_what_is_beyond_this_example()
        self.running_on_ranks = lambda: [len(self.running)]
        self.max_running_per_rank = self.max_num_active_reqs

    def schedule(  # noqa: C901, PLR0912, PLR0915  # in one piece, to be read beside vLLM's own
        self,
        throttle_prefills: bool = False,  # noqa: ARG002  # vLLM passes it
    ) -> SchedulerOutput:
        """Whoever runs first, then those who wait, in the order of their arrival."""
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        scheduled_timestamp = time.monotonic()
        token_budget = self.max_num_scheduled_tokens
        if self._pause_state == PauseState.PAUSED_ALL:
            token_budget = 0
        num_scheduled_tokens: dict[str, int] = {}
        req_to_new_blocks: dict[str, Any] = {}
        scheduled_new_reqs: list[Request] = []
        scheduled_resumed_reqs: list[Request] = []
        preempted_reqs: list[Request] = []

        req_index = 0
        while req_index < len(self.running) and token_budget > 0:
            request = self.running[req_index]
            num_new_tokens = request.num_tokens - request.num_computed_tokens
            num_new_tokens = min(num_new_tokens, token_budget)
            while True:
                new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
                if new_blocks is not None:
                    break
                preempted_req = self.running.pop()
                self._preempt_request(preempted_req, scheduled_timestamp)
                preempted_reqs.append(preempted_req)
                if preempted_req == request:
                    break
            if new_blocks is None:
                break
            req_to_new_blocks[request.request_id] = new_blocks
            num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens
            req_index += 1
        scheduled_running_reqs = self.running[:req_index]

        if not preempted_reqs and self._pause_state == PauseState.UNPAUSED:
            while self.waiting and token_budget > 0:
                if len(self.running) >= self.max_num_active_reqs:
                    break
                balance_flag = max(self.running_on_ranks()) >= self.max_running_per_rank
                if balance_flag:
                    break
                request = self.waiting.peek_request()
                ready_to_schedule = self._handle_blocked_waiting_request(request)
                if not ready_to_schedule:
                    break
                blocks, num_computed_tokens, boundary = self.kv_cache_manager.get_computed_blocks(request)
                num_new_tokens = request.num_tokens - num_computed_tokens
                if not self.scheduler_config.enable_chunked_prefill and num_new_tokens > token_budget:
                    break
                num_new_tokens = min(num_new_tokens, token_budget)
                new_blocks = self.kv_cache_manager.allocate_slots(
                    request,
                    num_new_tokens,
                    num_new_computed_tokens=num_computed_tokens,
                    new_computed_blocks=blocks,
                    full_sequence_must_fit=self.scheduler_reserve_full_isl,
                    has_scheduled_reqs=bool(self.running),
                )
                if new_blocks is None:
                    break
                self._admit(request, num_computed_tokens, scheduled_timestamp)
                request.shared_prefix_boundary = boundary
                resumed = request.status == RequestStatus.PREEMPTED and not self.use_v2_model_runner
                (scheduled_resumed_reqs if resumed else scheduled_new_reqs).append(request)
                request.status = RequestStatus.RUNNING
                req_to_new_blocks[request.request_id] = self.kv_cache_manager.get_blocks(request.request_id)
                num_scheduled_tokens[request.request_id] = num_new_tokens
                token_budget -= num_new_tokens

        scheduler_output = SchedulerOutput(
            scheduled_new_reqs=[
                self._new_request_data(request, req_to_new_blocks) for request in scheduled_new_reqs
            ],
            scheduled_cached_reqs=self._make_cached_request_data(
                scheduled_running_reqs, scheduled_resumed_reqs, num_scheduled_tokens, {}, req_to_new_blocks
            ),
            num_scheduled_tokens=num_scheduled_tokens,
            total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )
        self.prev_step_scheduled_req_ids = set(num_scheduled_tokens)
        self._update_after_schedule(scheduler_output)
        return scheduler_output

    def _admit(self, request: Request, num_computed_tokens: int, scheduled_timestamp: float) -> None:
        """From the waiting queue to those that run, with a note for vLLM's statistics."""
        self.waiting.pop_request()
        self.deferred_waiting.discard(request)
        self.running.append(request)
        request.num_computed_tokens = num_computed_tokens
        self.kv_cache_manager.record_prefix_cache_stats(request, num_computed_tokens)
        if request.prefill_stats and not request.num_preemptions:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=num_computed_tokens,
                num_external_cached_tokens=0,
            )
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, scheduled_timestamp)

    def _new_request_data(self, request: Request, req_to_new_blocks: dict[str, Any]) -> NewRequestData:
        """Resume requests as new ones, with all of their tokens, for the second model runner."""
        block_ids = req_to_new_blocks[request.request_id].get_block_ids()
        token_ids = request.all_token_ids.copy() if self.use_v2_model_runner else None
        return NewRequestData.from_request(request, block_ids, token_ids)

    def _refuse_what_is_beyond_this_example(self) -> None:
        config, scheduling = self.vllm_config, self.scheduler_config
        beyond = {
            "LoRA": self.lora_config,
            "speculative decoding": config.speculative_config,
            "a KV connector": self.connector,
            "a model that is no plain decoder": self.is_encoder_decoder
            or config.model_config.is_multimodal_model
            or len(self.kv_cache_config.kv_cache_groups) > 1,
            "pipeline parallelism": self.use_pp,
            "asynchronous scheduling": scheduling.async_scheduling,
            "a policy other than fcfs": scheduling.policy != "fcfs",
            "long_prefill_token_threshold": scheduling.long_prefill_token_threshold,
        }
        if found := [what for what, asked in beyond.items() if asked]:
            msg = f"{type(self).__name__} is too simple for {', '.join(found)}"
            raise ValueError(msg)
