"""The catalogue of findings as text for a terminal."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from schedtrace.model.catalogue import Catalogue


def catalogue_view(catalogue: Catalogue) -> RenderableType:
    """One finding a row, with what a record must tell for it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for kind in catalogue.findings:
        summary = Text(kind.summary)
        summary.append(f"\nneeds {', '.join(kind.needs)}", style="dim")
        table.add_row(kind.code, summary)
    return table
