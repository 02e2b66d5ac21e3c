"""``schedtrace attach``, ``detach`` and ``snapshot``: recordings of running engines."""

from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.options import HASH_IDS, RecordingFolder, TraceOption, print_line, seconds, trace_bounds
from schedtrace.errors import UsageError, engine_error

EngineArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[PID|all]",
        help="Process id of an engine or its server; 'all': this user's engines (default: the only server).",
    ),
]

MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="on|off|[HOST:]PORT|otlp",
        help="Switch metrics on or off instead of recording. PORT: serve them on this port plus "
        "the engine's rank. otlp: send them to an OpenTelemetry collector.",
    ),
]


def attach(
    engine: EngineArgument = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="TIME", help="Detach after this time: 60s, 5m (default: when you run 'detach')."
        ),
    ] = None,
    output: RecordingFolder = Path("logs"),
    hash_ids: Annotated[bool, typer.Option("--hash-ids", help=HASH_IDS)] = False,
    trace: TraceOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Record a running engine, without a restart.

    schedtrace must have been installed in vLLM's environment when the server started (not necessary on
    CPython 3.14 and newer). After 'schedtrace detach', the engine runs as before.
    """
    from schedtrace.engine.running_recordings import attach_to, detached_after, switch_metrics

    if metrics is not None:
        if for_ is not None or hash_ids or trace is not None:
            msg = "--metrics records no trace: it takes none of --for, --hash-ids and --trace"
            raise UsageError(msg)
        for line in switch_metrics(engine, metrics):
            print_line(line)
        return
    for_s = seconds("--for", for_)
    attached = attach_to(engine, output, for_s, hash_ids=hash_ids, trace=trace_bounds(trace))
    for line in attached.result_lines():
        print_line(line)
    if for_s is not None:
        print_line(f"recording for {for_} (Ctrl-C ends it)")
        for line in detached_after(attached, for_s):
            print_line(line)
    print_line(f"next: {attached.next_command(ended=for_s is not None)}")


def detach(engine: EngineArgument = None) -> None:
    """End a recording that 'schedtrace attach' began."""
    from schedtrace.engine.running_recordings import detach_from

    for line in detach_from(engine):
        print_line(line)


def snapshot(
    engine: EngineArgument = None,
    output: RecordingFolder = Path("logs"),
) -> None:
    """Write the trace that SCHEDTRACE_KEEP keeps in memory.

    The server continues, and keeps the trace in memory.
    """
    from schedtrace.engine.running_recordings import snapshot_of

    folders, errors = snapshot_of(engine, output)
    for folder in folders:
        print_line(f"written to {folder}")
    if folders:
        print_line(f"next: schedtrace analyze {' '.join(map(str, folders))}")
    if errors:
        raise engine_error(errors)
