"""What ``analyze`` says of a run, against what it should say.

``python -m tests.exam.answers DIR [CASE ...]`` prints what is wrong about each run of ``tests.exam.build``.
"""

import os
import pickle
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.model.message import plain
from schedtrace.model.report import Finding, Report, RunReport
from schedtrace.present.pages.report import report_page
from schedtrace.present.renderers import Format, renderer
from schedtrace.read.run import read_run
from tests.exam.cases import CASES, Case

MOST_LINES, MOST_COLUMNS = 40, 80


KEPT = "report.pickle"
"""Where it lies in a run folder, what is said of the run is kept there: for all workers of a test run."""


@cache
def report_of(folder: Any) -> RunReport:
    """The report of a run folder."""
    kept = Path(folder) / KEPT
    if not kept.exists():
        return analyze_run(read_run(folder))
    if kept.stat().st_size:
        return pickle.loads(kept.read_bytes())  # type: ignore[no-any-return]  # noqa: S301  # of this test run
    report = analyze_run(read_run(folder))
    beside = kept.with_suffix(f".{os.getpid()}")
    beside.write_bytes(pickle.dumps(report))
    beside.replace(kept)
    return report


@cache
def page_of(folder: Any) -> str:
    """What ``schedtrace analyze`` prints of it on a terminal of ``MOST_COLUMNS``."""
    page = report_page(Report(runs=[report_of(folder)]))
    with patch.dict(os.environ, {"NO_COLOR": "1", "TERM": "dumb"}):
        return renderer(Format.TEXT)(page, width=MOST_COLUMNS)


def sentences(report: RunReport, finding: Finding | None) -> str:
    """The verdict, and all that the leading finding says, a line each."""
    if finding is None:
        return "\n".join(plain(sentence) for sentence in report.verdict)
    said = [*report.verdict, finding.title, finding.verdict, finding.holder, finding.message]
    for advice in finding.advice:
        said += [advice.message, advice.costs]
    said += [symptom.message for symptom in finding.symptoms]
    return "\n".join(plain(sentence) for sentence in said if sentence)


def matches(pattern: str, text: str) -> bool:
    """Whether a text matches a pattern, wherever its lines are broken."""
    return re.search(pattern, re.sub(r"\s+", " ", text), re.IGNORECASE) is not None


def code_of(finding: Finding) -> str:
    """Its code; ``waiting-<cause>`` for a limit without a rule of its own."""
    return f"waiting-{finding.cause}".replace("_", "-") if finding.code == "other-limit" else finding.code


def mistakes(one: Case, folder: Any) -> dict[str, Any]:
    """What is wrong about the answer to a case, by kind; nothing if it is right."""
    report, page = report_of(folder), page_of(folder)
    loud = [finding.code for finding in report.findings if finding.severity != "info"]
    lines = page.splitlines()
    wrapped = page.partition("\nMore:")[0].splitlines()  # commands are never broken
    leading = report.findings[0] if report.findings else None
    said = sentences(report, leading)
    code = code_of(leading) if leading else "nothing"
    wrong: dict[str, Any] = {
        "leads": code if one.code and code not in one.code else None,
        "loud": loud if not one.code else None,
        "unsaid": [pattern for pattern in one.says if not matches(pattern, said)],
        "said": [pattern for pattern in one.silent if matches(pattern, page)],
        "no verdict": not report.verdict,
        "lines": len(lines) if len(lines) > MOST_LINES else None,
        "columns": max(map(len, wrapped)) if max(map(len, wrapped)) > MOST_COLUMNS else None,
    }
    return {kind: what for kind, what in wrong.items() if what}


if __name__ == "__main__":
    directory, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    right = 0
    for name in names:
        wrong = mistakes(CASES[name], directory / name)
        right += not wrong
        print(f"{name}: {wrong or 'right'}")
    print(f"{right} of {len(names)} right")
