"""What a workload file does not say, and what became of its rows."""

from collections import Counter
from collections.abc import Iterator

from schedtrace.model.message import Count, Message, message
from schedtrace.workloads.formats import Format
from schedtrace.workloads.mooncake import NO_IDS, SPARE_IDS
from schedtrace.workloads.random_load import AT_ONCE
from schedtrace.workloads.rows import CHARACTERS_A_TOKEN, ESTIMATED

NO_OUTPUT, NO_PROMPT, SORTED = "no output", "no prompt", "sorted"
"""Counted, beside what the readers count."""
OF_ROWS = {
    NO_OUTPUT: "{rows} without output tokens left out.",
    NO_PROMPT: "{rows} without prompt tokens left out.",
    NO_IDS: "{rows} without block ids: they share no prefix.",
    SPARE_IDS: "{rows} with more block ids than the prompt has blocks: the last ids were ignored.",
}
"""What is said of so many rows."""


def file_notes(
    kind: Format, counts: Counter[str], *, requests: int, asked: int | None, at_once: bool
) -> Iterator[Message]:
    """The notes on a file.

    Args:
        kind: Its format.
        counts: What one reading counted.
        requests: Usable ones.
        asked: So many were asked for; None: all.
        at_once: All requests arrive at once because the file has no times.
    """
    for counted, template in OF_ROWS.items():
        if counts[counted]:
            yield message(template, rows=Count(counts[counted], "row"))
    if asked is not None and requests < asked:
        found, wanted = Count(requests, "usable request"), Count(asked, "request")
        yield message("The file has {found}, not the {wanted} asked for.", found=found, wanted=wanted)
    if counts[SORTED]:
        yield message("Rows were not in order of time, and were sorted.")
    if counts[ESTIMATED]:
        characters = Count(CHARACTERS_A_TOKEN, "character")
        yield message("Lengths of texts are estimates: {characters} a token.", characters=characters)
    if kind.prefix_block is None:
        yield message("Which prompts begin alike is not in the file: no prefix is shared.")
    if kind.images:
        yield message("Images are left out: requests have the tokens of their texts only.")
    if at_once:
        yield AT_ONCE
