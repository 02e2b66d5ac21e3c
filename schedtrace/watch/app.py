"""Screen of ``schedtrace watch``: lists with a selected line, and texts to read."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.message import Message
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Footer, Static

from schedtrace.errors import SchedtraceError
from schedtrace.model import safe_files
from schedtrace.model.printable import visible, without_colours
from schedtrace.watch import view
from schedtrace.watch.plain_lines import moment, status_page
from schedtrace.watch.seen import Seen
from schedtrace.watch.session import WatchSession


class Listing(Widget, can_focus=True):
    """List of lines, one of which is selected.

    Args:
        widget_id: Id of the widget.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Chosen(Message):
        """Message: Enter was pressed on a line."""

        def __init__(self, key: object) -> None:
            super().__init__()
            self.key = key

    class Moved(Message):
        """Message: another line was selected."""

    def __init__(self, widget_id: str) -> None:
        super().__init__(id=widget_id)
        self._lines: list[tuple[object, Content]] = []
        self._title = Content("")
        self._chosen: object = None

    def update_lines(self, title: Content, lines: list[tuple[object, Content]]) -> None:
        """Show these lines, each with its key.

        Until the user selects a line, the first line is selected, whatever its key. Later the selection
        follows the selected key.
        """
        self._title, self._lines = title, lines
        if self._chosen not in [key for key, _ in lines]:
            self._chosen = None
        self.refresh()

    @property
    def chosen_key(self) -> object:
        """Key of the selected line; None if there is no line, or the line has no key."""
        return self._lines[self._place()][0] if self._lines else None

    def render(self) -> Content:
        """Return the title and the lines around the selected one."""
        room = max(1, self.size.height - 1)
        at = self._place()
        first = max(0, min(at - room // 2, len(self._lines) - room))
        shown = [
            line.stylize("reverse") if self.has_focus and key == self.chosen_key else line
            for key, line in self._lines[first : first + room]
        ]
        return Content("\n").join([self._title, *shown])

    def action_move(self, by: int) -> None:
        """Move the selection by a number of lines."""
        if self._lines:
            place = max(0, min(len(self._lines) - 1, self._place() + by))
            self._chosen = self._lines[place][0]
            self.refresh()
            self.post_message(self.Moved())

    def action_choose(self) -> None:
        """Post a ``Chosen`` message for the selected line, if there is one."""
        if self.chosen_key is not None:
            self.post_message(self.Chosen(self.chosen_key))

    def _place(self) -> int:
        return next((at for at, (key, _) in enumerate(self._lines) if key == self._chosen), 0)


class TextScreen(ModalScreen[None]):
    """Screen with a text to read.

    Args:
        text: Text to show.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "Back")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Yield the text and the footer."""
        with VerticalScroll():
            yield Static(Content(self._text))
        yield Footer()


EVERY_S = 2.5
REQUESTS_KEPT = 4
"""Lines reserved for the list of requests if verdicts would take all lines."""
HELP = """\
space   pause, and go on
up/down choose a request; enter: its life so far
tab     between several engines and requests; on engines, up/down choose one for chart and list
v       all that is seen, as text, with the verdicts in full
n       who waits in the engine right now, in order, and who holds it (schedtrace queue)
s       save that text here
w       save the last minute as a run folder that every command reads
q       quit

The verdicts are those of `schedtrace analyze --last 10s` and `--last 1m`; they are renewed at a pace
that keeps their cost low, and sooner if what is seen changes in kind. Each says how old it is; an old
one is dim. Running, waiting and KV are after the last
step; budget, preemptions and steps per second are of the last 10 s. Waiting requests are drawn by
what they wait for: docs/causes.md says what each word means."""


class WatchApp(App[None]):
    """App that observes the engines every few seconds and shows the result.

    Args:
        session: Session that observes the engines.
        every_s: Seconds between two observations; None if only a test triggers them.
        folder: Folder for saved files.
    """

    CSS = """
    Screen { layout: vertical; overflow: hidden; }
    #head, #chart, #engines, #requests, #notes { text-wrap: nowrap; text-overflow: clip; }
    TextScreen { background: $background; }
    TextScreen VerticalScroll { height: 1fr; padding: 0 1; }
    #head { height: 1; background: $panel; }
    #verdicts, #chart, #notes { height: auto; }
    #requests { height: 1fr; min-height: 2; }
    """
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "#requests"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit", priority=False),
        Binding("space", "pause", "Pause"),
        Binding("v", "text", "Verdicts in full"),
        Binding("n", "queue", "Queue now"),
        Binding("s", "save_text", "Save text"),
        Binding("w", "save_window", "Save trace"),
        Binding("question_mark", "keys", "Help", key_display="?"),
        # Where nothing has the focus, as in a terminal that says it lost its own.
        Binding("up", "request(-1)", show=False),
        Binding("down", "request(1)", show=False),
        Binding("enter", "request(0)", show=False),
    ]

    def __init__(
        self, session: WatchSession, every_s: float | None = EVERY_S, folder: Path | None = None
    ) -> None:
        super().__init__()
        self.session, self._every_s, self._folder = session, every_s, folder or Path.cwd()
        self.seen: Seen | None = None
        self.paused = False
        self._looking = asyncio.Lock()
        self._heights: dict[str, int] = {}

    def compose(self) -> ComposeResult:
        """Yield, from the top: headline, verdicts, engines, chart, requests, notes, keys."""
        yield Static(id="head", markup=False)
        yield Static("Reading the trace ...", id="verdicts", markup=False)
        yield Listing("engines")
        yield Static(id="chart", markup=False)
        yield Listing("requests")
        yield Static(id="notes", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Observe at once, then at intervals."""
        if self._every_s is not None:
            self.call_later(self.refresh_seen)
            self.set_interval(self._every_s, self.refresh_seen)

    def on_resize(self, _: Resize) -> None:
        """Redraw for another size."""
        self._heights.clear()
        self.call_after_refresh(self.draw)

    async def refresh_seen(self) -> None:
        """Observe the engines on another thread, unless paused or still busy with an earlier observation."""
        if self.paused or self._looking.locked():
            return
        async with self._looking:
            try:
                self.seen = await asyncio.to_thread(self.session.observe_engines)
            except (SchedtraceError, OSError) as error:
                self.notify(visible(str(error)), severity="error", markup=False)
                return
        self.draw()

    def draw(self) -> None:
        """Draw the latest view."""
        if self.seen is None or len(self.screen_stack) > 1:
            return
        seen, (width, height), dark = self.seen, self.size, self.current_theme.dark
        small = height < 40  # noqa: PLR2004  # lines of a screen
        self._show("head", view.head_line(seen, width, paused=self.paused))
        engines = self.query_one("#engines", Listing)
        total = seen.total()
        rows = [total, *seen.engines] if total is not None and len(seen.engines) > 1 else seen.engines
        shown = rows[:5] if small else rows
        engines.update_lines(
            Content(view.HEAD[:width]),
            [(figures.rank, view.engine_line(figures, width)) for figures in shown],
        )
        engines.can_focus = len(seen.engines) > 1
        if engines.has_focus and not engines.can_focus:
            self.query_one("#requests").focus()
        if engines.styles.height is None or engines.styles.height.value != 1 + max(1, len(shown)):
            engines.styles.height = 1 + max(1, len(shown))
        rank = engines.chosen_key if isinstance(engines.chosen_key, int) and len(seen.engines) > 1 else None
        tall = 7 if small else 14
        self._show("chart", view.chart(seen, rank, width, tall, dark=dark))
        ranks = len(seen.engines) > 1 and rank is None
        requests: list[tuple[object, Content]] = [
            ((slow.rank, slow.request_id), view.request_line(slow, width, ranks=ranks))
            for slow in seen.slowest
            if rank is None or slow.rank == rank
        ]
        heading = Content("     age  requests: the longest waits, then the oldest"[:width])
        self.query_one("#requests", Listing).update_lines(heading, requests)
        texts = [f"{moment(note.at_s)} {visible(note.text)}"[:width] for note in seen.notes[-2:]]
        self._show("notes", Content("\n".join(texts)))
        self.query_one("#notes").display = bool(texts)
        fixed_height = 2 + 1 + max(1, len(shown)) + tall + len(texts)  # with head and keys
        request_height = 1 + max(1, min(REQUESTS_KEPT, len(requests)))
        self._show("verdicts", view.verdicts(seen, width, height - fixed_height - request_height))

    def _show(self, widget_id: str, content: Content) -> None:
        """Update a widget; redraw the whole screen only if the widget's height changes."""
        lines = content.plain.count("\n")
        self.query_one(f"#{widget_id}", Static).update(content, layout=self._heights.get(widget_id) != lines)
        self._heights[widget_id] = lines

    def on_listing_moved(self) -> None:
        """Redraw for the chosen engine."""
        self.draw()

    async def on_listing_chosen(self, chosen: Listing.Chosen) -> None:
        """Show a request's history."""
        slowest = self.seen.slowest if self.seen is not None else []
        slow = next(
            (request for request in slowest if (request.rank, request.request_id) == chosen.key), None
        )
        if slow is None:
            return
        await self._read(lambda width: self.session.life(slow, width))

    async def action_queue(self) -> None:
        """Show the engine's current queue."""
        await self._read(self.session.queue_text)

    async def _read(self, text_of: Callable[[int], str]) -> None:
        """Show a text that another thread makes for the screen's width."""
        try:
            async with self._looking:
                text = await asyncio.to_thread(text_of, max(40, self.size.width - 4))
        except (SchedtraceError, OSError) as error:
            text = visible(str(error))
        self.push_screen(TextScreen(without_colours(text)), self._back)

    def _back(self, _: None) -> None:
        self.draw()

    def action_request(self, by: int) -> None:
        """Focus the list of requests and move its selection; if ``by`` is 0, open the selected request."""
        requests = self.query_one("#requests", Listing).focus()
        if by:
            requests.action_move(by)
        else:
            requests.action_choose()

    def action_pause(self) -> None:
        """Pause or resume updates."""
        self.paused = not self.paused
        self.draw()

    def action_text(self) -> None:
        """Show the whole view as text."""
        if self.seen is not None:
            self.push_screen(TextScreen(status_page(self.seen)), self._back)

    def action_keys(self) -> None:
        """Show the keys and what they do."""
        self.push_screen(TextScreen(HELP), self._back)

    def action_save_text(self) -> None:
        """Save the current view as text."""
        self._save(lambda path, seen: safe_files.replace(path, status_page(seen).encode()), ".txt")

    def action_save_window(self) -> None:
        """Save the last minute as a run folder."""
        self._save(lambda path, _: self.session.save_last_minute(path))

    def _save(self, write: Callable[[Path, Seen], object], suffix: str = "") -> None:
        if self.seen is None:
            return
        at = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.seen.at_s))
        path = self._folder / f"watch-{at}{suffix}"
        try:
            write(path, self.seen)
        except OSError as error:
            self.notify(visible(f"not saved: {error.strerror}: {path}"), severity="error", markup=False)
        else:
            self.notify(visible(f"saved {path}"), markup=False)
