"""``schedtrace engines``: what runs here."""

from typing import Annotated

import typer

from schedtrace.cli.options import print_line


def engines(
    server: Annotated[
        str, typer.Argument(metavar="[PID|all]", help="Only those of this server (default: all).")
    ] = "all",
) -> None:
    """List vLLM's engines on this machine and what records them."""
    from schedtrace.engine.running_engines import listening, meant, no_answer
    from schedtrace.engine.unprepared import unprepared_engines, without_socket

    found, silent = listening() if server == "all" else meant(server)
    others = unprepared_engines(None) if server == "all" else []
    for one in found:
        status = one.status
        load = f"{status.running:,} running, {status.waiting:,} waiting"
        if status.input_requests:
            load += f", {status.input_requests:,} in its input queue"
        print_line(f"{one.name}: {status.model}, vLLM {status.vllm_version}, {load}")
        how = " (attached)" if status.attached else ""
        left = "" if status.left_s is None else f", {status.left_s:,.0f} s left"
        if status.keeps:
            print_line(f"  in memory: {status.keeps} (schedtrace snapshot {status.pid} writes it)")
        elif status.recording:
            print_line(f"  recorded to {status.recording}{how}{left}")
        else:
            stopped = "its recording has stopped: vLLM's log says why"
            print_line(f"  {stopped if status.attached else 'not recorded'}")
        if status.paused:
            print_line(f"  {status.paused}")
        if status.stalled_s is not None:
            print_line(f"  no step has made progress for {status.stalled_s:,.0f} s: {status.stall}")
    for pid in silent:
        print_line(no_answer(pid))
    for pid in others:
        print_line(f"pid {pid}: {without_socket(pid)}")
    if not found and not silent and not others:
        print_line("no engine of vLLM runs here")
