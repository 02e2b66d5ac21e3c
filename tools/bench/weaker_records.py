"""Take facts away from every recorded sample and compare what is said of it with what is said of the trace.

    python tools/bench/weaker_records.py [--combinations 5] [CODE ...]

Each fact of ``tests/weaker.py`` alone, all of them, and some combinations by chance; then the run as another
program's log. Prints each sentence or figure that the trace does not have, and ends with 1 if there is one.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.samples import FINDINGS
from tests.weaker import FACTS, LOGS, contradictions, lines_of, report_of, weaker_run


def main() -> int:
    """Try them; returns the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("codes", nargs="*", help="Samples; default: all.")
    arguments.add_argument("--combinations", type=int, default=5, help="By chance, for each sample.")
    asked = arguments.parse_args()
    codes = asked.codes or sorted(folder.name for folder in FINDINGS.iterdir() if folder.is_dir())
    tried = wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for code in codes:
            for run in sorted((FINDINGS / code).iterdir()):
                if not run.is_dir():
                    continue
                for record, found in _tried(run, Path(scratch), asked.combinations):
                    tried, wrong = tried + 1, wrong + bool(found)
                    for line in found:
                        print(f"{code}/{run.name} without {record}: {line[:300]}", flush=True)
    print(f"{tried} weaker records, {wrong} of which say something that the trace does not")
    return min(1, wrong)


def _tried(run: Path, scratch: Path, combinations: int):
    """What each weaker record was, and what is wrong with it."""
    chance, names = random.Random(str(run.parent)), list(FACTS)  # noqa: S311  # a sample, no secret
    full = report_of(weaker_run(run, scratch / "run", []))
    several = [chance.sample(names, chance.randint(2, len(names) - 1)) for _ in range(combinations)]
    for taken in [*([name] for name in names), names, *several]:
        yield ", ".join(taken), contradictions(report_of(weaker_run(run, scratch / "run", taken)), full)
    lines = lines_of(run / "engine-0.jsonl")
    for kind, made in LOGS.items():
        log = scratch / "server.log"
        log.write_bytes(made(lines))
        if log.stat().st_size > 1 and not list(run.glob("engine-1*")):
            yield f"all but {kind}", contradictions(report_of(log), full, log=True)


if __name__ == "__main__":
    sys.exit(main())
