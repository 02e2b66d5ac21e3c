"""Number of random loads that tests play: one of a kind, or what ``TEST_SEEDS`` says (``make soak``)."""

import os

COUNT = int(os.environ.get("TEST_SEEDS", "1"))
SOAK = COUNT > 1
"""Whether loads are long ones, too."""


def seeds(*numbers: int) -> list[int]:
    """Return the seeds to play, of those that there are."""
    return list(numbers[:COUNT])
