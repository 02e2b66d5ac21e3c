"""``schedtrace queue``: the queue of a running engine."""

from typing import Annotated

import typer

from schedtrace.cli.attach import EngineArgument
from schedtrace.cli.options import FormatOption, print_line, seconds, show
from schedtrace.errors import UsageError, engine_error
from schedtrace.present.renderers import Format


def queue(
    engine: EngineArgument = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Maximum number of rows in each table.")
    ] = 20,
    output_format: FormatOption = Format.TEXT,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print each engine's queue as a line of JSON, repeatedly.")
    ] = False,
    every: Annotated[
        str,
        typer.Option(
            "--every", metavar="TIME", help="With --follow: time between two lines of an engine; at least 1s."
        ),
    ] = "1s",
) -> None:
    """Show a running engine's queue, and what its requests wait for.

    Lists the waiting requests in the scheduler's order, and the running requests by the KV blocks that they
    hold. The queue is read between two steps over the engine's socket; the engine need not be recorded.
    """
    if follow:
        _follow(engine, every)
        return
    from schedtrace.engine.running_engines import live_queues
    from schedtrace.present.pages.queue import queue_page

    queues, errors = live_queues(engine)
    if queues.engines:
        show(queue_page(queues, most=limit), output_format)
    if errors:
        raise engine_error(errors)


FASTEST_S = 1.0
"""Minimum seconds between two lines about an engine, because each line delays the engine."""


def _follow(engine: str | None, every: str) -> None:
    """Print the queues until the user interrupts the command."""
    from schedtrace.engine.running_engines import follow_queues
    from schedtrace.model.printable import json_of

    every_s = seconds("--every", every) or 0.0
    if every_s < FASTEST_S:
        msg = f"--every {every}: at least 1s"
        raise UsageError(msg)
    for queue_now in follow_queues(engine, every_s):
        print_line(json_of(queue_now).decode())
