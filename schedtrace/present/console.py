"""The terminal as rich sees it: what is printed is text, never markup, emoji names or patterns to colour."""

from rich.console import Console


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console for one of the standard streams; the only place where one is made.

    Args:
        stderr: This one, not stdout.
        width: In columns; None: the terminal's.
    """
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)
