"""What the screen is made of: lines of which one is chosen, and a text to read."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Footer, Static


class Listing(Widget, can_focus=True):
    """Lines of which one is chosen.

    Args:
        widget_id: Its id.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Chosen(Message):
        """Enter was pressed."""

        def __init__(self, key: object) -> None:
            super().__init__()
            self.key = key

    class Moved(Message):
        """Another line is chosen."""

    def __init__(self, widget_id: str) -> None:
        super().__init__(id=widget_id)
        self._lines: list[tuple[object, Content]] = []
        self._title = Content("")
        self._chosen: object = None

    def show(self, title: Content, lines: list[tuple[object, Content]]) -> None:
        """Show these lines, each with its key.

        Until a line is chosen the first one is, whatever its key; then the chosen one is followed.
        """
        self._title, self._lines = title, lines
        if self._chosen not in [key for key, _ in lines]:
            self._chosen = None
        self.refresh()

    @property
    def key(self) -> object:
        """Of the chosen line; None: there is no line, or its key is None."""
        return self._lines[self._place()][0] if self._lines else None

    def render(self) -> Content:
        """The title and the lines around the chosen one."""
        room = max(1, self.size.height - 1)
        at = self._place()
        first = max(0, min(at - room // 2, len(self._lines) - room))
        shown = [
            line.stylize("reverse") if self.has_focus and key == self.key else line
            for key, line in self._lines[first : first + room]
        ]
        return Content("\n").join([self._title, *shown])

    def action_move(self, by: int) -> None:
        """Choose another line."""
        if self._lines:
            place = max(0, min(len(self._lines) - 1, self._place() + by))
            self._chosen = self._lines[place][0]
            self.refresh()
            self.post_message(self.Moved())

    def action_choose(self) -> None:
        """Tell what is chosen."""
        if self.key is not None:
            self.post_message(self.Chosen(self.key))

    def _place(self) -> int:
        return next((at for at, (key, _) in enumerate(self._lines) if key == self._chosen), 0)


class TextScreen(ModalScreen[None]):
    """A text to read.

    Args:
        text: It.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "Back")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """The text, and its key."""
        with VerticalScroll():
            yield Static(Content(self._text))
        yield Footer()
