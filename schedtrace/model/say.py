"""Language of sentences, in which a template and plain values make a ``Message``.

``say("{request:id} waited {wait:us}[ behind {others:n request}].", request="t1-3", wait=1_200, others=0)``

============================  ==========================================================================
``{name}``                    a ``Value``, a ``Message``, or words as they are
``{name:%}``, ``{name:+%}``   a fraction; a signed one
``{name:us}``, ``ms``, ``s``  a length of time
``{name:n}``, ``n1``, ``n2``  a number; with this many decimals
``{name:n step}``             a count with its noun; ``{name:n batch/batches}`` for an irregular plural
``{name:id}``, ``step``       a request; the number of a step
``cause``, ``setting``        a cause, by its word; an option of vLLM
``code``                      text that stands as it is: a file, a guard, a command
``[...]``                     left out if an argument in it is None, zero or empty
``{name:?}``, ``{name:!}``    write nothing: the part is left out unless, or if, the value is true
``{{``, ``[[``                one brace, one bracket; ``]]`` ends two parts where two are open
============================  ==========================================================================
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from schedtrace.model.message import (
    CauseWord,
    Code,
    Count,
    Duration,
    Message,
    Number,
    Request,
    Setting,
    Share,
    Steps,
    Value,
    Worded,
)

_KINDS: dict[str, Callable[[Any], Value]] = {
    "%": Share,
    "+%": lambda fraction: Share(fraction, signed=True),
    "us": Duration,
    "ms": lambda ms: Duration(ms * 1e3),
    "s": lambda s: Duration(s * 1e6),
    "n": Number,
    "n1": lambda value: Number(value, 1),
    "n2": lambda value: Number(value, 2),
    "id": Request,
    "step": lambda step: Steps(step, step),
    "cause": CauseWord,
    "setting": Setting,
    "code": Code,
}
_CONDITIONS = ("?", "!")
_TOKEN = re.compile(r"\{\{|\}\}|\[\[|\]\]|\{(?P<name>\w+)(?::(?P<kind>[^{}]+))?\}|[\[\]]|[^{}\[\]]+")


class TemplatePlace(NamedTuple):
    """Place of an argument in a template."""

    name: str
    kind: str


class TemplatePart(NamedTuple):
    """Part of a template that is left out if one of its own arguments is empty."""

    pieces: "tuple[str | TemplatePlace | TemplatePart, ...]"


Pieces = tuple[str | TemplatePlace | TemplatePart, ...]


def say(template: str, evidence: object = None, /, **values: Worded) -> Message:
    """Return a sentence.

    Args:
        template: Sentence in the language above.
        evidence: Struct with fields for the arguments that are not passed by name.
        values: Arguments by their names in the template.

    Raises:
        ValueError: If the template is invalid, a place has no value, or a value passed by name has no place.
        TypeError: If the value of a place without a kind is a plain number.
    """
    pieces = parsed(template)
    unplaced = values.keys() - set(argument_names(pieces))
    if unplaced:
        msg = f"{template!r} has no place for {sorted(unplaced)}"
        raise ValueError(msg)

    def value(name: str) -> Any:
        if name not in values and not hasattr(evidence, name):
            msg = f"{template!r} lacks a value for {name}"
            raise ValueError(msg)
        return values[name] if name in values else getattr(evidence, name)

    shown = _kept(pieces, value)
    words = [f"{{{piece.name}}}" if isinstance(piece, TemplatePlace) else piece for piece in shown]
    places = [piece for piece in shown if isinstance(piece, TemplatePlace)]
    return Message(
        "".join(words), {place.name: _typed(template, place, value(place.name)) for place in places}
    )


def _kept(pieces: Pieces, value: Callable[[str], Any]) -> list[str | TemplatePlace]:
    """Return the words and places of a template without the parts that are left out.

    This is not nested in ``say``: a recursive closure would form a reference cycle and keep the evidence in
    memory.
    """
    shown: list[str | TemplatePlace] = []
    for piece in pieces:
        if not isinstance(piece, TemplatePart):
            shown += [piece] if isinstance(piece, str) or piece.kind not in _CONDITIONS else []
        elif all(
            bool(value(place.name)) != (place.kind == "!")
            for place in piece.pieces
            if isinstance(place, TemplatePlace)
        ):
            shown += _kept(piece.pieces, value)
    return shown


def _typed(template: str, place: TemplatePlace, value: Any) -> Any:
    name, kind = place
    if kind.startswith("n "):
        noun, _, plural = kind.removeprefix("n ").partition("/")
        return Count(value, noun, plural or None)
    if kind:
        return _KINDS[kind](value)
    if value is None or isinstance(value, int | float):
        msg = f"{template!r} does not say of what kind {name} is"
        raise TypeError(msg)
    return value


def argument_names(pieces: Pieces) -> list[str]:
    """List the arguments that a template names, in order, including those in conditions."""
    arguments = []
    for piece in pieces:
        if isinstance(piece, TemplatePlace):
            arguments.append(piece.name)
        elif isinstance(piece, TemplatePart):
            arguments += argument_names(piece.pieces)
    return arguments


@cache
def parsed(template: str) -> Pieces:
    """Return a template, parsed into its parts.

    Raises:
        ValueError: If a bracket has no partner, or a kind is unknown.
    """
    parts: list[list[str | TemplatePlace | TemplatePart]] = [[]]
    at = 0
    for token in _TOKEN.finditer(template):
        if token.start() != at:
            break
        if token["name"]:
            parts[-1].append(_place(template, token["name"], token["kind"] or ""))
        elif token[0] == "[":
            parts.append([])
        elif token[0] == "]" or (token[0] == "]]" and parts[2:]):
            if len(parts) == 1:
                break
            for _ in token[0]:
                inner = parts.pop()
                parts[-1].append(TemplatePart(tuple(inner)))
        else:  # a brace stays doubled: it does so in a message's template, too
            parts[-1].append(token[0][0] if token[0] in ("[[", "]]") else token[0])
        at = token.end()
    if at != len(template) or len(parts) > 1:
        msg = f"{template!r}: a bracket has no partner"
        raise ValueError(msg)
    return tuple(parts[0])


def _place(template: str, name: str, kind: str) -> TemplatePlace:
    if kind and kind not in _KINDS and kind not in _CONDITIONS and not kind.startswith("n "):
        msg = f"{template!r}: {kind!r} is no kind of argument"
        raise ValueError(msg)
    return TemplatePlace(name, kind)
