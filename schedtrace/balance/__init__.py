"""Experiment with balance scheduling: ranks in lock-step admit requests together.

``closed`` is the gate, ``balanced`` adds it to a scheduler class of vLLM, and ``BalanceScheduler`` is for
``--scheduler-cls``. See ``docs/balance.md``.
"""

from schedtrace.balance.scheduler import SCHEDULER_CLS, BalanceScheduler, balanced, closed

__all__ = ["SCHEDULER_CLS", "BalanceScheduler", "balanced", "closed"]
