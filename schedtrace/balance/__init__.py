"""Experiment with balance scheduling: ranks in lock-step admit requests together.

``closed`` decides whether the gate is closed, ``balanced`` adds the gate to a scheduler class of vLLM, and
``BalanceScheduler`` is for ``--scheduler-cls``. See ``docs/balance.md``.
"""

from schedtrace.balance.scheduler import SCHEDULER_CLS, BalanceScheduler, balanced, closed

__all__ = ["SCHEDULER_CLS", "BalanceScheduler", "balanced", "closed"]
