"""Outcomes as rows: percentiles, objective, Pareto front."""

import re
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from schedtrace.diagnose.throughput import throughput
from schedtrace.errors import UsageError
from schedtrace.model.statistics import Percentiles
from schedtrace.model.sweep_result import Bound, ReplayOutcome, SweepRow

MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}
_BOUND = re.compile(
    r"(?P<latency>ttft|tpot|e2e)_p(?P<percentile>\d+(?:\.\d+)?)=(?P<limit>\d+(?:\.\d+)?)(?P<unit>us|ms|s|m)"
)


def parse_slo(text: str) -> list[Bound]:
    """Parse bounds as they are typed: ``ttft_p99=1s,tpot_p99=50ms,e2e_p50=10s``.

    Raises:
        UsageError: anything else, a limit of 0, a percentile above 100, or the same percentile twice.
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
    """Return a latency of every finished request, in milliseconds."""
    of: dict[str, Sequence[float | None]] = {
        "ttft": outcome.ttft_ms,
        "tpot": outcome.tpot_ms,
        "e2e": outcome.e2e_ms,
    }
    return of[latency]


def bound_values(outcome: ReplayOutcome, bounds: Sequence[Bound]) -> list[float | None]:
    """Return the percentile that each bound is about, in milliseconds."""
    return [percentile(latencies(outcome, bound.latency), bound.percentile) for bound in bounds]


def meets(outcome: ReplayOutcome, bounds: Sequence[Bound]) -> bool:
    """Return whether every bound holds, which takes that every request finished."""
    return len(outcome.ttft_ms) == outcome.requests and all(
        bound.latency == "tpot" if value is None else value <= bound.limit_ms
        for value, bound in zip(bound_values(outcome, bounds), bounds, strict=True)
    )


def good_requests(outcome: ReplayOutcome, bounds: Sequence[Bound]) -> int:
    """Count the finished requests that meet every bound themselves.

    Of several bounds on one latency, each request has to meet that of the highest percentile: it is the
    widest. A request with one output token has no time per output token, and meets any.
    """
    highest = {bound.latency: bound for bound in sorted(bounds, key=lambda bound: bound.percentile)}
    columns = [(latencies(outcome, latency), bound.limit_ms) for latency, bound in highest.items()]
    return sum(
        all(value is None or value <= limit for value, (_, limit) in zip(row, columns, strict=True))
        for row in zip(*(values for values, _ in columns), strict=True)
    )


def pareto_front(costs: Sequence[Sequence[float | None]]) -> list[bool]:
    """Return which rows no other row beats: lower in a column and as low in all others. Equal rows share it.

    Args:
        costs: Rows of equal length, in which lower is better: negate what should be high. A row with a None
            is not on the front and beats nobody.
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
    """Return what the Pareto front is about."""
    return [THROUGHPUT, *(bound.name for bound in compared_latencies(slo))]


def sweep_rows(
    outcomes: Sequence[ReplayOutcome], base: Mapping[str, Any], slo: Sequence[Bound], *, recorded: str | None
) -> list[SweepRow]:
    """Return a row per outcome, by throughput, the highest first; refused ones last.

    Args:
        outcomes: Of different configurations.
        base: Every setting that any of them changes, as it is without changes.
        slo: Bounds; see ``compared_latencies``.
        recorded: Key of the configuration that was recorded; None: there is none.
    """
    rows = [_row(outcome, base, slo, recorded) for outcome in outcomes]
    costs = [
        [
            None if (rate := row.output_tokens_per_s) is None else -rate,
            *bound_values(outcome, compared_latencies(slo)),
        ]
        for row, outcome in zip(rows, outcomes, strict=True)
    ]
    for row, on_front in zip(rows, pareto_front(costs), strict=True):
        row.pareto = on_front
    return sorted(rows, key=lambda row: (row.refused is not None, -(row.output_tokens_per_s or 0.0)))


def _row(
    outcome: ReplayOutcome, base: Mapping[str, Any], slo: Sequence[Bound], recorded: str | None
) -> SweepRow:
    done, lasted = len(outcome.e2e_ms), outcome.duration_s
    judged = bool(slo) and outcome.refused is None
    counted_s = outcome.counted_s or lasted
    rates = throughput(done, 0, outcome.output_tokens, counted_s) if counted_s else None
    steps, outside = outcome.steps, outcome.extrapolated_steps
    return SweepRow(
        settings={**base, **outcome.changes},
        recorded=outcome.key == recorded,
        refused=outcome.refused,
        requests=outcome.requests,
        finished=done,
        too_long=outcome.too_long,
        steps=steps,
        preemptions=outcome.preemptions,
        extrapolated_frac=None if outside is None or not steps else outside / steps,
        output_tokens_per_s=rates.output_tokens_per_s if rates else None,
        requests_per_s=rates.requests_per_s if rates else None,
        ttft_ms=_percentiles(outcome.ttft_ms),
        tpot_ms=_percentiles(outcome.tpot_ms),
        e2e_ms=_percentiles(outcome.e2e_ms),
        bounds_ms=bound_values(outcome, slo),
        meets_slo=meets(outcome, slo) if judged else None,
        goodput_requests_per_s=good_requests(outcome, slo) / lasted if judged and lasted else None,
        pareto=False,
    )


def _percentiles(values: Sequence[float | None]) -> Percentiles | None:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    p50, p90, p99 = (percentile(numbers, at) or 0.0 for at in (50, 90, 99))
    return Percentiles(count=len(numbers), mean=sum(numbers) / len(numbers), p50=p50, p90=p90, p99=p99)
