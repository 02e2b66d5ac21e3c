"""Answer the forum thread's two questions from recorded runs, with the library behind ``schedtrace analyze``.

``python examples/thread_answer.py RUN... --prequeued RUN...``. Every number comes from the traces; if a run
shows something else than the thread's case, the answer says so.
"""

import argparse
import textwrap
from pathlib import Path

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.model.report import RunReport
from schedtrace.read.run import read_run


def first_steps(report: RunReport) -> str:
    """``[1, 15] [16] ...``: requests newly scheduled per step, trial by trial."""
    return " ".join(str(trial.new_per_step) for trial in report.trials)


def count_of(report: RunReport, code: str) -> int:
    """Return steps that show a finding."""
    return sum(finding.count for finding in report.every_finding() if finding.code == code)


def why_it_varies(default: list[RunReport], prequeued: list[RunReport]) -> str:
    """Answer to: why does the number of requests in the first round vary although the budget suffices?"""
    short = sum(count_of(report, "arrival-limited") for report in default)
    if not short:
        return "In these runs no step was small for want of arrivals: this is not the thread's case."
    late = [f for report in default for f in report.every_finding() if f.code == "arrival-limited"]
    requests = sum(finding.evidence.late_requests for finding in late)
    latest_ms = max(finding.evidence.late_us_max or 0 for finding in late) / 1e3
    again = sum(count_of(report, "arrival-limited") for report in prequeued)
    sent = sum(finding.evidence.on_their_way for finding in late)
    return (
        f"Because the others had not arrived yet. {short} steps could have taken more requests, and each "
        "time the waiting queue was empty when schedule() ended: everything that had reached the scheduler "
        f"was scheduled. {requests} requests that would have fitted came too late for these steps: {sent} "
        "were on their way from the front end to the scheduler, the others reached the front end up to "
        f"{max(latest_ms, 0):.1f} ms after schedule() had ended. The engine steps as soon as the first "
        f"request is in. With all requests queued first it happened {again} times."
    )


def bug_or_intended(default: list[RunReport]) -> str:
    """Answer to: is this a bug or intended?"""
    blocked = [f for report in default for f in report.every_finding() if f.code == "blocked-budget"]
    if blocked:
        causes = ", ".join(sorted({str(finding.cause) for finding in blocked}))
        return f"In these runs requests were refused while budget was left ({causes}): see the findings."
    return (
        "It works as built, with no early break: in no step was budget left while a request waited (0 "
        "blocked-budget findings). The break for prompts larger than the budget with chunked prefill off, "
        "which the thread's automatic answer blamed, was not taken."
    )


def main() -> None:
    """Read the runs and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("default", nargs="+", type=Path)
    parser.add_argument("--prequeued", nargs="+", type=Path, required=True)
    arguments = parser.parse_args()
    default = [analyze_run(read_run(path)) for path in arguments.default]
    prequeued = [analyze_run(read_run(path)) for path in arguments.prequeued]
    print("Requests newly scheduled in each successive step that scheduled any, one list a trial:")
    for report in [*default, *prequeued]:
        print(f"  {report.label:<12} {first_steps(report)}")
    for question, answer in (
        ("1. Why does the first round vary although the budget suffices?", why_it_varies(default, prequeued)),
        ("2. Is this a bug or intended?", bug_or_intended(default)),
    ):
        print(
            f"\n{question}\n{textwrap.fill(answer, width=100, initial_indent='   ', subsequent_indent='   ')}"
        )


if __name__ == "__main__":
    main()
