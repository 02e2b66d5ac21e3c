"""Rules of other packages, registered in the entry point group ``schedtrace.findings``.

Such a rule judges one engine's timeline as a rule of ``rules/`` does. Its findings appear in the report and
in ``schedtrace findings``, and ``--only`` and ``--ignore`` select them like any others. If it raises an
exception, the report continues and lists the exception among its problems.
"""

from collections.abc import Collection
from importlib.metadata import entry_points
from typing import NamedTuple

from schedtrace.diagnose.rule import Rule
from schedtrace.model.message import Message
from schedtrace.model.report import Finding
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

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
