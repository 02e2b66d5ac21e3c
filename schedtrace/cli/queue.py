"""``schedtrace queue``: the queue of a running engine."""

from typing import Annotated

import typer

from schedtrace.cli.attach import EngineArgument
from schedtrace.cli.options import FormatOption, show
from schedtrace.errors import engine_error
from schedtrace.present.renderers import Format


def queue(
    engine: EngineArgument = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rows of each table.")] = 20,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Show who waits in a running engine, for what, and who holds it.

    Those who wait stand in the scheduler's order, those who run by the KV blocks that they hold. It is read
    between two steps over the engine's socket; the engine need not be recorded.
    """
    from schedtrace.engine.running_engines import live_queues
    from schedtrace.present.pages.queue import queue_page

    queues, errors = live_queues(engine)
    if queues.engines:
        show(queue_page(queues, most=limit), output_format)
    if errors:
        raise engine_error(errors)
