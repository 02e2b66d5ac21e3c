"""Read many broken runs, or traces in parts, with every command that reads runs, and count how that ends.

``python tools/bench/fuzz_reader.py 20000 [first number] [commands a run]``: every command must end with a
result or one clear error, within 10 s of processor time and 1 GB more memory than the first one needed.
Prints one JSON object; exits with 1 if one ended otherwise. With ``--parts`` each case is a trace in parts
with gaps, bombs, strangers and flips (``tests/fuzz/parts.py``), compared with the whole one.

``python tools/bench/fuzz_reader.py --one NUMBER`` keeps the run of one number in a folder and prints how each
command ends.

The work is done by one process after the other, which limits of the kernel end; the next one goes on behind
the run that ended it.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["POLARS_MAX_THREADS"] = "1"  # more take longer over tables as small as these

from tests.fuzz import parts, reading

CASES: Any = parts if "--parts" in sys.argv else reading

SHOWN = 40
CPU_S = 10
MEMORY = 2**30
RUNS_A_PROCESS = 1000


def work(first: int, count: int, most: int) -> None:
    """Run some cases; a line before each command, and one after it."""
    _warm_up()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limited, unlimited = (used + MEMORY, resource.RLIM_INFINITY), (resource.RLIM_INFINITY,) * 2
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as home:
            for words, run in CASES.runs(Random(number), Path(home), most):  # noqa: S311  # repeatable
                print(json.dumps([number, words]), flush=True)
                resource.setrlimit(resource.RLIMIT_AS, limited)
                signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process, whatever it does
                ended = run()
                signal.setitimer(signal.ITIMER_PROF, 0)
                resource.setrlimit(resource.RLIMIT_AS, unlimited)
                print(json.dumps([number, words, ended.how, ended.cpu_s, ended.peak_kb]), flush=True)
        print(json.dumps([number]), flush=True)


def fuzz(count: int, first: int = 0, most: int = 2) -> int:
    """Run the cases, print what came out."""
    ends: Counter[str] = Counter()
    names: Counter[str] = Counter()
    bad: dict[str, list[str]] = {}
    slowest, cpu, peak = (0.0, "none"), 0.0, 0
    at, last = first, first + count
    while at < last:
        size = min(RUNS_A_PROCESS, last - at)
        command = [sys.executable, __file__, "--work", str(at), str(size), str(most)]
        command += ["--parts"] if CASES is parts else []
        begun: Any = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                number, *told = json.loads(line)
                if not told:
                    at = number + 1
                begun = told[0] if len(told) == 1 else None
                if len(told) > 1:
                    words, how, took, kb = told
                    name = f"{number} {' '.join(words)}"
                    slowest, cpu, peak = max(slowest, (took, name)), cpu + took, max(peak, kb)
                    ends[how if len(how) == 1 else "bad"] += 1
                    names[words[0]] += 1
                    if len(how) > 1:
                        bad.setdefault(how, []).append(name)
                        print(f"{name}\n    {how}", file=sys.stderr, flush=True)
        if process.returncode:
            ended = signal.Signals(-process.returncode).name if process.returncode < 0 else process.returncode
            bad.setdefault(f"process ended by {ended}", []).append(f"{at} {begun and ' '.join(begun)}")
            ends["bad"] += 1
            at += 1
        print(f"{at - first:,} of {count:,}, bad {sum(map(len, bad.values()))}", file=sys.stderr, flush=True)
    found = {
        "runs": count,
        "first": first,
        "commands": dict(names),
        "ends": dict(ends),
        "mean_cpu_ms": round(1000 * cpu / max(1, ends.total()), 1),
        "slowest_cpu_ms": round(1000 * slowest[0]),
        "slowest": slowest[1],
        "peak_memory_mb": peak // 1024,
        "bad": [
            {"times": len(cases), "how": how, "cases": cases[:5]}
            for how, cases in sorted(bad.items(), key=lambda one: -len(one[1]))[:SHOWN]
        ],
    }
    print(json.dumps(found, indent=2))
    return int(bool(bad))


def one(number: int) -> None:
    """Every command on one case, which stays where it is."""
    home = Path(tempfile.mkdtemp(prefix=f"fuzz-{number}-"))
    print(home)
    for words, run in CASES.runs(Random(number), home, 100):  # noqa: S311  # repeatable
        print(f"{' '.join(words)}\n    {run().how}", flush=True)


def _warm_up() -> None:
    """Imports are neither timed nor counted."""
    with tempfile.TemporaryDirectory() as home:
        for words in reading.commands({}, reading.SOUND, Path(home), Random(0)):  # noqa: S311  # repeatable
            reading.ends(words)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    if "--work" in sys.argv:
        work(*numbers)
    elif "--one" in sys.argv:
        one(*numbers)
    else:
        sys.exit(fuzz(*numbers))
