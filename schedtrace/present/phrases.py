"""Messages as plain text: how each kind of argument is written."""

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
    Steps,
    Value,
)
from schedtrace.present.numbers import integer, number, percent

MOST_REQUESTS = 3


def plain(message: Message | str) -> str:
    """The whole sentence as one text."""
    if isinstance(message, str):
        return message
    return "".join(part if isinstance(part, str) else phrase(part) for part in message.parts())


def phrase(value: Value) -> str:  # noqa: PLR0911  # one kind of argument a line
    """One argument."""
    match value:
        case Request(request_id):
            return request_id
        case Requests(request_ids, count):
            return _requests(request_ids, count)
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
            return f"{integer(count)} {noun if count == 1 else plural or noun + 's'}"
        case Number(known):
            return number(known)


def duration(us: float) -> str:
    """``0.42 ms``, ``12.3 ms``, ``1,234 ms``, ``12.3 s``: seconds from 10 s on."""
    if us >= 10_000_000:  # noqa: PLR2004  # ten seconds
        return f"{number(us / 1e6)} s"
    return f"{number(us / 1e3)} ms"


def _requests(request_ids: list[str], count: int) -> str:
    """``a, b, c and 61 others``."""
    shown = request_ids if len(request_ids) == count <= MOST_REQUESTS + 1 else request_ids[:MOST_REQUESTS]
    rest = count - len(shown)
    if not shown:
        return f"{integer(count)} request{'' if count == 1 else 's'}"
    if rest:
        return f"{', '.join(shown)} and {integer(rest)} other{'' if rest == 1 else 's'}"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
