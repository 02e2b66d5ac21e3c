"""Catalogue of the kinds of findings, and the selection among them."""

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
    "decode-starves-prefill": "part of token-budget-bound",
    "dummy-batches": "part of rank-imbalance",
}
"""Codes of former findings, each with the place where the same facts appear now."""


class FindingKind(msgspec.Struct, kw_only=True):
    """Kind of finding, as the catalogue lists it."""

    code: str
    """Code of the finding in a report, and value of ``analyze --only`` and ``--ignore``."""
    summary: str
    """Meaning of the finding in one line."""
    needs: list[str]
    """Facts that a record must contain for the rule to be evaluated; a trace of vLLM's own scheduler contains
    all."""


class Catalogue(msgspec.Struct, kw_only=True):
    """Document that ``schedtrace findings`` prints."""

    schema_version: int = CATALOGUE_SCHEMA_VERSION
    findings: list[FindingKind]


def catalogue() -> Catalogue:
    """Return every rule, in the order in which ``analyze`` evaluates the rules."""
    kinds = [
        FindingKind(code=rule.code, summary=rule.summary, needs=sorted(rule.needs)) for rule in KINDS.values()
    ]
    return Catalogue(findings=kinds)


def choose(*, only: list[str], ignore: list[str]) -> frozenset[str]:
    """Return the codes to report: those of ``only`` (all codes if it is empty) without those of ``ignore``.

    Raises:
        UsageError: If there is no such code, or it no longer exists.
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
    """Keep only the findings with these codes in a report; leave its figures and its verdict unchanged."""
    for run in report.runs:
        run.findings = [*_kept(run.findings, codes)]
        run.not_judged = [rule for rule in run.not_judged if rule.code in codes]
    return report


def require_judged(report: Report, what: str) -> None:
    """Raise InputError if a finding could not be judged.

    Raises:
        InputError: If a run has no step, or its record lacks facts.
    """
    for run in report.runs:
        if not any(trial.steps for trial in run.trials):
            msg = f"{what} cannot be judged: {run.path} has no step"
            raise InputError(msg)
        if codes := [rule.code for rule in run.not_judged]:
            missing = dict.fromkeys(fact for rule in run.not_judged for fact in rule.missing)
            msg = (
                f"{what} cannot be judged: {run.path} does not record {', '.join(missing)}, which "
                f"{first_codes(codes)} need; leave them out (--ignore) or record the engine with schedtrace"
            )
            raise InputError(msg)


MOST_CODES = 3


def first_codes(codes: list[str]) -> str:
    """Return the first codes as text, and the number of further codes."""
    more = len(codes) - MOST_CODES
    return ", ".join(codes[:MOST_CODES]) + (f" and {more} more" if more > 0 else "")


def _kept(findings: list[Finding], codes: frozenset[str]) -> Iterator[Finding]:
    """Yield the findings with these codes; symptoms replace a root cause that is left out."""
    for finding in findings:
        symptoms = [*_kept(finding.symptoms, codes)]
        if finding.code in codes:
            yield msgspec.structs.replace(finding, symptoms=symptoms)
        else:
            yield from symptoms
