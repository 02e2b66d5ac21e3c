"""Settings of data-parallel ranks that a simulation takes beside vLLM's arguments, and their checks."""

from collections.abc import Mapping
from typing import Any

from schedtrace.errors import UsageError
from schedtrace.simulate.routers import ROUTERS

OF_RANKS: dict[str, tuple[Any, ...]] = {"router": tuple(ROUTERS), "balance_ranks": (True, False)}
"""No arguments of vLLM, and their values."""


def require_values(changes: Mapping[str, Any], *, ranks: int, lockstep: bool) -> None:
    """Check the settings of ranks.

    Args:
        changes: Names of settings to values.
        ranks: How many there are.
        lockstep: Whether ranks of this model run in lock-step.

    Raises:
        UsageError: a value that there is not, or balance scheduling where no rank waits for another.
    """
    if not isinstance(ranks, int) or ranks < 1:
        msg = f"data_parallel_size={ranks}: expected a number of ranks, 1 or more"
        raise UsageError(msg)
    for name, values in OF_RANKS.items():
        if name in changes and changes[name] not in values:
            allowed = ", ".join(str(one).lower() for one in values)
            msg = f"{name}={changes[name]}: one of {allowed}"
            raise UsageError(msg)
    if changes.get("balance_ranks") and ranks == 1:
        msg = "balance_ranks=true: with one rank there is nobody to wait for; data_parallel_size=N as well"
        raise UsageError(msg)
    if changes.get("balance_ranks") and not lockstep:
        msg = "balance_ranks=true: ranks of a dense model are independent, none waits for another"
        raise UsageError(msg)
