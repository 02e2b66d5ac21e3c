"""ShareGPT: one JSON list of conversations, read entry by entry; first question and answer of each."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from schedtrace.errors import InputError
from schedtrace.workloads.rows import BrokenValueError, PromptRow, json_values, numbered_lines

NO_ANSWER = "no answer"
"""Key that counts conversations without a question and an answer."""


class Turn(msgspec.Struct):
    """A turn of a conversation."""

    value: str


class Conversation(msgspec.Struct):
    """An entry of the list."""

    conversations: list[Turn] = []


def sharegpt_prompts(path: Path, counts: Counter[str]) -> Iterator[tuple[int, PromptRow]]:
    """Yield first question and answer of every conversation that has both; count the others.

    Raises:
        InputError: not a list of conversations; the message names the number of the broken one.
    """
    if not next(numbered_lines(path), (1, b""))[1].startswith(b"["):
        raise _broken(path, 1, "it does not begin with a list")
    try:
        for number, _, entry in json_values(path):
            try:
                turns = msgspec.convert(entry, Conversation).conversations[:2]
            except msgspec.ValidationError as error:
                raise _broken(path, number, error) from error
            if len(turns) > 1:
                yield number, PromptRow(text=turns[0].value, completion=turns[1].value)
            else:
                counts[NO_ANSWER] += 1
    except BrokenValueError as error:
        raise _broken(path, error.number, error.why) from error


def _broken(path: Path, number: int, why: object) -> InputError:
    return InputError(
        f"{path}: not a ShareGPT file, a list of {{'conversations': [{{'value': ...}}, ...]}} "
        f"(conversation {number}: {why})"
    )
