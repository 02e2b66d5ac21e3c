"""Pieces of a ``schedule()`` in vLLM's words."""

RUNNING = """\
while req_index < len(self.running) and token_budget > 0:
    request = self.running[req_index]
    num_scheduled_tokens[request.request_id] = 1
    {}
"""
WAITING = """\
while self.waiting and token_budget > 0:
    request = self.waiting.peek_request()
    {}
    new_blocks = self.kv_cache_manager.allocate_slots(request, 1)
"""
RUNNING_END = (
    "running",
    "condition",
    ("(loop done)", "token_budget"),
    "req_index < len(self.running) and token_budget > 0",
    1,
)
WAITING_END = (
    "waiting",
    "condition",
    ("queue_empty", "token_budget"),
    "self.waiting and token_budget > 0",
    1,
)


def within(loop, *lines):
    """The loop with these lines in its middle."""
    return loop.format("\n    ".join(lines))
