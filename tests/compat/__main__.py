"""Runs the contract tests on releases of vLLM and writes ``docs/compatibility.md``: ``make compat``."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.environment import ROOT, prepare
from tests.compat.page import PAGE, RESULTS, page, read_results

RELEASES = [
    *("0.33.0", "0.32.0+cpu", "0.30.0", "0.27.1", "0.24.0", "0.20.2", "0.14.1"),
    *("0.13.0", "0.12.0", "0.11.0", "0.10.2", "0.10.0"),
]
TESTS = ["release", "plugin", "oracle", "recorded_facts", "never_raises"]
"""Of ``tests/contract``."""


def main(releases: list[str]) -> int:
    """Try each release; 0 if none failed."""
    bad = 0
    for release in releases or RELEASES:
        print(f"== vLLM {release} ==", flush=True)
        result = attempt(release)
        bad += result is None or bool(result["failed"])
        if result is not None:
            results = read_results() | {release: result}
            RESULTS.write_text(json.dumps(results, indent=2) + "\n")
            PAGE.write_text(page(results))
    return min(bad, 1)


def attempt(release: str) -> dict[str, object] | None:
    """What the tests found; None if there was no test, which pytest or pip has explained."""
    try:
        variables = prepare(release)
    except subprocess.CalledProcessError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "result.json")
        options = ["-q", "-p", "no:cacheprovider", "-p", "tests.compat.plugin", "--compat-result", str(told)]
        command = [
            sys.executable,
            "-m",
            "pytest",
            *options,
            *(f"tests/contract/test_{name}.py" for name in TESTS),
            "tests/compat/commands.py",
        ]
        ended = subprocess.run(command, cwd=ROOT, env=variables, check=False)
        ran = ended.returncode in (0, 1) and told.exists()  # passed or failed; else pytest found no tests
        found: dict[str, object] | None = json.loads(told.read_text()) if ran else None
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
