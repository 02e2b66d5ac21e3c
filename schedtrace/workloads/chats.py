"""Readers of conversations: chat messages, input files of OpenAI's batch API, and ShareGPT's list.

A prompt is the text of all messages or, if the last message is an answer, of the messages before it. The
model's chat template is not applied, and parts that are not text are left out. A batch has no answers, only
limits (``max_tokens``). Of a ShareGPT conversation, only the first question and answer count.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from schedtrace.errors import InputError
from schedtrace.workloads.rows import (
    BrokenValueError,
    PromptRow,
    json_rows,
    json_values,
    numbered_lines,
    token_count,
    unreadable_row,
)

LIMITS, NO_TEXT, OTHER_URL = "limits", "no text", "other url"
"""Keys that count rows whose output length is the client's limit, messages with parts that are not text
(these parts are left out), and rows that ask for something other than text."""
LENGTHS = ("output_len", "output_tokens", "output_length")
MAXIMA = ("max_completion_tokens", "max_tokens")
"""Names of the client's limit on output tokens, the newer one first."""
GENERATES = ("/chat/completions", "/completions", "/responses")
"""Endings of the addresses that generate text."""


class Chat(msgspec.Struct):
    """Line of a file of chat messages."""

    messages: list[dict[str, Any]]
    output_len: float | None = None
    output_tokens: float | None = None
    output_length: float | None = None
    max_completion_tokens: float | None = None
    max_tokens: float | None = None
    priority: int = 0


class BatchLine(msgspec.Struct):
    """Line of an input file of OpenAI's batch API."""

    url: str
    body: dict[str, Any]


def text_of(content: Any, counts: Counter[str]) -> str:
    """Return the text of a message's content, and count the parts that are not text."""
    if isinstance(content, str) or content is None:
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    counts[NO_TEXT] += len(texts) < len(parts)
    return "\n".join(texts)


def chat_prompt(messages: list[dict[str, Any]], counts: Counter[str]) -> PromptRow:
    """Return the prompt of a conversation, and its last message as the answer if the assistant wrote it."""
    texts = [text_of(message.get("content"), counts) for message in messages]
    if messages and messages[-1].get("role") == "assistant":
        return PromptRow(text="\n".join(texts[:-1]), completion=texts[-1])
    return PromptRow(text="\n".join(texts))


def chat_prompts(path: Path, counts: Counter[str]) -> Iterator[tuple[int, PromptRow]]:
    """Yield the requests of a file of chat messages."""
    for number, row in json_rows(path, Chat):
        prompt = chat_prompt(row.messages, counts)
        output = _length(path, number, {name: getattr(row, name) for name in LENGTHS}, LENGTHS)
        if output is None and prompt.completion is None:
            output = _length(path, number, {name: getattr(row, name) for name in MAXIMA}, MAXIMA)
            counts[LIMITS] += output is not None
        yield number, prompt._replace(output_len=output, priority=row.priority)


def batch_prompts(path: Path, counts: Counter[str]) -> Iterator[tuple[int, PromptRow]]:
    """Yield the requests of a batch that generate text, and count all others."""
    for number, row in json_rows(path, BatchLine):
        if not row.url.rstrip("/").endswith(GENERATES):
            counts[OTHER_URL] += 1
            continue
        output = _length(path, number, row.body, (*MAXIMA, "max_output_tokens"))
        counts[LIMITS] += output is not None
        yield number, _batch_prompt(path, number, row.body, counts)._replace(output_len=output)


def _batch_prompt(path: Path, number: int, body: dict[str, Any], counts: Counter[str]) -> PromptRow:
    """Return the prompt in a request's body: messages, a text, or a list of token ids."""
    prompt = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(prompt, str):
        return PromptRow(text=prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return PromptRow(input_len=len(prompt))
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        return PromptRow(text=chat_prompt(prompt, counts).text)
    what = "body: expected messages, input or prompt, a text or a list of token ids"
    raise unreadable_row(path, number, what)


def _length(path: Path, number: int, row: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first of the named lengths that a row has."""
    for name in names:
        value = row.get(name)
        if value is not None:
            if not isinstance(value, int | float) or not (length := token_count(path, number, name, value)):
                raise unreadable_row(path, number, f"{name} {value!r}: a length is 1 or more")
            return length
    return None


NO_ANSWER = "no answer"
"""Key that counts conversations that lack a question or an answer."""


class Turn(msgspec.Struct):
    """Turn of a conversation."""

    value: str


class Conversation(msgspec.Struct):
    """Entry of ShareGPT's list."""

    conversations: list[Turn] = []


def sharegpt_prompts(path: Path, counts: Counter[str]) -> Iterator[tuple[int, PromptRow]]:
    """Yield the first question and answer of every conversation that has both; count all others.

    Raises:
        InputError: If the file is not a list of conversations; the message contains the number of the broken
            conversation.
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
