"""What a run was set to do about prefills of ranks in lock-step."""

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Header

SCHEDULER_CLASS = "schedtrace.balance.BalanceScheduler"
"""Of ``schedtrace.balance``, as ``--scheduler-cls`` takes it."""
CAUSE = str(Cause.RANK_BALANCE)
"""The cause of a wait while the gate of balance scheduling is closed."""


def balanced(header: Header) -> bool:
    """Whether a scheduler that balances ranks ran: that of schedtrace, or vllm-ascend's."""
    names = (header.scheduler_class, str(header.scheduler_config.get("scheduler_cls")))
    return any("balance" in name.lower() for name in names)


def prefill_interval(header: Header) -> int | None:
    """``prefill_schedule_interval``; None for a vLLM without it (before 0.24)."""
    value = header.scheduler_config.get("prefill_schedule_interval")
    return value if isinstance(value, int) else None
