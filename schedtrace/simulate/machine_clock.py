"""The machine's monotonic clock, to wait by."""

import time

SPIN_US = 100.0
"""Linux wakes a sleeper 50 us late (its timer slack) and more: the rest is waited for awake."""


class MachineClock:
    """What an executor in real time reads and waits by (``executor.Clock``)."""

    @property
    def now_us(self) -> float:
        """Microseconds, on the clock that the recorder reads."""
        return time.monotonic_ns() / 1000

    def until(self, us: float) -> None:
        """Wait for a moment; return at once if it is over. Other threads run meanwhile."""
        left = us - self.now_us
        if left > SPIN_US:
            time.sleep((left - SPIN_US) / 1e6)
        while self.now_us < us:
            time.sleep(0)  # gives the interpreter lock away
