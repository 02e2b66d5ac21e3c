"""``schedtrace request``: one request's life."""

from typing import Annotated

import typer

from schedtrace.cli.options import FormatOption, RunArgument, one_run, show
from schedtrace.present.renderers import Format


def request(
    run: RunArgument,
    request_id: Annotated[str, typer.Argument(help="Request id, or its beginning or end.")],
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Explain one request: waits, chunks, preemptions, time.

    Shows what the request waited for, when it was computed, what preemptions cost it, and where its time
    went.
    """
    from schedtrace.explain.request import explain_request
    from schedtrace.present.pages.story import request_page

    show(request_page(explain_request(one_run(run), request_id)), output_format)
