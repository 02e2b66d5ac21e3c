"""Rule for one kind of finding, with all properties that are specific to this kind.

Other packages register rules in the entry point group ``schedtrace.findings``. Such a rule judges one
engine's timeline, as the rules in ``rules/`` do. Its findings appear in the report and in ``schedtrace
findings``, and ``--only`` and ``--ignore`` select them like any others. If the rule raises an exception, the
report continues and lists the exception among its problems.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Generic, NamedTuple, TypeVar

from schedtrace.model.message import Message
from schedtrace.model.report import Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

Seen = TypeVar("Seen")
"""Object that a rule evaluates: one engine's ``Timeline``, or the ``RecordedRanks`` of a run."""


Findings = Iterator[Finding]
"""Findings that a rule yields."""


class Threshold(NamedTuple):
    """Smallest share at which a rule reports its finding; a single step may decide whether it is reached."""

    least_frac: float
    share: Callable[[Finding], float | None]
    """Function that returns the share to compare with ``least_frac``; None if the finding does not depend on
    a share."""


def share_frac(finding: Finding) -> float | None:
    """Return a finding's share of the requests' time."""
    return finding.share_frac


def cost_frac(finding: Finding) -> float | None:
    """Return a finding's cost as a share of the engine's busy time, or of the length of the run."""
    return finding.cost_frac


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[Seen]):
    """Rule for one kind of finding."""

    code: str
    summary: str
    """Meaning of the finding in one line."""
    needs: frozenset[Fact]
    """Facts that a record must contain for the rule to be evaluated."""
    find: Callable[[Seen], Iterable[Finding]]
    symptom_of: tuple[str, ...] = ()
    """Codes of the root causes of which this finding may be a symptom; empty for a root cause."""
    holds_up: bool = False
    """Whether the finding, although a symptom, keeps its severity without a root cause, because it costs
    requests time by itself."""
    charges: tuple[str, ...] = ()
    """Charges of ``timeline.charges`` that the finding reports; empty if its wait cannot be the effect of
    another wait."""
    specific: bool = False
    """Whether the finding names the holder of a resource, or an event, and not only a shortage; if so, it
    precedes findings of nearly the same weight."""
    leads_from_frac: float = 0.05
    """Minimum share of the requests' time, or of throughput, at which the finding limits a run."""
    only_if_avoidable: bool = False
    """Whether the finding limits a run only if some change would help."""
    quiet: int | None = None
    """Place among the findings that may lead the verdict if nothing limits the run; None if this finding may
    not lead it."""
    threshold: Threshold | None = None
    """Threshold that ``diff`` applies to a finding that only one of two runs has. If it is None and the rule
    has ``charges``, the finding's share of the requests' time is compared with ``FOUND_FROM_FRAC``."""
    proven: tuple[tuple[str | None, str], ...] = ()
    """Pairs of a cause and a setting in its advice that a contract test has tried: vLLM's scheduler ran with
    the setting, and the wait became shorter. ``tests/exam/test_advice.py`` fails if this list differs from
    what the test tries."""

    def __call__(self, seen: Seen) -> list[Finding]:
        """Return the findings in one engine's timeline, or in all ranks of a run."""
        findings = [*self.find(seen)]
        for finding in findings:
            finding.code = self.code
            for advice in finding.advice:
                advice.proven = (finding.cause, advice.setting) in self.proven
        return findings


ENTRY_POINTS = "schedtrace.findings"


class PackageRules(NamedTuple):
    """Rules of other packages, by code, and the reasons why some rules could not be loaded."""

    rules: dict[str, Rule[Timeline]]
    failed: tuple[str, ...]


def package_rules(own: Collection[str]) -> PackageRules:
    """Load the rules of all installed packages.

    Args:
        own: Codes of schedtrace's own rules, which no other package may take.
    """
    rules: dict[str, Rule[Timeline]] = {}
    failed: list[str] = []
    for entry_point in entry_points(group=ENTRY_POINTS):
        try:
            rule = entry_point.load()
            _check(rule, {*own, *rules})
        except Exception as error:  # noqa: BLE001  # another package's module may raise anything
            failed.append(f"{entry_point.name} = {entry_point.value}: {error!r}")
        else:
            rules[rule.code] = rule
    return PackageRules(rules, tuple(failed))


def _check(rule: object, taken: Collection[str]) -> None:
    if not isinstance(rule, Rule):
        msg = f"{rule!r} is no schedtrace.Rule"
        raise TypeError(msg)
    if rule.code in taken:
        msg = f"there is a finding {rule.code} already"
        raise ValueError(msg)


def package_findings(timeline: Timeline, packages: PackageRules) -> tuple[list[Finding], list[Message]]:
    """Return the findings of other packages' rules, and a sentence for each rule that failed."""
    findings: list[Finding] = []
    problems: list[Message] = []
    if timeline.rank == 0:  # once for a run
        problems += [
            say("A finding of another package was not loaded: {text:code}.", text=text)
            for text in packages.failed
        ]
    for rule in packages.rules.values():
        if not rule.needs <= timeline.facts:
            continue
        try:
            findings += rule(timeline)
        except Exception as error:  # noqa: BLE001  # likewise another package's function
            text = f"{type(error).__name__}: {error}"
            problems.append(
                say(
                    "The finding {code:code} of another package was not judged: {text:code}.",
                    code=rule.code,
                    text=text,
                )
            )
    return findings, problems
