"""One step with what it left over: what a what-if is asked about."""

from dataclasses import dataclass

from schedtrace.diagnose.queue.refused_heads import Need
from schedtrace.explain.step.admission import Left
from schedtrace.model.story import Scheduled, Stop, Waiter
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Question:
    """A step, what it left over, and who wanted more."""

    timeline: Timeline
    need: Need
    left: Left
    token_budget: int
    waiting: list[Waiter]
    """In the order of the queue."""
    shares: list[Scheduled]
    stops: list[Stop]

    @property
    def end(self) -> Stop | None:
        """The exit that ended the waiting loop."""
        ends = [stop for stop in self.stops if stop.loop == "waiting" and stop.kind != "continue"]
        return ends[-1] if ends else None

    @property
    def seats_name(self) -> str:
        """The setting that limits how many run."""
        return "max_num_active_seqs" if self.timeline.active_limit else "max_num_seqs"

    @property
    def budget_name(self) -> str:
        """The setting that the token budget comes from."""
        given = self.timeline.header.scheduler_config.get("max_num_scheduled_tokens")
        return "max_num_scheduled_tokens" if given else "max_num_batched_tokens"

    def cut_by(self, cap: str) -> list[Scheduled]:
        """Requests whose chunk this limit made smaller at last."""
        return [share for share in self.shares if share.caps and share.caps[-1] == cap]


def missing(shares: list[Scheduled]) -> int:
    """Tokens that these requests wanted and did not get."""
    return sum((share.wanted_tokens or share.scheduled_tokens) - share.scheduled_tokens for share in shares)
