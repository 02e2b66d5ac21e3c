"""Random loads: lengths as in vLLM's throughput benchmark, arrivals at a rate."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, chain, islice, repeat

import msgspec

from schedtrace.errors import InputError, UsageError
from schedtrace.model.say import say
from schedtrace.workloads.workload import LoadRequest, Workload, make_workload

DRAWN_AT_ONCE = 1024


def arrivals_s(rate: float | None, *, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Yield the time in seconds at which each request arrives, without end; the first is 0.

    Gaps follow a gamma distribution with shape ``burstiness`` and mean ``1 / rate``, as in ``get_request`` of
    vLLM's ``benchmarks/serve.py``; shape 1 is a Poisson process.

    Args:
        rate: Requests per second; None if all arrive at 0.
        burstiness: Shape of the distribution.
        seed: Random seed; the times do not depend on how many are taken.
    """
    if rate is None:
        return repeat(0.0)
    return accumulate(chain([0.0], _gaps(rate, burstiness, seed)))


def _gaps(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    import numpy as np  # noqa: PLC0415  # the command line must answer before it is loaded

    draw = np.random.default_rng(seed)
    while True:
        yield from draw.gamma(burstiness, 1.0 / (rate * burstiness), size=DRAWN_AT_ONCE).tolist()


def at_times_of(load: Workload, times: Workload) -> Workload:
    """Return the requests of ``load`` at other times: the n-th arrives when the n-th of ``times`` did.

    An idle engine does not wake at once. Requests that were waiting when it began the first recorded step
    therefore reach the engine together.

    Raises:
        InputError: If ``times`` has fewer requests.
    """
    if len(times) < len(load):
        msg = f"{times.name}: {len(times)} arrivals for {len(load)} requests; give --num-prompts {len(times)}"
        raise InputError(msg)

    woke_us = max((timed.reached_us for timed in times if timed.queued_step == 0), default=0.0)

    def random_requests() -> Iterator[LoadRequest]:
        for request, timed in zip(load, times, strict=False):
            reached_us = max(timed.reached_us, woke_us)
            yield msgspec.structs.replace(
                request, arrived_us=timed.arrived_us, front_end_us=reached_us - timed.arrived_us, after=None
            )

    return replace(
        load, name=f"{load.name} at the times of {times.name}", read=random_requests, later_turns=0
    )


DEFAULT_PROMPTS = 1000
DEFAULT_INPUT_LEN = 1024
DEFAULT_OUTPUT_LEN = 128
"""Default output length of ``vllm bench throughput``."""

AT_ONCE = say(
    "All requests arrive at once. A front end hands them over one by one, so an engine's first steps may "
    "see fewer."
)


def random_lengths(
    input_len: int, output_len: int, *, range_ratio: float = 0.0, seed: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield the prompt and output tokens of one request after the other, without end.

    Lengths are uniform in ``[len * (1 - range_ratio), len * (1 + range_ratio)]`` and at least 1, as in vLLM's
    benchmark.
    """
    draw = random.Random(seed)  # noqa: S311  # a workload, not a secret

    def length(mean: int) -> int:
        spread = int(mean * range_ratio)
        return max(1, draw.randint(mean - spread, mean + spread))

    while True:
        yield length(input_len), length(output_len)


def random_workload(
    *,
    num_prompts: int = DEFAULT_PROMPTS,
    input_len: int = DEFAULT_INPUT_LEN,
    output_len: int = DEFAULT_OUTPUT_LEN,
    range_ratio: float = 0.0,
    rate: float | None = None,
    burstiness: float = 1.0,
    prequeue: bool = False,
    seed: int = 0,
) -> Workload:
    """Return the load of ``schedtrace run`` with the same options: the same lengths at the same times.

    Args:
        num_prompts: Number of requests.
        input_len: Mean length of prompts in tokens.
        output_len: Mean length of outputs in tokens.
        range_ratio: Share of the mean by which lengths may differ from it.
        rate: Requests per second; None if all arrive at once.
        burstiness: Shape of the gamma distribution of the gaps; 1 is Poisson.
        prequeue: Whether all requests are queued before the first step.
        seed: Seed of lengths and gaps.

    Raises:
        UsageError: If both ``rate`` and ``prequeue`` are set.
    """
    if prequeue and rate is not None:
        msg = "--prequeue queues all requests at once: it cannot go with --request-rate"
        raise UsageError(msg)

    def random_requests() -> Iterator[LoadRequest]:
        lengths = random_lengths(input_len, output_len, range_ratio=range_ratio, seed=seed)
        times = arrivals_s(rate, burstiness=burstiness, seed=seed)
        for number, ((prompt, output), at_s) in enumerate(
            islice(zip(lengths, times, strict=False), num_prompts)
        ):
            yield LoadRequest(
                request_id=f"r{number}", arrived_us=at_s * 1e6, prompt_tokens=prompt, output_tokens=output
            )

    at_once = rate is None and not prequeue and num_prompts > 1
    return make_workload("random", "random", random_requests, notes=[AT_ONCE] if at_once else [])
