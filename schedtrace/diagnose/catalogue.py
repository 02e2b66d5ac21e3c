"""The kinds of findings, and how to choose among them."""

from collections.abc import Iterator

import msgspec

from schedtrace.diagnose.rules import KINDS
from schedtrace.errors import InputError, UsageError
from schedtrace.model.report import Finding, Report

CATALOGUE_SCHEMA_VERSION = 1
FORMER = {
    "balance-candidate": "part of prefill-stall",
    "balance-without-effect": "in the example package examples/rank_balance",
    "cache-resets": "part of interruption",
    "dummy-batches": "part of rank-imbalance",
}
"""Former codes, each with the place of its facts now."""


class FindingKind(msgspec.Struct, kw_only=True):
    """Rule, as a list of the rules shows it."""

    code: str
    """Name in a report; takes ``analyze --only`` and ``--ignore``."""
    summary: str
    """Meaning of the finding."""
    needs: list[str]
    """Facts a record must hold for it to be judged; a trace of vLLM's own scheduler holds all of them."""


class Catalogue(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace findings``."""

    schema_version: int = CATALOGUE_SCHEMA_VERSION
    findings: list[FindingKind]


def catalogue() -> Catalogue:
    """Return every rule, in the order in which ``analyze`` judges them."""
    kinds = [
        FindingKind(code=rule.code, summary=rule.summary, needs=sorted(rule.needs)) for rule in KINDS.values()
    ]
    return Catalogue(findings=kinds)


def choose(*, only: list[str], ignore: list[str]) -> frozenset[str]:
    """Return the codes to report: those of ``only`` (all, if there are none) without those of ``ignore``.

    Raises:
        UsageError: there is no such code, or no longer.
    """
    for option, codes in (("--only", only), ("--ignore", ignore)):
        for code in codes:
            if code not in KINDS:
                msg = (
                    f"{option} {code}: this finding is now {FORMER[code]}"
                    if code in FORMER
                    else f"{option} {code}: no such finding; there are {', '.join(KINDS)}"
                )
                raise UsageError(msg)
    return frozenset(only or KINDS) - frozenset(ignore)


def keep(report: Report, codes: frozenset[str]) -> Report:
    """Leave the other findings out of a report; its figures and its verdict stay."""
    for run in report.runs:
        run.findings = [*_kept(run.findings, codes)]
        run.not_judged = [rule for rule in run.not_judged if rule.code in codes]
    return report


def require_judged(report: Report, what: str) -> None:
    """Refuse an answer where a finding could not have been found.

    Args:
        report: Without what its reader left out.
        what: Needs the answer.

    Raises:
        InputError: a run has no step, or its record lacks facts.
    """
    for run in report.runs:
        if not any(trial.steps for trial in run.trials):
            msg = f"{what} cannot be judged: {run.path} has no step"
            raise InputError(msg)
        if codes := [rule.code for rule in run.not_judged]:
            missing = dict.fromkeys(fact for rule in run.not_judged for fact in rule.missing)
            msg = (
                f"{what} cannot be judged: {run.path} does not record {', '.join(missing)}, which "
                f"{listed(codes)} need; leave them out (--ignore) or record the engine with schedtrace"
            )
            raise InputError(msg)


MOST_CODES = 3


def listed(codes: list[str]) -> str:
    """Return the first codes, and how many more there are."""
    more = len(codes) - MOST_CODES
    return ", ".join(codes[:MOST_CODES]) + (f" and {more} more" if more > 0 else "")


def _kept(findings: list[Finding], codes: frozenset[str]) -> Iterator[Finding]:
    """Yield the findings with these codes; the symptoms of one that is left out stand in its place."""
    for finding in findings:
        symptoms = [*_kept(finding.symptoms, codes)]
        if finding.code in codes:
            yield msgspec.structs.replace(finding, symptoms=symptoms)
        else:
            yield from symptoms
