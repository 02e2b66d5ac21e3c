"""Data of one observation of a running engine, for the screen and for lines of text."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import polars as pl

from schedtrace.diagnose.serving_metrics import covered_seconds, throughput
from schedtrace.model.message import Message

OLD_S = 20
"""Age in seconds above which a verdict is old."""


@dataclass
class Cell:
    """Figures of one second of an engine, or of all engines, from the steps that began in this second."""

    steps: int = 0
    left: dict[str, float] = field(default_factory=dict)
    """Number of requests that wait after the second's last step, by cause; also empty if no request runs."""
    waiting: dict[str, float] = field(default_factory=dict)
    """Mean number of requests that a step of this second left waiting, by cause."""


@dataclass(frozen=True)
class LiveFigures:
    """Figures of an engine, or of all engines."""

    rank: int | None
    """Data-parallel rank; None for the sum of all."""
    state: str
    """Reason why the engine makes no steps, or a note that it has ended; empty while it makes steps."""
    running: int
    seats: int | None
    waiting: int
    waiting_for: dict[str, int]
    """Number of requests that wait after the last step, by cause."""
    kv_used: int | None
    kv_total: int | None
    budget_frac: float | None
    """Share of the token budget used by the steps of the last 10 s that scheduled anything; None if there was
    none."""
    preempted_per_s: float
    """Number of preemptions per second in the last 10 s."""
    steps_per_s: float
    output_tokens: int
    """Number of output tokens that came back in the last 10 s."""
    present: pl.DataFrame
    """Spans of these 10 s in which any engine had a request, by the wall clock; throughput is computed over
    them."""

    @property
    def output_per_s(self) -> float | None:
        """Output tokens per second of the time in which requests were present; None if none were."""
        time_s = covered_seconds(self.present)
        return throughput(0, 0, self.output_tokens, time_s).output_tokens_per_s if time_s else None

    @property
    def kv_frac(self) -> float | None:
        """Share of the KV blocks that is in use; None if unknown."""
        return None if self.kv_used is None or not self.kv_total else self.kv_used / self.kv_total


@dataclass(frozen=True)
class Slow:
    """Unfinished request in the list of the slowest ones."""

    rank: int
    request_id: str
    age_us: int
    """Time since the request's arrival."""
    waits_us: int | None
    """Time that the request has been in the waiting queue; None if it runs."""
    cause: str | None
    """Cause of the wait."""
    preempted: int
    """Number of the request's preemptions so far."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on the engines' last seconds."""

    span_s: int
    at_s: float
    """End of the span (Unix time)."""
    sentences: list[Message]
    advice: Message
    """First piece of advice; empty if there is none."""
    code: str = ""
    """Code of the verdict's finding; empty if nothing limited the engines."""
    judged: bool = True
    """Whether there was any step to judge."""
    changed: str = ""
    """Change in kind since the verdict, worded to follow "before"; empty without a change."""

    def old(self, now_s: float) -> bool:
        """Return whether the verdict may no longer hold: a change occurred, or it is too old."""
        return bool(self.changed) or now_s - self.at_s > min(self.span_s, OLD_S)


@dataclass(frozen=True)
class TraceNote:
    """Event of the trace, for the user."""

    at_s: float
    text: str


@dataclass(frozen=True)
class Seen:
    """Observation of a run's engines at one moment."""

    at_s: float
    """Unix time of the observation."""
    name: str
    """Name of the run; empty if there is none yet."""
    awaited: str
    """Description of what the watch waits for while there is no engine."""
    engines: list[LiveFigures]
    verdicts: list[Verdict]
    slowest: list[Slow]
    """Slowest requests: waiting ones by wait, the longest first, then running ones by age."""
    cells: dict[int | None, list[Cell]]
    """Cells of the last seconds by rank, in order of time; the key None is for all engines."""
    edge_s: int
    """Last second of the charts (Unix time)."""
    causes: list[str]
    """Causes of all waits since the watch began, in order of appearance."""
    notes: list[TraceNote]
    ended: bool
    """Whether all engines have ended."""
    over: bool
    """Whether the watch has nothing more to show."""

    def total(self) -> LiveFigures | None:
        """Return the sum of all engines; None if there is none yet.

        The sum has a state only if all engines have one: that of the first.
        """
        engines = self.engines
        if len(engines) <= 1:
            return engines[0] if engines else None
        causes: Counter[str] = Counter()
        for engine in engines:
            causes.update(engine.waiting_for)
        budgets = [engine.budget_frac for engine in engines if engine.budget_frac is not None]
        return LiveFigures(
            rank=None,
            state=engines[0].state if all(engine.state for engine in engines) else "",
            running=sum(engine.running for engine in engines),
            seats=_sum([engine.seats for engine in engines]),
            waiting=sum(engine.waiting for engine in engines),
            waiting_for=dict(causes),
            kv_used=_sum([engine.kv_used for engine in engines]),
            kv_total=_sum([engine.kv_total for engine in engines]),
            budget_frac=sum(budgets) / len(budgets) if budgets else None,
            preempted_per_s=sum(engine.preempted_per_s for engine in engines),
            steps_per_s=sum(engine.steps_per_s for engine in engines),
            output_tokens=sum(engine.output_tokens for engine in engines),
            present=pl.concat([engine.present for engine in engines]),
        )


def _sum(values: list[int | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if len(numbers) == len(values) else None


UNNAMED = "other"
"""Cause of requests that wait although nothing refused them."""


def cells_by_second(rows: pl.DataFrame) -> dict[int, Cell]:
    """Return a cell for each second in which steps began, by Unix time in seconds.

    Args:
        rows: Rows of ``per_step``, in Unix time.
    """
    by_second: dict[int, Cell] = {}
    sums: defaultdict[int, Counter[str]] = defaultdict(Counter)
    columns = ("begin_us", "running", "waiting", "cause")
    for begin_us, running, waiting, cause in rows.select(columns).iter_rows():
        second = begin_us // 1_000_000
        cell = by_second.setdefault(second, Cell())
        cell.steps += 1
        cell.left = {cause or UNNAMED: waiting} if waiting and running else {}
        if waiting:
            sums[second][cause or UNNAMED] += waiting
    for second, cell in by_second.items():
        cell.waiting = {cause: count / cell.steps for cause, count in sums[second].items()}
    return by_second


def added(earlier: Cell, later: Cell) -> Cell:
    """Return the sum of two cells for the same second of an engine."""
    steps = earlier.steps + later.steps
    waited = dict.fromkeys([*earlier.waiting, *later.waiting], 0.0)
    for part in (earlier, later):
        for cause, count in part.waiting.items():
            waited[cause] += count * part.steps
    return Cell(
        steps=steps,
        left=later.left if later.steps else earlier.left,
        waiting={cause: count / steps for cause, count in waited.items()},
    )


def summed_cells(engines: list[dict[int, Cell]], edge_s: int, seconds_shown: int) -> list[Cell]:
    """Return the cells of the last seconds, summed over engines; a second without steps repeats the queue.

    Args:
        engines: Each engine's cells by second.
        edge_s: Last second (Unix time).
        seconds_shown: Number of seconds.
    """
    shown = [Cell() for _ in range(seconds_shown)]
    for engine in engines:
        before = Cell()
        for place, second in enumerate(range(edge_s - seconds_shown + 1, edge_s + 1)):
            cell = engine.get(second)
            if cell is None:
                cell = Cell(waiting=before.left, left=before.left)
            before = cell
            whole = shown[place]
            whole.steps += cell.steps
            for cause, count in cell.waiting.items():
                whole.waiting[cause] = whole.waiting.get(cause, 0.0) + count
    return shown
