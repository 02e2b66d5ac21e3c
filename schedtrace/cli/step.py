"""``schedtrace step``: one ``schedule()`` call."""

from typing import Annotated

import typer

from schedtrace.cli.options import FormatOption, RunArgument, one_run, show
from schedtrace.present.renderers import Format


def step(
    run: RunArgument,
    number: Annotated[int, typer.Argument(help="Step number, as in the trace.")],
    engine: Annotated[int, typer.Option(help="Data-parallel rank.")] = 0,
    every: Annotated[bool, typer.Option("--all", help="List all requests, however many.")] = False,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Explain one step: tokens, refusals, what-if.

    Shows the tokens that each request got, the limit that refused other requests, and what a different limit
    would have allowed.
    """
    from schedtrace.explain.step import explain_step
    from schedtrace.present.pages.story import step_page

    story = explain_step(one_run(run), number, engine=engine)
    show(step_page(story, everything=every), output_format)
