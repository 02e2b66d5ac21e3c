"""Read many broken records the way ``schedtrace analyze`` and ``diff`` do, and count how that ends.

``python tests/bench/fuzz_reader.py 20000 [first number]``: every case must end with a result (0) or an input
error (3), quickly and in little memory. Prints one JSON object; exits with 1 if a case ended otherwise.
"""

import contextlib
import io
import json
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))

from schedtrace.cli.main import main
from tests.fuzz.mutate import SAMPLE, case

COMMANDS = [["analyze"], ["analyze"], ["analyze", "--format", "json"], ["diff"]]
SHOWN = 20


def run(arguments: list[str]) -> tuple[str, str]:
    """How it ended, and what was said about it."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except Exception as error:  # noqa: BLE001  # that is what is counted
        where = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in where if "schedtrace" in frame.filename]
        return "crash", f"{type(error).__name__}: {str(error)[:150]} in {ours[-1].filename}:{ours[-1].lineno}"
    ended = {0: "result", 3: "input error"}.get(int(code), f"exit code {int(code)}")
    return (ended, err.getvalue()) if "Traceback" not in err.getvalue() else ("traceback", err.getvalue())


def fuzz(count: int, first: int) -> int:
    """Run the cases, print what came out."""
    ends: Counter[str] = Counter()
    bad: dict[str, list[int]] = {}
    slowest, total = (0.0, -1), 0.0
    for command in ("analyze", "diff"):  # imports are not what is timed
        run([command, *[str(SAMPLE)] * (2 if command == "diff" else 1)])
    start_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            random = Random(number)  # noqa: S311  # to be repeatable is the point
            files = case(random)
            path = Path(folder) if len(files) > 1 else Path(folder, *files)
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            command = random.choice(COMMANDS)
            paths = [str(path)] * (2 if command == ["diff"] else 1)
            began = time.perf_counter()
            ended, said = run([command[0], *paths, *command[1:]])
            took = time.perf_counter() - began
            slowest, total = max(slowest, (took, number)), total + took
            ends[ended] += 1
            if ended not in {"result", "input error"}:
                bad.setdefault(said, []).append(number)
            for name in files:
                Path(folder, name).unlink()
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {
        "cases": count,
        "ends": dict(ends),
        "mean_ms": round(1000 * total / count, 1),
        "slowest_ms": round(1000 * slowest[0]),
        "slowest_case": slowest[1],
        "peak_memory_mb": peak_kb // 1024,
        "memory_before_mb": start_kb // 1024,
        "bad": [
            {"times": len(numbers), "said": said, "cases": numbers[:5]}
            for said, numbers in sorted(bad.items(), key=lambda one: -len(one[1]))[:SHOWN]
        ],
    }
    print(json.dumps(found, indent=2))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
