"""Conversion of a sweep's outcomes to configurations: figures, objective, Pareto front."""

import re
from collections.abc import Iterator, Sequence
from math import inf

from schedtrace.diagnose.serving_metrics import throughput
from schedtrace.errors import UsageError
from schedtrace.model.what_if import Bound, Configuration, Figure, ReplayOutcome

MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}
_BOUND = re.compile(
    r"(?P<latency>ttft|tpot|e2e)_p(?P<percentile>\d+(?:\.\d+)?)=(?P<limit>\d+(?:\.\d+)?)(?P<unit>us|ms|s|m)"
)


def parse_slo(text: str) -> list[Bound]:
    """Parse bounds as on a command line: ``ttft_p99=1s,tpot_p99=50ms,e2e_p50=10s``.

    Raises:
        UsageError: If the text has another form, a limit of 0, a percentile above 100, or a percentile twice.
    """
    bounds: list[Bound] = []
    for part in text.split(","):
        match = _BOUND.fullmatch(part.strip().lower())
        if match is None:
            msg = f"--slo {part.strip()}: expected bounds such as ttft_p99=1s, tpot_p99=50ms or e2e_p50=10s"
            raise UsageError(msg)
        bound = Bound(
            latency=match["latency"],  # type: ignore[arg-type]  # the pattern has its three words
            percentile=float(match["percentile"]),
            limit_ms=float(match["limit"]) * MILLISECONDS[match["unit"]],
        )
        wrong = {
            "a percentile is 100 at most": bound.percentile > 100,  # noqa: PLR2004  # by definition
            "nothing takes no time": bound.limit_ms == 0,
            "given twice": bound.name in {earlier.name for earlier in bounds},
        }
        for why in (why for why, is_wrong in wrong.items() if is_wrong):
            msg = f"--slo {part.strip()}: {why}"
            raise UsageError(msg)
        bounds.append(bound)
    return bounds


def percentile(values: Sequence[float | None], at: float) -> float | None:
    """Return a percentile (0 to 100), linearly interpolated as in ``analyze``; None without values."""
    import numpy as np  # noqa: PLC0415  # --help must answer at once

    numbers = [value for value in values if value is not None]
    return float(np.percentile(numbers, at)) if numbers else None


def latencies(outcome: ReplayOutcome, latency: str) -> Sequence[float | None]:
    """Return one kind of latency of every finished request, in milliseconds."""
    of: dict[str, Sequence[float | None]] = {
        "ttft": outcome.ttft_ms,
        "tpot": outcome.tpot_ms,
        "e2e": outcome.e2e_ms,
    }
    return of[latency]


def bound_values(outcome: ReplayOutcome, bounds: Sequence[Bound]) -> list[float | None]:
    """Return the value of the percentile to which each bound applies, in milliseconds."""
    return [percentile(latencies(outcome, bound.latency), bound.percentile) for bound in bounds]


def meets(outcome: ReplayOutcome, bounds: Sequence[Bound]) -> bool:
    """Return whether every request has finished and every bound holds."""
    return len(outcome.ttft_ms) == outcome.requests and all(
        bound.latency == "tpot" if value is None else value <= bound.limit_ms
        for value, bound in zip(bound_values(outcome, bounds), bounds, strict=True)
    )


def good_requests(outcome: ReplayOutcome, bounds: Sequence[Bound]) -> int:
    """Count the finished requests that meet every bound themselves.

    If a latency has several bounds, each request has to meet the bound of the highest percentile, which is
    the widest. A request with one output token has no time per output token and meets any bound on that time.
    """
    highest = {bound.latency: bound for bound in sorted(bounds, key=lambda bound: bound.percentile)}
    columns = [(latencies(outcome, latency), bound.limit_ms) for latency, bound in highest.items()]
    return sum(
        all(value is None or value <= limit for value, (_, limit) in zip(row, columns, strict=True))
        for row in zip(*(values for values, _ in columns), strict=True)
    )


def pareto_front(costs: Sequence[Sequence[float | None]]) -> list[bool]:
    """Return which rows are not dominated: no other row is lower in one column and no higher in the rest.

    Args:
        costs: Rows of equal length, in which lower is better: negate what should be high. A row with a None
            is not on the front and dominates no row.
    """
    import numpy as np  # noqa: PLC0415  # --help must answer at once

    complete = [at for at, row in enumerate(costs) if None not in row]
    front = [False] * len(costs)
    if not complete:
        return front
    values = np.array([costs[at] for at in complete], dtype=float)
    for at, row in zip(complete, values, strict=True):
        beats = (values <= row).all(axis=1) & (values < row).any(axis=1)
        front[at] = not beats.any()
    return front


