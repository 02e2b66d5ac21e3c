"""The renderers: one module each, with a function ``render`` of the protocol below, named in ``Format``.

A new one is a module here and a member there. No module is imported before its format is asked for, so that
``--help`` answers at once.
"""

from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from schedtrace.present.sections import Page


class Format(StrEnum):
    """The formats there are, by the names of their modules."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"
    HTML = "html"


class Renderer(Protocol):
    """A page to a text that ends with a line break."""

    def __call__(self, page: "Page[Any]", *, width: int | None = None) -> str:
        """Render a page.

        Args:
            page: What is shown.
            width: In columns, for a renderer that knows any; None: the terminal's.
        """


def renderer(output_format: Format) -> Renderer:
    """The renderer of a format."""
    return cast("Renderer", import_module(f"{__name__}.{output_format}").render)
