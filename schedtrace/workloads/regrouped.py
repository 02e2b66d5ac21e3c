"""A load at the times of another: made-up requests with the arrival gaps of a recorded trial."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from schedtrace.errors import InputError
from schedtrace.workloads.request import LoadRequest
from schedtrace.workloads.workload import Workload


def at_times_of(load: Workload, times: Workload) -> Workload:
    """The requests of ``load``, the nth arriving when the nth of ``times`` did.

    An idle engine does not wake at once. Those that it found waiting when it did, in the recorded first step,
    reach the engine together.

    Raises:
        InputError: ``times`` has fewer requests.
    """
    if len(times) < len(load):
        msg = f"{times.name}: {len(times)} arrivals for {len(load)} requests; give --num-prompts {len(times)}"
        raise InputError(msg)

    woke_us = max((_reached_us(timed) for timed in times if timed.queued_step == 0), default=0.0)

    def read() -> Iterator[LoadRequest]:
        for request, timed in zip(load, times, strict=False):
            reached_us = max(_reached_us(timed), woke_us)
            yield msgspec.structs.replace(
                request, arrived_us=timed.arrived_us, front_end_us=reached_us - timed.arrived_us
            )

    return replace(load, name=f"{load.name} at the times of {times.name}", read=read)


def _reached_us(request: LoadRequest) -> float:
    return request.arrived_us + request.front_end_us
