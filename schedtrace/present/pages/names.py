"""Names of requests and trials in running text."""

from schedtrace.model.message import Message, joined, message
from schedtrace.present.numbers import integer

MOST_NAMES = 6


def some(texts: list[Message], *, everything: bool = False) -> Message:
    """``a, b, c, d, e, f and 9 more``; all of them if asked for."""
    most = len(texts) if everything or len(texts) == MOST_NAMES + 1 else MOST_NAMES
    rest = len(texts) - most
    more = f" and {integer(rest)} more" if rest > 0 else ""
    return message("{names}{more}", names=joined(texts[:most], ", "), more=more)


def of_trial(trial: int | None) -> str:
    """`` of trial 1``; nothing for a trace without trials."""
    return {None: "", 0: " of the warm-up"}.get(trial, f" of trial {trial}")
