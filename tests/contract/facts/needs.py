"""vLLM's own count of a request's KV blocks beside ``model.kv_need``'s."""

from typing import Any

from schedtrace.model.kv_need import KvNeed
from schedtrace.simulate import Driver


class NeedOf:
    """Steps of an engine in which every scheduled request's blocks and every whole sequence are compared."""

    def __init__(self, driver: Driver, need: KvNeed) -> None:
        self.driver, self.need = driver, need
        self.differences: list[Any] = []
        self.steps_compared = 0
        self.sequences_compared = 0
        coordinator = driver.scheduler.kv_cache_manager.coordinator
        self._ask = coordinator.get_num_blocks_to_allocate
        coordinator.get_num_blocks_to_allocate = self._asked

    def _asked(self, request_id: str, num_tokens: int, *args: Any, **keywords: Any) -> int:
        answer: int = self._ask(request_id, num_tokens, *args, **keywords)
        request = self.driver.requests[request_id]
        hits = any(keywords["new_computed_blocks"])
        if keywords.get("apply_admission_cap") and not request.num_computed_tokens and not hits:
            self.sequences_compared += 1
            self._compare(("sequence", request_id), answer, sum(self.need.sequence(num_tokens) or [-1]))
        return answer

    def compare_step(self) -> None:
        """One turn of the engine's loop."""
        driver = self.driver
        output = driver.schedule()
        managers = driver.scheduler.kv_cache_manager.coordinator.single_type_managers
        for request_id, tokens in output.num_scheduled_tokens.items():
            self.steps_compared += 1
            after = driver.requests[request_id].num_computed_tokens
            held = [
                sum(not block.is_null for block in one.req_to_blocks.get(request_id, ())) for one in managers
            ]
            about = ("held", request_id, after - tokens, after)
            self._compare(about, held, self.need.held(after - tokens, after))
        driver.update()

    def _compare(self, about: Any, vllms: Any, ours: Any) -> None:
        if vllms != ours:
            self.differences.append((about, vllms, ours))
