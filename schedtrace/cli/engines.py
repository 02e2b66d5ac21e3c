"""``schedtrace engines``: the engines on this machine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from schedtrace.cli.options import print_line

if TYPE_CHECKING:
    from schedtrace.model.live import Status


def engines(
    server: Annotated[
        str, typer.Argument(metavar="[PID|all]", help="List only the engines of this server.")
    ] = "all",
) -> None:
    """List vLLM's engines on this machine, and where each is recorded."""
    from schedtrace.engine.running_engines import find_engines, listening_engines
    from schedtrace.engine.unprepared import (
        engines_of_others,
        foreign_engine_message,
        unprepared_engines,
        without_socket,
    )

    running, silent, notes, _ = listening_engines() if server == "all" else find_engines(server)
    unprepared = []
    if server == "all":
        here = {engine.here for engine in running}
        unprepared = [
            f"pid {pid}: {without_socket(pid)}" for pid in unprepared_engines(None) if pid not in here
        ]
        unprepared += [foreign_engine_message(pid, user) for pid, user in engines_of_others(None).items()]
    lines = [line for engine in running for line in _lines(engine.display_name, engine.status)]
    lines += [*silent.values(), *unprepared]
    for line in [*(lines or ["no engine of vLLM runs here"]), *notes]:
        print_line(line)


def _lines(name: str, status: "Status") -> Iterator[str]:
    """Yield the lines for the user about an engine that answers."""
    from schedtrace.model.printable import shortened

    load = f"{status.running:,} running, {status.waiting:,} waiting"
    if status.input_requests:
        load += f", {status.input_requests:,} in its input queue"
    yield f"{name}: {shortened(status.model, 200)}, vLLM {shortened(status.vllm_version, 100)}, {load}"
    how = " (attached)" if status.attached else ""
    left = "" if status.left_s is None else f", {status.left_s:,.0f} s left"
    if status.keeps:
        yield f"  in memory: {status.keeps} (schedtrace snapshot {status.pid} writes it)"
    elif status.recording:
        yield f"  recorded to {status.recording}{how}{left}"
    elif status.attached or status.stopped:
        yield f"  {status.stopped or 'its recording has stopped: the log of vLLM says why'}"
    else:
        yield "  not recorded"
    if status.measured:
        yield f"  metrics on {status.measured}"
    if status.paused:
        yield f"  {status.paused}"
    if status.orphaned:
        yield f"  {status.orphaned}"
    if status.starved:
        yield f"  {status.starved}"
    if status.stalled_s is not None:
        yield f"  no step has made progress for {status.stalled_s:,.0f} s: {status.stall}"
