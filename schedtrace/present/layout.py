"""Tables as the commands print them: no lines, numbers to the right."""

from rich.table import Table

LABEL_WIDTH = 9


def section_grid() -> Table:
    """Labels to the left, text or tables beside them."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", width=LABEL_WIDTH, no_wrap=True)
    grid.add_column()
    return grid


def plain_table(*left: str, right: list[str], last: str | None = None) -> Table:
    """Columns of text, then columns of numbers, then perhaps one more of text.

    The first and the last may be folded: a server's request ids are long, and no number may be cut for them.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in left:
        table.add_column(heading, no_wrap=heading != left[0], overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last)
    return table
