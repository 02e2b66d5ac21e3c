"""Renderers: one module each, named in ``Format``, with a function ``render`` of the protocol below.

A new renderer needs a module here and a member of ``Format``, or another package's function in the entry
point group ``schedtrace.renderers``. A module is imported only when its format is used, so ``--help`` answers
at once.
"""

from enum import StrEnum
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

from schedtrace.errors import UsageError

if TYPE_CHECKING:
    from schedtrace.present.sections import Page

ENTRY_POINTS = "schedtrace.renderers"
"""Group in which another package registers its renderers: ``csv = "package.module:render"``."""


class Format(StrEnum):
    """Built-in formats, by the names of their modules."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"
    HTML = "html"


class Renderer(Protocol):
    """Function from a page to a text that ends with a line break."""

    def __call__(self, page: "Page[Any]", *, width: int | None = None) -> str:
        """Return the page as text.

        Args:
            page: Document and sections, which are already printable.
            width: Width in columns, for a renderer that uses it; None for the terminal's.
        """


def named_format(name: str) -> str:
    """Return the format's name if there is a renderer for it.

    Raises:
        UsageError: If neither schedtrace nor an installed package has a renderer of this name.
    """
    if name not in {*Format} and not entry_points(group=ENTRY_POINTS, name=name):
        names = [*Format, *sorted({point.name for point in entry_points(group=ENTRY_POINTS)})]
        msg = f"Invalid value for '--format': {name!r} is no format; there are {', '.join(names)}"
        raise UsageError(msg)
    return name


def renderer(output_format: str) -> Renderer:
    """Return the renderer of a format.

    A renderer of another package raises UsageError if it cannot be loaded or raises an error itself.

    Raises:
        UsageError: If there is no renderer of this name.
    """
    if output_format in {*Format}:
        return cast("Renderer", import_module(f"{__name__}.{output_format}").render)
    named_format(output_format)
    (entry_point, *_) = entry_points(group=ENTRY_POINTS, name=output_format)

    def render(page: "Page[Any]", *, width: int | None = None) -> str:
        try:
            return str(entry_point.load()(page, width=width))
        except Exception as error:
            msg = f"--format {output_format}: {entry_point.value} failed: {error!r}"
            raise UsageError(msg) from error

    return render
