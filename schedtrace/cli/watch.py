"""``schedtrace watch``: a view of a run in progress."""

import os
from typing import Annotated

import typer

from schedtrace.cli.options import is_terminal, print_escaped, print_line
from schedtrace.errors import MissingExtraError


def watch(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR|PID]",
            help="Run folder, folder of runs (for the newest run), trace file, or process id of a recorded "
            "server (default: SCHEDTRACE_DIR, or else the newest growing trace below the current folder).",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the current state once as text, then exit.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.5, max=86400, metavar="S", help="Seconds between two lines of text.")
    ] = 5.0,
) -> None:
    """Follow a recorded engine: what limits it now, and its queue.

    Shows a full screen in a terminal, otherwise a line of text every few seconds. Only reads the trace, so it
    does not affect the engine.
    """
    os.environ.setdefault("POLARS_MAX_THREADS", "1")  # before it is imported: leave the engine its cores

    from pathlib import Path

    from schedtrace.watch.find import target as find_target
    from schedtrace.watch.plain_lines import SCREENFUL, status_page
    from schedtrace.watch.session import WatchSession

    session = WatchSession(find_target(target, dict(os.environ), Path.cwd(), wait=not once))
    if once:
        print_escaped(status_page(session.observe_engines(judge_now=True), SCREENFUL))
    elif is_terminal():
        try:
            from schedtrace.watch.app import WatchApp
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                what="the full screen of watch", extra="watch", instead="watch --once prints text without it"
            ) from error

        WatchApp(session).run()
    else:
        from schedtrace.watch.plain_lines import stream as print_lines

        print_lines(session, every, print_line)
