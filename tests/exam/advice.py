"""Advice put to the test: the same load again with the proposed value, and what became of the wait.

``python -m tests.exam.advice DIR`` prints the table for run folders that ``tests.exam.build`` wrote.
"""

import json
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl

from schedtrace.model.report import Finding
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import Timeline, make_timeline
from tests.exam.answers import report_of
from tests.exam.build import forked

LEAST_CUT = 0.25
"""Share of the wait that an advice must cut."""
MOST_LOSS = 0.1
"""By which share of it all requests' time may grow instead."""
BUDGET = ("token_budget", "input_budget", "chunked_prefill_off")
WAITS_OF = {"token-budget-bound": BUDGET, "long-prompt": BUDGET, "kv-held-idle": ("kv_blocks",)}
"""Findings that promise to cut other waits than that for their own cause."""
UNITS = {
    "prefill-starves-decode": "ms longest pause",
    "scheduler-overhead": "ms of host",
    "kv-bound": "ms for blocks",
    "no-progress": "ms lost",
    "prefix-cache": "prompt tokens",
    "slow-steps": "ms in all",
}
"""Findings that promise something else than a shorter wait."""
DRIVEN_AS = {"num_gpu_blocks_override": "num_blocks"}
"""Settings that ``Simulation`` knows under another name."""
NOT_DRIVEN = {"gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype"}
"""Settings that act through a GPU's memory, which a simulation does not have."""


@dataclass(frozen=True)
class Tried:
    """One advice of one case, and the wait before and after."""

    case: str
    finding: str
    setting: str
    value: Any
    refused: str
    """Why vLLM does not accept the value."""
    unit: str
    before: float
    after: float
    total_before_us: float
    """All requests' time."""
    total_after_us: float

    @property
    def helps(self) -> bool:
        """Whether there is a wait, it is cut as it must be, and nothing else grows instead."""
        cut = self.before > 0 and self.after <= (1 - LEAST_CUT) * self.before
        paid = self.total_after_us <= (1 + MOST_LOSS) * self.total_before_us
        return not self.refused and cut and paid

    def row(self) -> str:
        """As a row of the table."""
        outcome = "refused" if self.refused else f"{self.before:.1f} -> {self.after:.1f} {self.unit}"
        total = f"{self.total_before_us / 1e3:.0f} -> {self.total_after_us / 1e3:.0f} ms"
        verdict = "helps" if self.helps else "FAILS"
        setting = f"{self.setting}={self.value}"
        return f"{self.case:34} {self.finding:24} {setting:36} {outcome:32} {total:24} {verdict}"


def advised(folder: Path) -> list[tuple[str, Finding, str, Any]]:
    """Every advice with a drivable setting and a value: case, finding, setting, value."""
    return [
        (run.name, finding, advice.setting, advice.value)
        for run in sorted(path for path in folder.iterdir() if (path / "run.json").exists())
        for finding in report_of(run).findings
        for advice in finding.advice
        if advice.setting and advice.value is not None and advice.setting not in NOT_DRIVEN
    ]


def promised(finding: Finding, setting: str, value: Any) -> str:
    """What an advice promises to cut: preemptions, if it is a watermark; else it depends on the finding.

    A smaller budget promises shorter steps for those who decode.
    """
    if setting == "max_num_batched_tokens" and value < getattr(finding.evidence, "token_budget", 0):
        return UNITS["prefill-starves-decode"]
    if setting == "watermark":
        return "preemptions"
    return UNITS.get(finding.code, "ms in all" if finding.cause is None else "ms waited")


@lru_cache(2)  # the case, which may have several advices, and the run with one of them
def timelines_of(run: Path) -> list[Timeline]:
    """One of each rank."""
    return [make_timeline(trace) for trace in read_run(run).traces]


def amount(run: Path, finding: Finding, unit: str) -> tuple[float, float]:
    """How much of that a run has, and all requests' time in microseconds."""
    timelines = timelines_of(run)
    states = pl.concat([timeline.request_states for timeline in timelines])
    engine = pl.concat([timeline.engine_states for timeline in timelines])
    waits = WAITS_OF.get(finding.code, (finding.cause,))
    amounts = {
        "preemptions": lambda: sum(timeline.preemptions.height for timeline in timelines),
        "prompt tokens": lambda: sum(timeline.steps["prefill_tokens"].sum() for timeline in timelines),
        "ms waited": lambda: _ms(states, pl.col("cause").is_in(waits)),
        "ms for blocks": lambda: _ms(
            states,
            pl.col("cause").is_in(["kv_blocks", "preempted_this_step"]) | (pl.col("state") == "recompute"),
        ),
        "ms lost": lambda: _ms(states, pl.col("state").is_in(["preempted", "recompute", "stalled"])),
        "ms of host": lambda: _ms(engine, ~pl.col("state").is_in(["device", "idle"])),
        "ms longest pause": lambda: max(_pause_ms(timeline.steps) for timeline in timelines),
        "ms in all": lambda: _ms(states, pl.lit(value=True)),
    }
    return amounts[unit](), 1000 * amounts["ms in all"]()


def _pause_ms(steps: pl.DataFrame) -> float:
    """The longest step that decoded."""
    return float(steps.filter(pl.col("decode_tokens") > 0)["busy_us"].max() or 0) / 1000  # type: ignore[arg-type]  # integers


def _ms(rows: pl.DataFrame, which: pl.Expr) -> float:
    return float(rows.filter(which).select((pl.col("end_us") - pl.col("begin_us")).sum()).item()) / 1000


def tried(folder: Path, again: Path) -> list[Tried]:
    """Drive every advice's load once more, into folders below ``again``."""
    wanted = advised(folder)
    if not wanted:
        return []
    orders = []
    for number, (case, _, setting, value) in enumerate(wanted):
        changes = {DRIVEN_AS.get(setting, setting): value}
        orders.append(f"{number}={case}:{json.dumps(changes)}")
    halves = [forked(again, orders[half::2]) for half in range(min(2, len(orders)))]
    for half in halves:
        half.join()
    assert [half.exitcode for half in halves] == [0] * len(halves)
    results = []
    for number, (case, finding, setting, value) in enumerate(wanted):
        run = again / str(number)
        refused = (run / "refused").read_text() if (run / "refused").exists() else ""
        unit = promised(finding, setting, value)
        before, total_before = amount(folder / case, finding, unit)
        after, total_after = (0.0, 0.0) if refused else amount(run, finding, unit)
        results.append(
            Tried(case, finding.code, setting, value, refused, unit, before, after, total_before, total_after)
        )
    return results


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        table = tried(Path(sys.argv[1]), Path(scratch))
    print(*(one.row() for one in table), sep="\n")
    print(f"{sum(one.helps for one in table)} of {len(table)} advices help")
