"""Print many hostile runs with every command and format; no output may hold what cannot be seen.

``python tools/bench/fuzz_hostile.py 500 [first number]``: one JSON object; exits with 1 if a case failed.
"""

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fuzz.hostile_commands import check

SHOWN = 20


def fuzz(count: int, first: int) -> int:
    """Run the cases, print what came out."""
    began = time.perf_counter()
    failed: dict[int, list[str]] = {}
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                wrong = list(check(Path(folder, "home"), Random(number)))  # noqa: S311  # to be repeatable is the point
            except Exception:  # noqa: BLE001  # that is what is counted
                wrong = [traceback.format_exc(limit=-2)]
        if wrong:
            failed[number] = wrong
    took = round(time.perf_counter() - began, 1)
    print(json.dumps({"cases": count, "first": first, "seconds": took, "failed": len(failed)}, indent=2))
    for number, wrong in list(failed.items())[:SHOWN]:
        print(number, *(line[:600] for line in wrong), sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
