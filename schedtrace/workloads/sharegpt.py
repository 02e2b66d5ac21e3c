"""ShareGPT: one JSON list of conversations, read entry by entry; first question and answer of each."""

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from schedtrace.errors import InputError
from schedtrace.workloads.rows import ESTIMATED, CountTokens, Row, estimated_tokens, opened

CHUNK_BYTES = 2**20
MOST_CHARACTERS = 2**26
"""Of one conversation: beyond that the file is taken for broken, instead of being read to its end."""
_BETWEEN = " \t\r\n,"


class Turn(msgspec.Struct):
    """One side of a conversation."""

    value: str


class Conversation(msgspec.Struct):
    """One entry of the list."""

    conversations: list[Turn] = []


class Exchange(NamedTuple):
    """First question and answer of a conversation."""

    entry: int
    """Number of the conversation in the file, from 1."""
    question: str
    answer: str


def exchanges(path: Path) -> Iterator[Exchange]:
    """First question and answer of every conversation that has both.

    Raises:
        InputError: not a list of conversations; the message names the number of the broken one.
    """
    for number, entry in enumerate(_entries(path), start=1):
        try:
            turns = msgspec.convert(entry, Conversation).conversations[:2]
        except msgspec.ValidationError as error:
            raise _broken(path, number, error) from error
        if len(turns) > 1:
            yield Exchange(number, turns[0].value, turns[1].value)


def _entries(path: Path) -> Iterator[object]:
    """The entries of a JSON list, with no more than one of them and a chunk in memory."""
    scan = json.JSONDecoder().raw_decode
    text, at, number, begun = "", 0, 1, False
    with opened(path) as file:
        utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        while True:
            while at < len(text) and (text[at] in _BETWEEN if begun else text[at].isspace()):
                at += 1
            try:
                if at < len(text) and not begun:
                    if text[at] != "[":
                        raise _broken(path, number, "it does not begin with a list")
                    at, begun = at + 1, True
                    continue
                if at < len(text) and text[at] == "]":
                    return
                entry, at = scan(text, at)
            except (json.JSONDecodeError, RecursionError) as error:
                more = file.read(max(CHUNK_BYTES, len(text) - at))
                if not more or len(text) - at > MOST_CHARACTERS or isinstance(error, RecursionError):
                    raise _broken(path, number, error) from error
                try:
                    text, at = text[at:] + utf8.decode(more), 0
                except UnicodeDecodeError as wrong:
                    raise _broken(path, number, wrong) from wrong
                continue
            number += 1
            yield entry


def _broken(path: Path, number: int, why: object) -> InputError:
    return InputError(
        f"{path}: not a ShareGPT file, a list of {{'conversations': [{{'value': ...}}, ...]}} "
        f"(conversation {number}: {why})"
    )


def read_sharegpt(path: Path, counts: Counter[str], count_tokens: CountTokens | None = None) -> Iterator[Row]:
    """The exchanges as rows; without ``count_tokens`` their lengths are estimated, and counted as such."""
    measure = count_tokens or estimated_tokens
    for entry, question, answer in exchanges(path):
        counts[ESTIMATED] += count_tokens is None
        yield Row(entry, measure(question), max(1, measure(answer)))
