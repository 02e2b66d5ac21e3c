"""``schedtrace findings``: what ``analyze`` can find."""

from schedtrace.cli.options import FormatOption, show
from schedtrace.present.renderers import Format


def findings(output_format: FormatOption = Format.TEXT) -> None:
    """List the findings, and the facts that each needs in a trace."""
    from schedtrace.diagnose.analyze import catalogue
    from schedtrace.present.pages.report_details import catalogue_page

    show(catalogue_page(catalogue()), output_format)
