"""What a verdict was made of, in broad strokes: whether the engines now look different in kind."""

from dataclasses import dataclass

from schedtrace.watch.seen import Figures, Slow

WAITS_US = 500_000
"""A shorter wait, as that for the next step, does not count."""
FULL, NO_LONGER_FULL = 0.95, 0.90
"""Shares of the KV blocks in use: apart, so that a cache on the edge does not change at each look."""


@dataclass(frozen=True)
class Picture:
    """All engines at one look."""

    idle: bool
    waiting_for: dict[str, int]
    """Cause to requests; empty: nobody has waited for long."""
    kv_frac: float
    """Of the fullest engine; 0: unknown."""
    preempting: bool

    def changed(self, then: "Picture") -> str:
        """What began or ended since ``then``, to be read after "before"; empty: nothing in kind."""
        if self.idle != then.idle:
            return "the engine ran empty" if self.idle else "requests ran"
        if bool(self.waiting_for) != bool(then.waiting_for):
            return "requests waited" if self.waiting_for else "the queue emptied"
        if self.preempting and not then.preempting:
            return "preemptions began"
        if self.kv_frac >= FULL > then.kv_frac:
            return f"{FULL:.0%} of the KV blocks were in use".replace("%", " %")
        if then.kv_frac >= FULL and self.kv_frac < NO_LONGER_FULL:
            return "KV blocks became free"
        return self._other_cause(then)

    def _other_cause(self, then: "Picture") -> str:
        """Twice as frequent as the one before: two that are near each other do not alternate."""
        if not self.waiting_for:
            return ""
        cause = _most_frequent(self.waiting_for)
        before = _most_frequent(then.waiting_for)
        if cause == before or self.waiting_for[cause] < 2 * self.waiting_for.get(before, 0):
            return ""
        return f"they waited for {cause}"


def picture(engines: list[Figures], slowest: list[Slow]) -> Picture:
    """Of this look.

    Args:
        engines: Each engine's figures.
        slowest: The requests that wait longest are among them.
    """
    waits = any(slow.waits_us is not None and slow.waits_us >= WAITS_US for slow in slowest)
    causes: dict[str, int] = {}
    for one in engines if waits else []:
        for cause, count in one.waiting_for.items():
            causes[cause] = causes.get(cause, 0) + count
    return Picture(
        idle=all(one.state and not one.running for one in engines),
        waiting_for=causes,
        kv_frac=max((one.kv_frac or 0.0 for one in engines), default=0.0),
        preempting=any(one.preempted_per_s for one in engines),
    )


def _most_frequent(causes: dict[str, int]) -> str:
    return max(causes, key=lambda cause: causes[cause])
