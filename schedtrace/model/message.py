"""A sentence as data: a template and typed arguments. A renderer styles, links and escapes the arguments.

``Message("{request} waited {wait}", {"request": Request("t1-3"), "wait": Duration(1_200)})``, as ``say``
makes it. An argument states what it is; ``pieces`` alone decides how each kind of argument is written.
"""

from collections.abc import Iterator
from string import Formatter
from typing import Any

import msgspec

from schedtrace.model.numbers import counted, duration, integer, number, percent


class Request(msgspec.Struct, frozen=True, tag_field="is", tag="request"):
    """A request, by its id."""

    request_id: str


class Requests(msgspec.Struct, frozen=True, tag_field="is", tag="requests"):
    """Several requests, some of them named."""

    request_ids: list[str]
    count: int
    """Number of requests, including unnamed ones."""


class Steps(msgspec.Struct, frozen=True, tag_field="is", tag="steps"):
    """A step or a range of steps: ``step 12``, ``steps 248-257``."""

    first: int
    last: int
    trial: int | None = None


class StepList(msgspec.Struct, frozen=True, tag_field="is", tag="step_list"):
    """Several steps of one engine, at the start of a sentence: ``Steps 3-5, 7 and 9-12``."""

    steps: list[int]
    """Numbers of the steps, in ascending order."""
    whole: bool
    """Whether the list is complete."""


class CauseWord(msgspec.Struct, frozen=True, tag_field="is", tag="cause"):
    """Word of a cause: a ``Cause``, or one that a newer version or another package defines."""

    cause: str


class Setting(msgspec.Struct, frozen=True, tag_field="is", tag="setting"):
    """Setting of vLLM, as written on the command line or named in its configuration."""

    name: str


class Duration(msgspec.Struct, frozen=True, tag_field="is", tag="duration"):
    """A length of time."""

    us: float


class Share(msgspec.Struct, frozen=True, tag_field="is", tag="share"):
    """Fraction of a whole, 0 to 1; ``signed`` for a change."""

    fraction: float | None
    signed: bool = False


class Count(msgspec.Struct, frozen=True, tag_field="is", tag="count"):
    """Number of things: ``1 step``, ``1,234 tokens``."""

    count: int
    noun: str
    plural: str | None = None
    """Plural of ``noun`` if it is not the noun plus s."""


class Number(msgspec.Struct, frozen=True, tag_field="is", tag="number", omit_defaults=True):
    """Bare number: an ``int`` is exact, a ``float`` is measured, ``None`` is unknown."""

    value: int | float | None
    decimals: int | None = None
    """Number of decimals to print, such as for a mean of counts; ``None`` for as many as are significant."""


class Code(msgspec.Struct, frozen=True, tag_field="is", tag="code"):
    """Text to print unchanged: a guard, a file with its line, a file name, a command."""

    text: str


class Slot(msgspec.Struct, frozen=True, tag_field="is", tag="slot"):
    """Place in a sentence for an argument that is filled in later, usually many times."""

    name: str
    kind: str
    """Kind of argument: ``number``, ``count``, ``request``, ``requests`` (some ids and how many there are).
    """
    noun: str = ""
    """Noun of a count."""
    plural: str | None = None
    """Plural of ``noun`` if it is not the noun plus s."""


Value = (
    Request
    | Requests
    | Steps
    | StepList
    | CauseWord
    | Setting
    | Duration
    | Share
    | Count
    | Number
    | Code
    | Slot
)
"""Kinds of arguments other than plain words and messages."""


class Message(msgspec.Struct, frozen=True, tag_field="is", tag="message"):
    """Template with its arguments."""

    template: str
    """Text of the template, in which ``{name}`` stands for an argument."""
    arguments: dict[str, Any] = {}
    """Arguments by name: a ``Value``, a ``Message``, or plain words as a ``str``."""

    def __bool__(self) -> bool:
        """Return whether the sentence has any words."""
        return bool(self.template)

    def parts(self) -> Iterator[str | Value]:
        """Yield the sentence's plain words and values in order, including those of messages within it."""
        for words, name, _, _ in Formatter().parse(self.template):
            if words:
                yield words
            if name is not None:
                argument = self.arguments[name]
                if isinstance(argument, Message):
                    yield from argument.parts()
                elif argument != "":
                    yield argument


Worded = Value | Message | str | float | bool | None
"""Value for a place in a template: an argument, or a plain value whose kind the template states."""

NOTHING = Message("")


def given(value: float) -> Number:
    """Return a number that a user chose, as an ``int`` if it is whole, even if parsed as a ``float``."""
    return Number(int(value) if float(value).is_integer() else value)


def with_slots(values: "dict[str, Value]") -> "dict[str, Value]":
    """Return slots for these values, under the same names."""
    return {
        name: Slot(name, "count", value.noun, value.plural)
        if isinstance(value, Count)
        else Slot(name, str(value.__struct_config__.tag))
        for name, value in values.items()
    }


def filled(template: Message, values: "dict[str, Value]") -> Message:
    """Return a sentence whose slots are filled with values.

    Raises:
        KeyError: If a slot has no value.
    """

    def filled_argument(argument: Any) -> Any:
        if isinstance(argument, Message):
            return filled(argument, values)
        return values[argument.name] if isinstance(argument, Slot) else argument

    return Message(
        template.template, {name: filled_argument(argument) for name, argument in template.arguments.items()}
    )


def joined(messages: "list[Message]", between: str = " ") -> Message:
    """Join several messages, one after the other; leave out empty ones."""
    nonempty = [message for message in messages if message]
    template = between.replace("{", "{{").replace("}", "}}").join(f"{{m{at}}}" for at in range(len(nonempty)))
    return Message(template, {f"m{at}": message for at, message in enumerate(nonempty)})


MOST_REQUESTS = 3
MOST_RANGES = 8


def plain(text: str | Message) -> str:
    """Return the whole sentence as one text."""
    return "".join(words for words, _ in pieces(text))


def pieces(text: str | Message) -> Iterator[tuple[str, Value | None]]:
    """Yield a sentence's pieces: words, and the argument that they represent (None for plain words)."""
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
    """Return an argument as text."""
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
    """Yield ``Steps 3-5, 7 and 9-12``; ``Step 7``; ``Steps 1, 3, 5 and more`` if the list is incomplete."""
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
