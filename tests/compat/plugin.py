"""A pytest plugin: what the tests need on another release of vLLM, and what is to be remembered of them.

Kinds of load that this vLLM refuses are skipped with its own words; the release on trial counts as tried.
"""

import json
import platform
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from schedtrace.record import vllms_own
from schedtrace.record.marks.exits import places, unknown_guards
from schedtrace.record.marks.marking import instrument
from tests.compat.lacks import CONTRADICTED, STUCK, fit, unseen
from tests.contract.families import FAMILIES

RELEASE = vllms_own.vllm_version().partition("+")[0]
vllms_own.TESTED_RELEASES = (RELEASE,)
REFUSED = fit()
"""Families of loads that this vLLM cannot be put under, and why."""
SHOWS = "test_the_load_shows_what_it_is_named_after"

outcomes: Counter[str] = Counter()
skipped: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the result goes."""
    parser.addoption("--compat-result", type=Path, required=True)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Skip the tests on loads that this vLLM does not know."""
    not_seen = unseen()
    for item in items:
        given = getattr(item, "callspec", None)
        for load in map(str, given.params.values() if given else ()):
            family = load if load in FAMILIES else load.rsplit("-", 1)[0]
            shows = item.originalname == SHOWS
            stuck = (
                STUCK.get((RELEASE, family))
                or STUCK.get((RELEASE, load))
                or CONTRADICTED.get((RELEASE, item.originalname, family))
            )
            if why := REFUSED.get(family) or stuck or (shows and not_seen.get(family)):
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test counts once: an error before or after it counts as its failure."""
    if report.skipped:
        outcomes["skipped"] += 1
        skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
    elif report.failed or report.when == "call":
        outcomes[report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was found."""
    marked = instrument(AsyncScheduler)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "passed": outcomes["passed"],
        "failed": outcomes["failed"],
        "skipped": dict(skipped),
        "exits_compared": sum(count.total() for count in _compared(session)),
        "exit_sites": places(marked.sites),
        "refused": list(marked.refused),
        "unknown_guards": unknown_guards(marked.sites),
    }
    session.config.getoption("--compat-result").write_text(json.dumps(result))


def _compared(session: pytest.Session) -> Iterable[Counter[Any]]:
    """Of each load, from ``test_oracle.py``."""
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    return (count for module in modules for count in getattr(module, "compared", {}).values())
