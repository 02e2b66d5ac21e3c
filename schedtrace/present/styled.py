"""Texts as rich takes them, and how wide they are."""

from rich.text import Text

from schedtrace.present.phrases import plain
from schedtrace.present.sections import Bars, Cell, Content, States, Style, Styled
from schedtrace.present.strips import bar_characters, state_characters

STYLES = {
    Style.STRONG: "bold",
    Style.DIM: "dim",
    Style.GOOD: "green",
    Style.BAD: "red",
    Style.WARNING: "yellow",
    Style.CRITICAL: "bold red",
    Style.INFO: "cyan",
    Style.PREFILL: "green",
    Style.DECODE: "cyan",
    Style.RECOMPUTE: "magenta",
}


def written(content: Content) -> Text:
    """A text in its style; it may be folded, never cropped."""
    text, style = (content.text, content.style) if isinstance(content, Styled) else (content, None)
    return Text(plain(text), style=STYLES[style] if style else "", overflow="fold")


def drawn(picture: Cell | States, width: int) -> Text:
    """A text, or a picture of at most this width."""
    if isinstance(picture, Bars):
        return Text(bar_characters(picture, width), style=STYLES[picture.style])
    if isinstance(picture, States):
        shown = Text()
        for state in state_characters(picture, width):
            shown.append(state.character, style=STYLES[state.style])
        return shown
    return written(picture)


def longest_word(text: Text) -> int:
    """Width of the longest word: with less, it would be broken."""
    return max((Text(word).cell_len for word in text.plain.split()), default=0)


def longest_line(text: Text) -> int:
    """Width of the longest line."""
    return max((Text(line).cell_len for line in text.plain.splitlines()), default=0)
