"""Ask processes that answer anything, with every command that asks engines.

``python tools/bench/fuzz_answers.py 5000 [first number]``: one JSON object; exits with 1 if a case failed: a
traceback, more than 20 s or 1 GB, an exit code that no command has, or an engine that is neither answered for
nor named.
"""

import json
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fuzz.answers import case

SHOWN = 20
MOST_KIB = 2**20


def fuzz(count: int, first: int) -> int:
    """Run the cases, print what came out."""
    began, slowest, failed, codes = time.perf_counter(), 0.0, {}, Counter[str]()
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory(prefix="s") as folder:
            found = case(number, Path(folder))
        slowest = max(slowest, found.seconds)
        codes[f"{found.command[0]} {found.code}"] += 1
        if found.wrong is not None:
            failed[number] = (found.command, found.engines, found.wrong)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    about = {
        "cases": count,
        "first": first,
        "seconds": round(time.perf_counter() - began, 1),
        "slowest_s": round(slowest, 2),
        "peak_mib": peak_kib >> 10,
        "exit_codes": dict(sorted(codes.items())),
        "failed": len(failed),
    }
    print(json.dumps(about, indent=2))
    for number, wrong in list(failed.items())[:SHOWN]:
        print(number, *wrong, sep="\n  ")
    return 1 if failed or peak_kib > MOST_KIB else 0


if __name__ == "__main__":
    sys.exit(fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
