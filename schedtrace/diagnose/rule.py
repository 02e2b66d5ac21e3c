"""A rule: one kind of finding, and all that is true of this kind alone."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from schedtrace.model.report import Finding
from schedtrace.model.trace_facts import Fact

Seen = TypeVar("Seen")
"""Object that a rule looks at: one engine's ``Timeline``, or the ``RecordedRanks`` of a run."""


Findings = Iterator[Finding]
"""Finding that a rule yields."""


class Threshold(NamedTuple):
    """A share of something, without which a rule finds nothing: one step can bring a run across it."""

    least_frac: float
    share: Callable[[Finding], float | None]
    """The share that a finding was found for; None: it was found for something else."""


def share_frac(finding: Finding) -> float | None:
    """Return its share of the requests' time."""
    return finding.share_frac


def cost_frac(finding: Finding) -> float | None:
    """Return its cost as a share of the busy time, or of the run."""
    return finding.cost_frac


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[Seen]):
    """Rule for one kind of finding."""

    code: str
    summary: str
    """Meaning of the finding, in one line."""
    needs: frozenset[Fact]
    """Facts that a record must hold for this rule to judge it."""
    find: Callable[[Seen], Iterable[Finding]]
    symptom_of: tuple[str, ...] = ()
    """Codes of the root causes whose effect it may be; empty: it is a root cause."""
    holds_up: bool = False
    """Whether it is a symptom that costs requests time by itself, with or without its root cause."""
    charges: tuple[str, ...] = ()
    """Roots of ``timeline.charges`` that it is about, where its wait may be the effect of another."""
    specific: bool = False
    """Whether it names who holds a resource, or what happened, beyond a shortage: first of near equals."""
    leads_from_frac: float = 0.05
    """Least share of the requests' time, or of throughput: less is no limit of a run."""
    only_if_avoidable: bool = False
    """Whether it limits a run only where something helps."""
    quiet: int | None = None
    """Place among what is worth the first sentence where nothing limits the run; None: it is not."""
    threshold: Threshold | None = None
    """Threshold for ``diff`` of a finding that one run has and the other has not; of a rule about charges
    their share."""
    proven: tuple[tuple[str | None, str], ...] = ()
    """Cause and setting of advice that a contract test has tried: vLLM's scheduler was driven with it, and
    the wait got shorter. ``tests/exam/test_advice.py`` fails if these differ from what it tries."""

    def __call__(self, seen: Seen) -> list[Finding]:
        """Return its findings in one engine's timeline, or in all ranks of a run."""
        findings = [*self.find(seen)]
        for finding in findings:
            finding.code = self.code
            for advice in finding.advice:
                advice.proven = (finding.cause, advice.setting) in self.proven
        return findings
