"""``schedtrace findings``: what ``analyze`` can find."""

from typing import Annotated

import typer

from schedtrace.cli.options import Format, show, show_json


def findings(
    output_format: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.TEXT,
) -> None:
    """List the kinds of findings, and what a record must tell for each."""
    from schedtrace.diagnose.catalogue import catalogue
    from schedtrace.present.findings import catalogue_view

    if output_format is Format.JSON:
        show_json(catalogue())
    else:
        show(catalogue_view, catalogue())
