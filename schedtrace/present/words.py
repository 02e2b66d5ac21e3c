"""Names and counts in running text."""

from schedtrace.present.numbers import integer

MOST_NAMES = 6


def counted(count: int, noun: str) -> str:
    """``1 step``, ``1,234 steps``."""
    return f"{integer(count)} {noun}" + ("" if count == 1 else "s")


def some(texts: list[str], *, everything: bool = False) -> str:
    """``a, b, c, d, e, f and 9 more``; all of them if asked for."""
    most = len(texts) if everything or len(texts) == MOST_NAMES + 1 else MOST_NAMES
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {integer(rest)} more" if rest > 0 else "")


def of_trial(trial: int | None) -> str:
    """`` of trial 1``; nothing for a trace without trials."""
    return {None: "", 0: " of the warm-up"}.get(trial, f" of trial {trial}")
