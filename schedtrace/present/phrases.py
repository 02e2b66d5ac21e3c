"""Text of messages and numbers: each kind of argument in a single place."""

from collections.abc import Iterator

from schedtrace.model.message import (
    CauseWord,
    Code,
    Count,
    Duration,
    Message,
    Number,
    Request,
    Requests,
    Setting,
    Share,
    Slot,
    StepList,
    Steps,
    Value,
)
from schedtrace.model.printable import counted, duration, integer, number, percent, settled

__all__ = ["counted", "duration", "integer", "number", "percent", "settled"]
"""Numbers are written alike in messages and in errors, which come from below."""

BARS = " ▁▂▃▄▅▆▇█"


def change_range(low_frac: float, high_frac: float) -> str:
    """Return ``+7..+13``: an interval of changes, in percent."""
    return f"{settled(100 * low_frac, 0):+.0f}..{settled(100 * high_frac, 0):+.0f}"


def bar(fraction: float) -> str:
    """Return a character as high as the fraction; anything above 0 is visible."""
    if fraction <= 0:
        return BARS[0]
    return BARS[min(len(BARS) - 1, max(1, int(settled(fraction * (len(BARS) - 1), 0))))]


def series(values: list[int], most: int = 6) -> str:
    """Return ``1, 15`` or ``8, 8, 8, 8, 8, 8 ... (40)``, with the total count."""
    shown = ", ".join(f"{value:,}" for value in values[:most])
    return shown if len(values) <= most else f"{shown} ... ({len(values)})"


MOST_REQUESTS = 3
MOST_RANGES = 8


def plain(text: str | Message) -> str:
    """Return the whole sentence as one text."""
    return "".join(words for words, _ in pieces(text))


def pieces(text: str | Message) -> Iterator[tuple[str, Value | None]]:
    """Yield the sentence piece by piece: the words, and the argument that they are; None for plain words."""
    for part in [text] if isinstance(text, str) else text.parts():
        if isinstance(part, str):
            yield part, None
        elif isinstance(part, Requests):
            yield from _requests(part)
        elif isinstance(part, StepList):
            yield from _step_list(part)
        else:
            yield phrase(part), part


def phrase(value: Value) -> str:  # noqa: C901, PLR0911  # one kind of argument a line
    """Write an argument as text."""
    match value:
        case Request(request_id):
            return request_id
        case Requests():
            return "".join(words for words, _ in _requests(value))
        case StepList():
            return "".join(words for words, _ in _step_list(value))
        case Steps(first, last, trial):
            of_trial = "" if trial is None else f" of trial {trial}"
            return (f"step {first}" if first == last else f"steps {first}-{last}") + of_trial
        case CauseWord(word) | Setting(word) | Code(word):
            return word
        case Duration(us):
            return duration(us)
        case Share(fraction, signed):
            return percent(fraction, signed=signed)
        case Count(count, noun, plural):
            return f"{integer(count)} {plural}" if plural and count != 1 else counted(count, noun)
        case Number(known, decimals):
            return number(known, decimals)
        case Slot(name):
            return f"{{{name}}}"


def _requests(value: Requests) -> Iterator[tuple[str, Value | None]]:
    """Yield ``a, b, c and 61 others``."""
    ids, count = value.request_ids, value.count
    shown = ids if len(ids) == count <= MOST_REQUESTS + 1 else ids[:MOST_REQUESTS]
    rest = count - len(shown)
    if not shown:
        yield counted(count, "request"), None
    for at, request_id in enumerate(shown):
        if at:
            yield " and " if at == len(shown) - 1 and not rest else ", ", None
        yield request_id, Request(request_id)
    if shown and rest:
        yield f" and {counted(rest, 'other')}", None


def _step_list(value: StepList) -> Iterator[tuple[str, Value | None]]:
    """Yield ``Steps 3-5, 7 and 9-12``; ``Step 7``; ``Steps 1, 3, 5 and more`` where the list is not whole."""
    ranges: list[tuple[int, int]] = []
    for step in value.steps:
        if ranges and ranges[-1][1] + 1 == step:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    more = len(ranges) > MOST_RANGES or not value.whole
    shown = ranges[:MOST_RANGES]
    yield "Step " if len(value.steps) == 1 and not more else "Steps ", None
    for at, (first, last) in enumerate(shown):
        if at:
            yield " and " if at == len(shown) - 1 and not more else ", ", None
        yield str(first) if first == last else f"{first}-{last}", Steps(first, last)
    if more:
        yield " and more", None
