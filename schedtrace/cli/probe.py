"""``schedtrace probe``: whether running engines are alive and make progress."""

from typing import Annotated

import typer

from schedtrace.cli.attach import EngineArgument
from schedtrace.cli.options import print_line, seconds
from schedtrace.errors import ExitCode


def probe(
    engine: EngineArgument = None,
    ready: Annotated[
        bool, typer.Option("--ready", help="Also fail if an engine is paused: readiness instead of liveness.")
    ] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="Time within which an engine must answer.")
    ] = "10s",
    engines: Annotated[
        int,
        typer.Option(
            "--engines", min=1, max=10_000, help="Minimum number of engines that must be listening."
        ),
    ] = 1,
) -> None:
    """Check whether engines make progress, as a health probe.

    Prints for each engine whether it is healthy, busy, paused, stalled (and why), silent or dead. Exits with
    0 if all make progress or have nothing to do, with 1 if one is stalled (with --ready, also if one is
    paused), and with 4 if one is dead or does not answer. A long queue is not a failure.
    """
    from schedtrace.engine.running_engines import probe_engines

    probed = probe_engines(engine, timeout_s=seconds("--timeout", timeout) or 0.0, engines=engines)
    for each in probed:
        print_line(each.probe_line)
    if any(each.health.state in {"silent", "dead"} for each in probed):
        raise typer.Exit(ExitCode.ENGINE)
    if not all(each.health.is_ready if ready else each.health.is_alive for each in probed):
        raise typer.Exit(ExitCode.FINDINGS)
