"""Random loads: lengths as in vLLM's throughput benchmark, arrivals at a rate."""

import random
from collections.abc import Iterator
from itertools import islice

from schedtrace.errors import UsageError
from schedtrace.model.message import message
from schedtrace.workloads.arrivals import arrivals_s
from schedtrace.workloads.request import LoadRequest
from schedtrace.workloads.workload import Workload, make_workload

DEFAULT_PROMPTS = 1000
DEFAULT_INPUT_LEN = 1024
DEFAULT_OUTPUT_LEN = 128
"""As in ``vllm bench throughput``."""

AT_ONCE = message(
    "All requests arrive at once. A front end hands them over one by one, so an engine's first steps may "
    "see fewer."
)


def random_lengths(
    input_len: int, output_len: int, *, range_ratio: float = 0.0, seed: int = 0
) -> Iterator[tuple[int, int]]:
    """Prompt and output tokens of one request after the other, without end.

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
    """The load of ``schedtrace run`` with the same options: the same lengths at the same times.

    Args:
        num_prompts: Requests.
        input_len: Mean prompt, in tokens.
        output_len: Mean output, in tokens.
        range_ratio: Lengths are within this share of their mean.
        rate: Requests per second; None: all at once.
        burstiness: Shape of the gamma distribution of the gaps; 1 is Poisson.
        prequeue: All requests are queued before the first step.
        seed: Of lengths and gaps.

    Raises:
        UsageError: both ``rate`` and ``prequeue``.
    """
    if prequeue and rate is not None:
        msg = "--prequeue queues all requests at once: it cannot go with --request-rate"
        raise UsageError(msg)

    def read() -> Iterator[LoadRequest]:
        lengths = random_lengths(input_len, output_len, range_ratio=range_ratio, seed=seed)
        times = arrivals_s(rate, burstiness=burstiness, seed=seed)
        for number, ((prompt, output), at_s) in enumerate(
            islice(zip(lengths, times, strict=False), num_prompts)
        ):
            yield LoadRequest(
                request_id=f"r{number}", arrived_us=at_s * 1e6, prompt_tokens=prompt, output_tokens=output
            )

    at_once = rate is None and not prequeue and num_prompts > 1
    return make_workload("random", "random", read, notes=[AT_ONCE] if at_once else [])
