"""``schedtrace request``: one request's life."""

from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.options import Format, show, show_json


def request(
    run: Annotated[Path, typer.Argument(help="Run folder or trace file.")],
    request_id: Annotated[str, typer.Argument(help="The request's id, or its beginning or end.")],
    output_format: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.TEXT,
) -> None:
    """Tell one request's life: what it waited for, when it computed, what it lost, where its time went."""
    from schedtrace.cli.runs import one_run
    from schedtrace.explain.request import explain_request
    from schedtrace.present.request import life_view

    life = explain_request(one_run(run), request_id)
    if output_format is Format.JSON:
        show_json(life)
    else:
        show(life_view, life)
