"""Writes the tables of ``docs/compatibility.md`` from ``results.json``."""

import json
import re
from typing import Any

from tests.compat.environment import ROOT, package_of

RESULTS = ROOT / "tests" / "compat" / "results.json"
PAGE = ROOT / "docs" / "compatibility.md"
MARKED = re.compile(r"(<!-- compat: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = ["vLLM", "package", "tried on", "Python", "torch"]
COUNTS = ["passed", "failed", "skipped", "exits compared", "places", "unknown"]

Results = dict[str, dict[str, Any]]
"""Release to what ``plugin.py`` noted of it."""


def read_results() -> Results:
    """What is known of all releases."""
    found: Results = json.loads(RESULTS.read_text())
    return found


def page(results: Results) -> str:
    """The page with its tables, newest release first."""
    releases = sorted(results, key=_number, reverse=True)
    tables = {
        "releases": _table([[*HEAD, *COUNTS], *(_row(release, results[release]) for release in releases)]),
        "skipped": _table([["vLLM", "tests", "why"], *_skipped(results, releases)]),
    }
    return MARKED.sub(lambda match: f"{match[1]}\n{tables[match[2]]}\n{match[3]}", PAGE.read_text())


def _row(release: str, found: dict[str, Any]) -> list[str]:
    counts = (found["passed"], found["failed"], sum(found["skipped"].values()), found["exits_compared"])
    unknown = [*found["refused"], *found["unknown_guards"]]
    return [
        release.removesuffix("+cpu"),
        f"`{package_of(release)}`",
        found["date"],
        found["python"],
        found["torch"],
        *(f"{count:,}" for count in counts),
        str(found["exit_sites"]),
        "<br>".join(f"`{guard}`" for guard in unknown) or "0",
    ]


def _skipped(results: Results, releases: list[str]) -> list[list[str]]:
    return [
        [release.removesuffix("+cpu"), f"{count:,}", why.replace("|", "\\|")]
        for release in releases
        for why, count in results[release]["skipped"].items()
    ]


def _table(rows: list[list[str]]) -> str:
    rows.insert(1, ["---"] * len(rows[0]))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _number(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]
