"""When requests arrive at a given rate: as ``vllm bench serve`` and ``schedtrace run`` draw it."""

from collections.abc import Iterator
from itertools import accumulate, chain, repeat

DRAWN_AT_ONCE = 1024


def arrivals_s(rate: float | None, *, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Seconds from the start at which each request arrives, without end; the first at 0.

    Gaps follow a gamma distribution with shape ``burstiness`` and mean ``1 / rate``, as in ``get_request`` of
    vLLM's ``benchmarks/serve.py``; shape 1 is a Poisson process.

    Args:
        rate: Requests per second; None: all at 0.
        burstiness: Shape of the distribution.
        seed: The same seed gives the same times, however many are taken.
    """
    if rate is None:
        return repeat(0.0)
    return accumulate(chain([0.0], _gaps(rate, burstiness, seed)))


def _gaps(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    import numpy as np  # noqa: PLC0415  # the command line must answer before it is loaded

    draw = np.random.default_rng(seed)
    while True:
        yield from draw.gamma(burstiness, 1.0 / (rate * burstiness), size=DRAWN_AT_ONCE).tolist()
