"""Service level objectives: bounds on percentiles of latencies, and the requests that meet them."""

import re
from collections.abc import Sequence

from schedtrace.errors import UsageError
from schedtrace.model.sweep_result import Bound, Outcome

MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}
_BOUND = re.compile(
    r"(?P<latency>ttft|tpot|e2e)_p(?P<percentile>\d+(?:\.\d+)?)=(?P<limit>\d+(?:\.\d+)?)(?P<unit>us|ms|s|m)"
)


def parse_slo(text: str) -> list[Bound]:
    """Bounds as they are typed: ``ttft_p99=1s,tpot_p99=50ms,e2e_p50=10s``.

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
            "given twice": bound.name in {other.name for other in bounds},
        }
        for why in (why for why, is_wrong in wrong.items() if is_wrong):
            msg = f"--slo {part.strip()}: {why}"
            raise UsageError(msg)
        bounds.append(bound)
    return bounds


def percentile(values: Sequence[float | None], at: float) -> float | None:
    """A percentile (0 to 100), linearly interpolated as in ``analyze``; None without values."""
    import numpy as np  # noqa: PLC0415  # --help must answer at once

    known = [value for value in values if value is not None]
    return float(np.percentile(known, at)) if known else None


def latencies(outcome: Outcome, latency: str) -> Sequence[float | None]:
    """One latency of every finished request, in milliseconds."""
    of: dict[str, Sequence[float | None]] = {
        "ttft": outcome.ttft_ms,
        "tpot": outcome.tpot_ms,
        "e2e": outcome.e2e_ms,
    }
    return of[latency]


def measured(outcome: Outcome, bounds: Sequence[Bound]) -> list[float | None]:
    """The percentile that each bound is about, in milliseconds."""
    return [percentile(latencies(outcome, bound.latency), bound.percentile) for bound in bounds]


def meets(outcome: Outcome, bounds: Sequence[Bound]) -> bool:
    """Whether every bound holds, which takes that every request finished."""
    unknown = (value is None and bound.latency != "tpot" for value, bound in _with(outcome, bounds))
    broken = (value is not None and value > bound.limit_ms for value, bound in _with(outcome, bounds))
    return len(outcome.ttft_ms) == outcome.requests and not any(unknown) and not any(broken)


def good_requests(outcome: Outcome, bounds: Sequence[Bound]) -> int:
    """Finished requests that meet every bound themselves.

    Of several bounds on one latency, each request has to meet that of the highest percentile: it is the
    widest. A request with one output token has no time per output token, and meets any.
    """
    highest = {bound.latency: bound for bound in sorted(bounds, key=lambda bound: bound.percentile)}
    columns = [(latencies(outcome, latency), bound.limit_ms) for latency, bound in highest.items()]
    return sum(
        all(value is None or value <= limit for value, (_, limit) in zip(row, columns, strict=True))
        for row in zip(*(values for values, _ in columns), strict=True)
    )


def _with(outcome: Outcome, bounds: Sequence[Bound]) -> list[tuple[float | None, Bound]]:
    return list(zip(measured(outcome, bounds), bounds, strict=True))
