"""Load of a run as a timed trace in Mooncake's format, which other tools can replay.

Each request is a line of JSON: ``timestamp`` (ms since the first), ``input_length``, ``output_length`` and
``hash_ids``, a number for every full or partial block of 512 prompt tokens. Two prompts share their first k
blocks if their first k numbers are equal.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import msgspec

from schedtrace.model import safe_files
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.read.run import Run
from schedtrace.workloads.recorded_load import loads_of_run
from schedtrace.workloads.workload import LoadRequest, Workload

BLOCK = 512
"""Number of tokens in a block."""
MILLISECOND_US = 1000


def mooncake_loads(run: Run) -> dict[str, Workload]:
    """Return each trial's load by file name; a server, which has no trials, has a single load.

    Raises:
        InputError: If no requests are recorded.
    """
    loads = loads_of_run(run.traces, manifest=run.manifest)
    names = (
        ["mooncake.jsonl"]
        if len(loads) == 1
        else [f"mooncake-{number}.jsonl" for number in range(1, len(loads) + 1)]
    )
    return dict(zip(names, loads, strict=True))


def write_mooncake(load: Workload, file: Path) -> int:
    """Write a load and return its number of requests."""
    requests = sorted(load, key=lambda request: request.arrived_us)
    ids = None if load.prefix_block is None else _hash_ids(requests, load.prefix_block)
    first_us = requests[0].arrived_us if requests else 0.0
    with safe_files.writable(file) as target:
        for request in requests:
            row: dict[str, int | list[int]] = {
                "timestamp": round((request.arrived_us - first_us) / MILLISECOND_US),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
            }
            if ids is not None:
                row["hash_ids"] = next(ids)
            target.write(msgspec.json.encode(row) + b"\n")
    return len(requests)


def mooncake_notes(load: Workload) -> Iterator[Message]:
    """Yield notes on the properties of the load that such a file omits."""
    if unknown := sum(request.abort_us is not None or request.abort_step is not None for request in load):
        yield say(
            "{unknown:n request} did not end by themselves: output_length is the most that they could "
            "have generated",
            unknown=unknown,
        )
    if load.prefix_block is None:
        yield say("which prompts begin alike is not recorded: the file has no hash_ids")
    else:
        yield say(
            "of prompts that begin alike, whole blocks of {block:n token} are shared in the file; the trace "
            "has blocks of {recorded:n token}",
            block=BLOCK,
            recorded=load.prefix_block,
        )


def _hash_ids(requests: Iterable[LoadRequest], recorded: int) -> Iterator[list[int]]:
    """Yield the numbers of each request's blocks; blocks are numbered in the order of their first appearance.

    A block with unknown content gets a unique number.

    Args:
        requests: Requests in order of arrival.
        recorded: Number of tokens per block in the trace.
    """
    numbers = count()
    # By the block before, the block's content and its length.
    recorded_blocks: dict[tuple[int | None, tuple[int, ...], int], int] = {}
    for request in requests:
        ids: list[int] = []
        known_tokens = len(request.prefix) * recorded
        for begin in range(0, request.prompt_tokens, BLOCK):
            end = min(begin + BLOCK, request.prompt_tokens)
            if end > known_tokens:
                ids.append(next(numbers))
                continue
            inside = request.prefix[begin // recorded : -(-end // recorded)]
            key = (ids[-1] if ids else None, inside, end - begin)
            if key not in recorded_blocks:
                recorded_blocks[key] = next(numbers)
            ids.append(recorded_blocks[key])
        yield ids