THROUGHPUT = "output_tokens_per_s"
USUAL = tuple(Bound(latency=latency, percentile=99, limit_ms=inf) for latency in ("ttft", "tpot"))


def compared_latencies(slo: Sequence[Bound]) -> list[Bound]:
    """Return the latencies of the Pareto front: those of the objective, else p99 of TTFT and TPOT."""
    bounded = {bound.latency for bound in slo}
    return [*slo, *(usual for usual in USUAL if usual.latency not in bounded)]


def objectives(slo: Sequence[Bound]) -> list[str]:
    """Return the names of the dimensions of the Pareto front."""
    return [THROUGHPUT, *(bound.name for bound in compared_latencies(slo))]


LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "E2E": "e2e"}
"""Latencies by the name of their figures."""
PERCENTILES = (50, 90, 99)


def sweep_rows(
    outcomes: Sequence[ReplayOutcome], slo: Sequence[Bound], *, recorded: str | None
) -> list[Configuration]:
    """Return a configuration per outcome, by throughput, highest first; refused ones last.

    Args:
        outcomes: Outcomes of different configurations.
        slo: Bounds; see ``compared_latencies``.
        recorded: Key of the recorded configuration; None if there is none.
    """
    rows = [_row(outcome, slo, recorded) for outcome in outcomes]
    outputs = [output.value if (output := row.figure("output")) else None for row in rows]
    costs = [
        [None if output is None else -output, *bound_values(outcome, compared_latencies(slo))]
        for output, outcome in zip(outputs, outcomes, strict=True)
    ]
    for row, on_front in zip(rows, pareto_front(costs), strict=True):
        row.pareto = on_front
    for base in (row for row in rows if row.recorded):
        for figure in (figure for row in rows if row is not base for figure in row.figures):
            was = base.figure(figure.name)
            if was is not None and was.value and figure.value is not None:
                figure.before, figure.change_frac = was.value, figure.value / was.value - 1
    order = sorted(range(len(rows)), key=lambda at: (rows[at].refused is not None, -(outputs[at] or 0.0)))
    return [rows[at] for at in order]


def _row(outcome: ReplayOutcome, slo: Sequence[Bound], recorded: str | None) -> Configuration:
    is_recorded = outcome.key == recorded
    if outcome.refused is not None:
        bounds_ms: list[float | None] = [None for _ in slo]
        return Configuration(
            changes=outcome.changes, recorded=is_recorded, refused=outcome.refused, bounds_ms=bounds_ms
        )
    steps, outside = outcome.steps, outcome.extrapolated_steps
    return Configuration(
        changes=outcome.changes,
        recorded=is_recorded,
        kv_blocks=outcome.kv_blocks,
        figures=list(_figures(outcome)),
        finished=len(outcome.e2e_ms),
        too_long=outcome.too_long,
        steps=steps,
        preemptions=outcome.preemptions,
        extrapolated_frac=None if outside is None or not steps else outside / steps,
        bounds_ms=bound_values(outcome, slo),
        meets_slo=meets(outcome, slo) if slo else None,
        goodput_requests_per_s=(
            good_requests(outcome, slo) / outcome.duration_s if slo and outcome.duration_s else None
        ),
    )


def _figures(outcome: ReplayOutcome) -> Iterator[Figure]:
    """Yield throughput over the time with requests present, and latencies over all trials' requests."""
    if seconds := outcome.counted_s or outcome.duration_s:
        rates = throughput(len(outcome.e2e_ms), 0, outcome.output_tokens, seconds)
        yield _figure("output", "tok/s", rates.output_tokens_per_s, higher_is_better=True)
        yield _figure("requests", "req/s", rates.requests_per_s, higher_is_better=True)
    for name, latency in LATENCIES.items():
        numbers = [value for value in latencies(outcome, latency) if value is not None]
        if numbers:
            yield _figure(f"{name} mean", "ms", sum(numbers) / len(numbers))
            for at in PERCENTILES:
                yield _figure(f"{name} p{at}", "ms", percentile(numbers, at))


def _figure(name: str, unit: str, value: float | None, *, higher_is_better: bool = False) -> Figure:
    return Figure(name=name, unit=unit, higher_is_better=higher_is_better, decided=False, value=value)
