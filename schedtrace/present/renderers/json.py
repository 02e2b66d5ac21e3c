"""Renderer of a page as JSON: the page's document, with each sentence as an object with its ``text``."""

import re
from typing import Any

import msgspec

from schedtrace.model.message import Message, plain
from schedtrace.model.printable import json_of
from schedtrace.present.sections import Page

_VALUE = r'(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)'
_FLAT = re.compile(rf'\[\n\s+{_VALUE}(?:,\n\s+{_VALUE})*\n\s+\]|\{{\n\s+"text": {_VALUE}\n\s+\}}')
"""Pattern of a list of plain values, or of a sentence, spread over several lines; no text contains a line
break."""


def render(page: Page[Any], *, width: int | None = None) -> str:  # noqa: ARG001  # of the protocol
    """Return the document as one JSON object; strings from a trace stay unchanged."""
    indented = msgspec.json.format(json_of(_with_texts(page.document)), indent=2).decode()
    return _FLAT.sub(_on_one_line, indented) + "\n"


def _on_one_line(flat: re.Match[str]) -> str:
    opening, *values, closing = (line.strip() for line in flat[0].split("\n"))
    return opening + " ".join(values) + closing


def _with_texts(value: Any) -> Any:
    if isinstance(value, Message):
        return {"text": plain(value)}
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        named = {name: _with_texts(field) for name, field in fields if field is not msgspec.UNSET}
        return ({} if tag.tag is None else {str(tag.tag_field): tag.tag}) | named
    if isinstance(value, dict):
        return {key: _with_texts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(item) for item in value]
    return value
