"""Balance scheduling, an experiment: ranks in lock-step admit requests together.

``closed`` is the gate, ``balanced`` puts it before a scheduler class of vLLM, ``BalanceScheduler`` is for
``--scheduler-cls``. See ``docs/balance.md``.
"""

from schedtrace.balance.scheduler import SCHEDULER_CLS, BalanceScheduler, balanced, closed

__all__ = ["SCHEDULER_CLS", "BalanceScheduler", "balanced", "closed"]
