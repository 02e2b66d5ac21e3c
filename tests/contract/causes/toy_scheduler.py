"""A scheduler of somebody else's, with a check that vLLM does not have, and the names of its guards."""

from typing import Any

from schedtrace.record.marks.guards import Guard

GUARDS = [
    Guard(
        module=__name__,
        names=frozenset({"quota"}),
        cause="toy_quota",
        meaning="the step's quota of prompt tokens is spent",
    ),
    Guard(
        module=__name__,
        names=frozenset({"most_counted"}),
        cause="toy_most_counted",
        meaning="the most that is counted of one prompt",
    ),
]
"""Where the entry point leads."""


def with_quota(plain: type) -> Any:
    """A subclass of ``plain`` that admits prompts up to a quota per step; a new one at each call."""

    class WithQuota(plain):
        quota = 100
        most_counted = 60
        """Of one prompt."""

        def schedule(self, *args: Any) -> Any:
            quota, held_back = self.quota, []
            num_scheduled_tokens = {}
            for request in list(self.waiting):
                num_new_tokens = request.num_tokens
                num_new_tokens = min(num_new_tokens, self.most_counted)
                if num_new_tokens > quota:
                    held_back.append(request)
                    continue
                num_scheduled_tokens[request.request_id] = num_new_tokens
                quota -= num_new_tokens
            self.waiting.remove_requests(held_back)
            output = super().schedule(*args)
            self.waiting.prepend_requests(held_back)
            return output

    return WithQuota
