"""JSON Lines of one's own: a prompt's text or its length, and how much to generate."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from schedtrace.workloads.rows import (
    ESTIMATED,
    CountTokens,
    Row,
    estimated_tokens,
    numbered_lines,
    refused,
)

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Rank = Annotated[int, msgspec.Meta(ge=0)]


class JsonlRow(msgspec.Struct):
    """One line: ``prompt`` or ``input_len``, and how much to generate."""

    prompt: str | None = None
    input_len: _Positive | None = None
    output_len: _Positive | None = None
    priority: int = 0
    data_parallel_rank: _Rank | None = None
    """The engine that gets it; None: vLLM's front end chooses."""


def jsonl_rows(path: Path) -> Iterator[tuple[int, JsonlRow]]:
    """Every row with its line's number.

    Raises:
        InputError: ``path:line: what``.
    """
    decode = msgspec.json.Decoder(JsonlRow).decode
    for number, line in numbered_lines(path):
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise refused(path, number, error) from error
        if (row.prompt is None) == (row.input_len is None):
            what = "give either prompt (a text) or input_len (a number of random tokens)"
            raise refused(path, number, what)
        yield number, row


def read_jsonl(
    path: Path,
    counts: Counter[str],
    count_tokens: CountTokens | None = None,
    output_len: int | None = None,
) -> Iterator[Row]:
    """The lines as rows; without ``count_tokens`` lengths of texts are estimated, and counted as such.

    Raises:
        InputError: ``path:line: what``; also where a line has no ``output_len``, and none is given.
    """
    measure = count_tokens or estimated_tokens
    for number, row in jsonl_rows(path):
        output = output_len or row.output_len
        if output is None:
            raise refused(path, number, "no output_len: add it, or give --output-len")
        counts[ESTIMATED] += row.prompt is not None and count_tokens is None
        prompt = row.input_len or measure(row.prompt or "")
        yield Row(number, prompt, output, priority=row.priority, data_parallel_rank=row.data_parallel_rank)
