"""Breaks the code in small ways, one at a time in a copy of the tree, and runs the tests: ``make mutants``.

A mutant that no test notices is a survivor: write the test that does.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from tools.mutants.mutations import Mutant, sample

ROOT = Path(__file__).parents[2]
TESTS = {
    "record": [
        "tests/unit/record",
        *("tests/contract/facts", "tests/contract/causes", "tests/contract/test_marked_copy.py"),
        *("tests/contract/test_recorded_facts.py", "tests/contract/test_oracle.py"),
        *("tests/contract/test_lines.py", "tests/contract/test_plugin.py"),
        *("tests/contract/test_inferred_exits.py", "tests/contract/test_writing_fails.py"),
        *("tests/contract/test_never_raises.py", "tests/contract/test_hybrid_models.py"),
        *("tests/contract/test_queue.py", "tests/contract/test_parts.py"),
        *("tests/contract/test_attach.py", "tests/contract/test_watchdog.py"),
        *("tests/contract/test_metrics.py", "tests/contract/test_control_answers.py"),
        "tests/contract/test_histories.py",
    ],
    "read": ["tests/unit/read", "tests/unit/cli"],
    "timeline": ["tests/unit/timeline", "tests/unit/diagnose", "tests/unit/present"],
    "diagnose": ["tests/unit/diagnose", "tests/docs", "tests/unit/present"],
    "whatif": [
        *("tests/unit/whatif", "tests/unit/cli", "tests/unit/present", "tests/contract/whatif"),
        *("tests/contract/test_what_if.py", "tests/contract/test_sweep.py"),
    ],
    "explain": ["tests/unit/explain", "tests/unit/cli", "tests/unit/present"],
    "compare": ["tests/unit/compare", "tests/unit/cli", "tests/unit/present"],
    "present": ["tests/unit/present", "tests/unit/cli", "tests/docs"],
}
"""Package to its tests, the quickest first; what is not there is left out."""
NOT_COPIED = (".*", "__pycache__")
LEFT_BY_RUNS = ("demo", "dist", "logs")
"""Folders at the root that are not copied either; ``schedtrace/demo`` is part of the package."""
ENOUGH = 0.9
"""Share of the mutants that should be killed."""


def main() -> int:
    """Try the mutants that were asked for; 1 if too many survive, 2 if the tests fail without any."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--package", action="append", choices=TESTS, help="record and read if not given")
    parser.add_argument("--count", type=int, default=20, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at once")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    parser.add_argument("--quick", action="store_true", help="only the first tests of each package")
    parser.add_argument("--only", help="a regular expression for the mutants to try, as they are listed")
    given = parser.parse_args()
    tests = {package: there[:1] if given.quick else there for package, there in TESTS.items()}
    chosen = [
        (mutant, package)
        for package in given.package or ["record", "read"]
        for mutant in sample(ROOT, f"schedtrace/{package}", given.count, given.seed)
        if re.search(given.only or "", str(mutant))
    ]
    if given.list:
        print(*(mutant for mutant, _ in chosen), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for number in range(given.jobs):
            trees.put(copied(Path(folder) / str(number)))
        limits_s: dict[str, float] = {}
        for package in sorted({package for _, package in chosen}):
            begin = time.monotonic()
            if failed := first_failure(Path(folder) / "0", tests[package]):
                print(f"without any mutant {failed} fails: nothing can be concluded")
                return 2
            limits_s[package] = 60 + 3 * (time.monotonic() - begin)
        with ThreadPoolExecutor(given.jobs) as pool:
            survived = list(
                pool.map(lambda one: tried(one[0], tests[one[1]], limits_s[one[1]], trees), chosen)
            )
    killed = survived.count(False)
    print(f"{killed} of {len(chosen)} mutants killed")
    return int(killed < ENOUGH * len(chosen))


def copied(tree: Path, root: Path = ROOT) -> Path:
    """A copy of the project."""
    anywhere, at_the_root = (shutil.ignore_patterns(*names) for names in (NOT_COPIED, LEFT_BY_RUNS))

    def ignored(folder: str, names: list[str]) -> set[str]:
        return anywhere(folder, names) | (at_the_root(folder, names) if Path(folder) == root else set())

    return shutil.copytree(root, tree, ignore=ignored)


def tried(mutant: Mutant, tests: list[str], limit_s: float, trees: "Queue[Path]") -> bool:
    """Whether the mutant survives its tests."""
    tree = trees.get()
    source = (tree / mutant.path).read_bytes()
    begin = time.monotonic()
    try:
        (tree / mutant.path).write_bytes(mutant.applied(source))
        own = f"tests/unit/{mutant.path.parts[1]}/test_{mutant.path.stem}.py"
        killer = first_failure(tree, [own, *tests], limit_s)
    finally:
        (tree / mutant.path).write_bytes(source)
        trees.put(tree)
    word = "survived" if killer is None else "killed  "
    by = "" if killer is None else f"  by {killer}"
    print(f"{word} {time.monotonic() - begin:4.0f} s  {mutant}{by}", flush=True)
    return killer is None


def first_failure(tree: Path, tests: list[str], limit_s: float | None = None) -> str | None:
    """The first test that fails, "time" where they do not end; None where all pass."""
    there = [test for test in tests if (tree / test).exists()]
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *there]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "time"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else done.stdout[-300:] + done.stderr[-300:]


if __name__ == "__main__":
    sys.exit(main())
