"""A sentence as data: a template and typed arguments. A renderer styles, links and escapes the arguments.

``Message("{request} waited {wait}", {"request": Request("t1-3"), "wait": Duration(1_200)})``, as ``say``
makes it. An argument says what it is, never how it is written: numbers are formatted in ``present/``, in one
place.
"""

from collections.abc import Iterator
from string import Formatter
from typing import Any

import msgspec


class Request(msgspec.Struct, frozen=True, tag_field="is", tag="request"):
    """A request, by its id."""

    request_id: str


class Requests(msgspec.Struct, frozen=True, tag_field="is", tag="requests"):
    """Several requests, of which some are named."""

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
    """In ascending order."""
    whole: bool
    """Whether the list is complete."""


class CauseWord(msgspec.Struct, frozen=True, tag_field="is", tag="cause"):
    """A cause, by its word: a ``Cause``, or one that a newer version or another package names."""

    cause: str


class Setting(msgspec.Struct, frozen=True, tag_field="is", tag="setting"):
    """A setting of vLLM, as it is given on the command line or named in its configuration."""

    name: str


class Duration(msgspec.Struct, frozen=True, tag_field="is", tag="duration"):
    """A length of time."""

    us: float


class Share(msgspec.Struct, frozen=True, tag_field="is", tag="share"):
    """A fraction of a whole, 0 to 1; ``signed`` for a change."""

    fraction: float | None
    signed: bool = False


class Count(msgspec.Struct, frozen=True, tag_field="is", tag="count"):
    """A number of things: ``1 step``, ``1,234 tokens``."""

    count: int
    noun: str
    plural: str | None = None
    """Plural of ``noun``, if it is not the noun with an s."""


class Number(msgspec.Struct, frozen=True, tag_field="is", tag="number", omit_defaults=True):
    """A bare number: an ``int`` is exact, a ``float`` is measured; ``None`` where it is not known."""

    value: int | float | None
    decimals: int | None = None
    """Decimals to print, such as of a mean of counts; ``None``: as many as are significant."""


class Code(msgspec.Struct, frozen=True, tag_field="is", tag="code"):
    """Text to print unchanged: a guard, a file with its line, a file name, a command."""

    text: str


class Slot(msgspec.Struct, frozen=True, tag_field="is", tag="slot"):
    """The place of an argument in a sentence that is filled in later, many times."""

    name: str
    kind: str
    """Kind of argument: ``number``, ``count``, ``request``, ``requests`` (some ids and how many there are).
    """
    noun: str = ""
    """Noun of a count."""
    plural: str | None = None
    """Plural of ``noun``, if it is not the noun with an s."""


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
"""Kinds of argument, besides plain words and other messages."""


class Message(msgspec.Struct, frozen=True, tag_field="is", tag="message"):
    """A template with its arguments."""

    template: str
    """``{name}`` stands for an argument."""
    arguments: dict[str, Any] = {}
    """Name to ``Value``, ``Message``, or ``str``: plain words."""

    def __bool__(self) -> bool:
        """Return whether the sentence has any words."""
        return bool(self.template)

    def parts(self) -> Iterator[str | Value]:
        """Yield the sentence's plain words and values, in order; messages within it flattened."""
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
"""Value for a place of a template: an argument, or a plain value whose kind the template states."""

NOTHING = Message("")


def given(value: float) -> Number:
    """Return a number that a user chose, which is exact even if an option's type made it a ``float``."""
    return Number(int(value) if float(value).is_integer() else value)


def with_slots(values: "dict[str, Value]") -> "dict[str, Value]":
    """Return the slots for such values, by the same names."""
    return {
        name: Slot(name, "count", value.noun, value.plural)
        if isinstance(value, Count)
        else Slot(name, str(value.__struct_config__.tag))
        for name, value in values.items()
    }


def filled(template: Message, values: "dict[str, Value]") -> Message:
    """Return a sentence with values in its slots.

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
