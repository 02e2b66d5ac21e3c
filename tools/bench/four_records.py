"""Compare what is said of a run with what is said of it as iteration lines, console lines and metrics.

    python -m tools.bench.four_records RUN [RUN ...]

Each run folder is written as vLLM itself would have logged it (``tests/other_records.py``): iteration lines,
console lines with and without the start, ``/metrics`` in the middle and at two moments. Prints each sentence
that the trace contradicts, then how often a weaker record names the trace's cause, and ends with 1 if there
is a contradiction.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.records import described
from schedtrace.model.report import RunReport
from schedtrace.read.records.metrics import read_metrics
from schedtrace.read.records.vllm_log import read_vllm_log
from schedtrace.read.run import Run, read_run
from tests.other_records import claimed_causes, console_lines, disagreements, metrics_dump, waits_for_capacity
from tests.weaker import contradictions, iteration_log, lines_of, report_of

MANY = 0.05
"""Share of the requests' time in waits for capacity from which a weaker record should show a queue."""


def main() -> int:
    """Compare the records; return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("runs", nargs="+", type=Path, help="Run folders.")
    wrong, records, said, named = 0, 0, Counter[str](), Counter[str]()
    for path in arguments.parse_args().runs:
        run = read_run(path)
        report = analyze_run(run)
        with tempfile.TemporaryDirectory() as scratch:
            for record, statements, faults in _weaker(path, run, report, Path(scratch)):
                records += 1
                wrong += bool(faults)
                for fault in faults:
                    print(f"{path.name} as {record}: {fault[:400]}", flush=True)
                said.update(f"{record}: {each.certainty} {each.code}" for each in statements)
                if statements:
                    named[f"{record}: {_agreement(statements, report)}"] += 1
    for counts in (said, named):
        print(*(f"{count:5} {what}" for what, count in sorted(counts.items())), sep="\n")
    print(f"{records} weaker records, {wrong} of which say something that the trace contradicts")
    return min(1, wrong)


def _weaker(path: Path, run: Run, report: RunReport, scratch: Path) -> Iterator[tuple]:
    """Yield name, statements and contradictions of each weaker record."""
    if len(run.traces) == 1:
        log = scratch / "iterations.log"
        log.write_bytes(iteration_log(lines_of(path / "engine-0.jsonl")))
        yield "iteration lines", [], contradictions(report_of(log), report, log=True)
    texts = {
        "console lines": "\n".join(console_lines(run)),
        "console lines with a start": "\n".join(console_lines(run, with_start=True)),
        "metrics": metrics_dump(run, 0.5),
        "two metrics": metrics_dump(run, 0.3) + metrics_dump(run, 0.7),
    }
    for record, text in texts.items():
        file = scratch / "record"
        file.write_text(text)
        contents = read_metrics(file) if "metrics" in record else read_vllm_log(file)
        statements = [each for shown in described(path.name, contents) for each in shown.statements]
        yield record, statements, list(disagreements(statements, report))


def _agreement(statements: list, report: RunReport) -> str:
    """Return whether the statements name what most of the waits for capacity were for."""
    shares = waits_for_capacity(report)
    if sum(shares.values()) < MANY:
        return "the trace has hardly any waits for capacity"
    most = max(shares, key=shares.__getitem__)
    claims = {each.certainty for each in statements if most in claimed_causes(each)}
    return f"the trace's cause is {min(claims, default='not named')}"


if __name__ == "__main__":
    sys.exit(main())
