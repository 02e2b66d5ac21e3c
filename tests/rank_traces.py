"""Run folders of data-parallel ranks made by hand, whose common steps are as long as their slowest rank."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from schedtrace.model.manifest import write_manifest
from schedtrace.model.trace import Events, Exit, Line, ScheduledRequest
from tests.makers import arrival, finish, header, manifest, write_trace
from tests.makers import step as a_step

BASE_US, REQUEST_US, PREFILL_TOKEN_US = 5_000, 100, 20
"""A common step, for each request of its largest rank, and for each prefill token of the rank with most."""

Turn = tuple[int, int] | None
"""Decoding requests and prefill tokens of a rank in a common step; None: a dummy batch."""


def length_us(turns: Sequence[Turn], factors: Sequence[float]) -> int:
    """How long a common step takes: as long as the rank with the longest."""
    took = [
        factor * (BASE_US + REQUEST_US * turn[0] + PREFILL_TOKEN_US * turn[1])
        for turn, factor in zip(turns, factors, strict=True)
        if turn
    ]
    return round(max(took, default=BASE_US))


def write_ranks(
    folder: Path,
    passes: Sequence[Sequence[Turn]],
    *,
    lockstep: bool = True,
    factors: Sequence[float] | None = None,
    refused: str = "",
    prompts: Mapping[str, int] = MappingProxyType({}),
    stops: Mapping[int, int] = MappingProxyType({}),
    **fields: Any,
) -> Path:
    """A run folder with a trace per rank.

    Requests ``<rank>-<n>`` decode from their rank's first turn on as long as it has that many; every prefill
    is one of a prompt of its own.

    Args:
        folder: Does not exist yet.
        passes: Of each common step, each rank's turn.
        lockstep: With wave and step counter.
        factors: How many times as long each rank takes for its work; independent ranks then go at a pace of
            their own. Not given: all are alike, and every step takes as long as the slowest rank's.
        prompts: Prompt tokens of decoding requests; 1 unless stated.
        stops: Microseconds by which a common step takes longer on all ranks, by its number.
        refused: A cause: one request of rank 0 waits for it all the time.
        fields: Of the header.
    """
    ranks = len(passes[0])
    for rank in range(ranks):
        lengths = [length_us(turns, factors or [1.0] * ranks) for turns in passes]
        if factors and not lockstep:
            lengths = [length_us([turns[rank]], [factors[rank]]) for turns in passes]
        lengths = [took + stops.get(number, 0) for number, took in enumerate(lengths)]
        refuses = refused if rank == 0 else ""
        lines = [*_lines(rank, passes, lengths, prompts, lockstep=lockstep, refused=refuses)]
        size = ranks if lockstep else 1
        head = header(engine_rank=rank, **{"data_parallel_size": size, "max_num_running_reqs": 16, **fields})
        write_trace(folder / f"engine-{rank}.jsonl", head, *lines)
    write_manifest(folder, manifest())
    return folder


def _lines(
    rank: int,
    passes: Sequence[Sequence[Turn]],
    lengths: Sequence[int],
    prompts: Mapping[str, int],
    *,
    lockstep: bool,
    refused: str,
) -> list[Line]:
    lines: list[Line] = []
    clock, computed, began = 0, {}, {}
    gone: list[Any] = []
    for counter, (turns, took) in enumerate(zip(passes, lengths, strict=True)):
        turn = turns[rank]
        if turn is None:
            gone += [_finished(name, tokens, began[name], clock) for name, tokens in computed.items()]
            computed = {}
        else:
            decodes, prefill = turn
            names = [f"{rank}-{number}" for number in range(decodes)]
            new = [name for name in names if name not in computed]
            left = [name for name in computed if name not in names]
            gone += [_finished(name, computed.pop(name), began[name], clock) for name in left]
            rows = [
                ScheduledRequest(name, 0, prompts.get(name, 1), "new")
                if name in new
                else ScheduledRequest(name, computed[name], 1)
                for name in names
            ]
            came = [arrival(name, clock, clock, prompt_tokens=prompts.get(name, 1)) for name in new]
            if prefill:
                prompt = f"{rank}-p{counter}"
                rows.append(ScheduledRequest(prompt, 0, prefill, "new"))
                came.append(arrival(prompt, clock, clock, prompt_tokens=prefill))
            if refused and not lines:
                came.append(arrival("waits", clock, clock, prompt_tokens=100))
            exits = [
                Exit("waiting", "break", refused or "queue_empty", "waits" if refused else None, via="source")
            ]
            lines.append(
                a_step(
                    len(lines),
                    start=clock,
                    back=took - 100,
                    requests=rows,
                    total_requests=len(rows),
                    remaining_budget=1000 - decodes - prefill,
                    num_new=len(rows) - decodes + len(new),
                    num_continued=decodes - len(new),
                    running=len(rows),
                    waiting=int(bool(refused)),
                    prefill_tokens=prefill + sum(prompts.get(name, 1) for name in new),
                    decode_tokens=decodes - len(new),
                    exits=exits,
                    arrived=came,
                    finished=gone,
                    update_us=50,
                    **({"wave": 0, "step_counter": counter} if lockstep else {}),
                )
            )
            gone = [_finished(prompt, 1, clock, clock + took, prefill)] if prefill else []
            for name in names:
                computed[name] = computed[name] + 1 if name in computed else prompts.get(name, 1)
                began.setdefault(name, clock)
        clock += took
    gone += [_finished(name, tokens, began[name], clock) for name, tokens in computed.items()]
    if refused:
        gone.append(finish("waits", "ABORTED", finished_us=clock, queued_us=0, output_tokens=0))
    return [*lines, Events(at_us=clock, finished=gone)]


def _finished(name: str, tokens: int, began_us: int, us: int, prompt: int = 1) -> Any:
    times = {"queued_us": began_us, "scheduled_us": began_us, "first_token_us": min(us, began_us + 5_000)}
    return finish(name, finished_us=us, last_token_us=us, prompt_tokens=prompt, output_tokens=tokens, **times)


def prefills(
    passes: int, every: dict[int, int], first: dict[int, int], tokens: int = 500
) -> list[list[Turn]]:
    """Two ranks with 8 decoding requests each, of which each prefills from a step on, every so many steps."""

    def turn(rank: int, counter: int) -> Turn:
        due = rank in every and counter >= first[rank] and (counter - first[rank]) % every[rank] == 0
        return 8, tokens if due else 0

    return [[turn(rank, counter) for rank in (0, 1)] for counter in range(passes)]
