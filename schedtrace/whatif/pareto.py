"""The Pareto front: configurations that no other one beats."""

from collections.abc import Sequence


def pareto_front(costs: Sequence[Sequence[float | None]]) -> list[bool]:
    """Whether no other row is lower in one column and as low in all others; equal rows share the front.

    Args:
        costs: Rows of equal length, in which lower is better: negate what should be high. A row with a None
            is not on the front and beats nobody.
    """
    import numpy as np  # noqa: PLC0415  # --help must answer at once

    known = [at for at, row in enumerate(costs) if None not in row]
    front = [False] * len(costs)
    if not known:
        return front
    values = np.array([costs[at] for at in known], dtype=float)
    for at, row in zip(known, values, strict=True):
        beats = (values <= row).all(axis=1) & (values < row).any(axis=1)
        front[at] = not beats.any()
    return front
