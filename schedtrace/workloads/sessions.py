"""Sessions of AIPerf and Dynamo: each turn is sent some time after the answer to the turn before.

Rows are AIPerf's ``mooncake_trace`` and Dynamo's traces of agents: ``input_length``, ``text_input`` or
``messages``, and ``output_length``; ``session_id`` makes rows turns of one session; ``delay`` and
``timestamp`` are milliseconds. A row may also be a whole session, of AIPerf's kind ``multi_turn``, with its
``turns``.

In some files, the ``input_length`` of a later turn counts the whole prompt; in others, it counts only the new
part, and the client sends the conversation so far before this part. ``context_mode`` states which, or else
the rows show it: a whole prompt repeats the block ids of the turn before, and is at least as long as that
prompt and its answer.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from schedtrace.errors import UsageError
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.workloads.chats import chat_prompt
from schedtrace.workloads.rows import (
    ESTIMATED,
    CountTokens,
    Row,
    estimated_tokens,
    json_rows,
    token_count,
    unreadable_row,
)
from schedtrace.workloads.timed_traces import (
    BAILIAN_BLOCK,
    FITS,
    LOOKED_AT,
    MOONCAKE_BLOCK,
    NO_OUTPUT_LENGTH,
    UNIT_WORDS,
    UNITS_US,
    BlockSizes,
    TimeUnit,
)

WHOLE_MODES = ("message_array_with_responses", "message_array_without_responses")
"""Values of ``context_mode`` with which each turn contains the whole prompt."""
WITH_ANSWERS = "deltas_with_responses"
"""Value of ``context_mode`` with which the recorded answers are part of the later turns."""
OWN_BLOCKS = 40
"""Number of bits below a session's number in the identity of a block that only this session has."""

Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class SessionTurn(msgspec.Struct):
    """Turn of a session: a row, or an entry of ``turns``."""

    text: str | None = None
    texts: list[Any] | None = None
    text_input: str | None = None
    messages: list[dict[str, Any]] | None = None
    message_mode: str = "history"
    input_length: float | None = None
    output_length: float | None = None
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    context_mode: str | None = None


class SessionRow(SessionTurn):
    """Line of the file: a turn, or a session with several turns."""

    session_id: str | int | None = None
    turns: list[SessionTurn] | None = None


@dataclass
class _Session:
    """Conversation of a session so far."""

    number: int
    prompt: int = 0
    """Number of tokens of the latest prompt."""
    answer: int = 0
    at_us: float = 0.0
    """Earliest time at which the latest turn may be sent."""
    first_ids: tuple[int, ...] = ()
    """Ids of the whole blocks of the session's first prompt."""


@dataclass
class _Evidence:
    """Evidence in the first rows about the meaning of the lengths."""

    blocks: BlockSizes = field(default_factory=BlockSizes)
    later: int = 0
    """Number of later turns."""
    whole: int = 0
    """Number of later turns whose length may be that of a whole prompt."""
    modes: set[str | None] = field(default_factory=set)
    is_timed: bool = True
    """Whether each session's first turn has a time."""
    has_times: bool = False
    """Whether any turn has a time or a delay, or waits for another turn."""
    _latest: dict[str, tuple[list[int], float]] = field(default_factory=dict)
    """Ids of each session's latest turn, and the number of tokens of its prompt and answer."""

    def add(self, key: str | None, turn: SessionTurn) -> None:
        """Add a turn to the evidence; ``key`` is its session, or None if it belongs to no session."""
        self.modes.add(turn.context_mode)
        self.has_times |= key is not None or turn.timestamp is not None or turn.delay is not None
        ids, length = turn.hash_ids or [], turn.input_length or 0.0
        latest = None if key is None else self._latest.get(key)
        if latest is None:
            self.is_timed &= turn.timestamp is not None
            self.blocks.add(len(ids), length)
        elif turn.input_length is not None:
            before, tokens = latest
            self.later += 1
            repeats = not before or (bool(ids) and ids[: len(before) - 1] == before[:-1])
            self.whole += repeats and length >= tokens
        if key is not None:
            self._latest[key] = ids, length + (turn.output_length or 0.0)


@dataclass(frozen=True)
class Sessions:
    """File of sessions, and how to read its numbers."""

    unit: TimeUnit
    block: int
    is_whole: bool
    """Whether the length of a later turn is that of the whole prompt."""
    has_answers: bool
    """Whether later turns repeat the recorded answers, so that answers must not be added."""
    is_timed: bool
    note: Message | None
    """Note on how times and lengths are read; None if there is nothing to note."""
    count_tokens: CountTokens | None
    output_len: int | None

    def turn_rows(self, path: Path, counts: Counter[str]) -> Iterator[Row]:
        """Yield every turn of the file."""
        us, sessions = UNITS_US[self.unit], dict[str, _Session]()
        for number, key, turn in turns_of(path):
            is_first = key not in sessions
            session = (
                _Session(len(sessions)) if key is None else sessions.setdefault(key, _Session(len(sessions)))
            )
            new, output = self._lengths(path, number, turn, counts)
            before = 0 if is_first or self._has_whole_prompt(turn) else session.prompt
            session.prompt = new + before + (session.answer if before and not self.has_answers else 0)
            session.answer = self.output_len or output
            delay_us = 0.0 if is_first else (turn.delay or 0.0) * us
            earliest_us = session.at_us + delay_us
            session.at_us = earliest_us if turn.timestamp is None else max(turn.timestamp * us, earliest_us)
            if not math.isfinite(session.at_us):
                raise unreadable_row(path, number, "timestamp or delay is too large")
            yield Row(
                line=number,
                prompt_tokens=session.prompt,
                output_tokens=output,
                at_us=session.at_us,
                prefix=self._prefix(turn, session, is_first=is_first, is_alone=key is None),
                session=key,
                delay_us=delay_us,
            )

    def _lengths(self, path: Path, number: int, turn: SessionTurn, counts: Counter[str]) -> tuple[int, int]:
        """Return the number of tokens of a turn's own input, and of its answer."""
        output = self.output_len
        if turn.output_length is not None:
            output = token_count(path, number, "output_length", turn.output_length)
        if output is None:
            raise unreadable_row(path, number, NO_OUTPUT_LENGTH)
        if turn.input_length is not None:
            return token_count(path, number, "input_length", turn.input_length), output
        text = turn.text if turn.text is not None else turn.text_input
        if turn.texts is not None:
            text = "\n".join(str(part) for part in turn.texts)
        if turn.messages is not None:
            prompt = chat_prompt(turn.messages, counts)
            text = "\n".join(part for part in (prompt.text, prompt.completion) if part)
        if text is None:
            raise unreadable_row(path, number, "no input_length, text_input, messages or text in a turn")
        counts[ESTIMATED] += self.count_tokens is None
        return (self.count_tokens or estimated_tokens)(text), output

    def _has_whole_prompt(self, turn: SessionTurn) -> bool:
        if turn.messages is not None:
            return turn.message_mode != "delta"
        return self.is_whole and turn.input_length is not None

    def _prefix(
        self, turn: SessionTurn, session: _Session, *, is_first: bool, is_alone: bool
    ) -> tuple[int, ...]:
        """Return the identities of a prompt's blocks: those in the file, then those of only this session."""
        blocks = -(-session.prompt // self.block)
        ids = tuple((turn.hash_ids or ())[:blocks])
        whole = session.prompt // self.block
        if is_first:
            session.first_ids = ids[:whole]
        if ids and (is_first or self._has_whole_prompt(turn)):
            return ids
        if is_alone:
            return ()
        shared = session.first_ids
        own = range((session.number + 1) << OWN_BLOCKS, ((session.number + 1) << OWN_BLOCKS) + whole)
        return (*shared[:whole], *own[len(shared) :])


def turns_of(path: Path) -> Iterator[tuple[int, str | None, SessionTurn]]:
    """Yield each turn with the number of its line and its session (None if it belongs to no session)."""
    for number, row in json_rows(path, SessionRow):
        key = None if row.session_id is None else f"{row.session_id}"
        if row.turns is None:
            yield number, key, row
            continue
        for turn in row.turns:
            yield number, key if key is not None else f"line {number}", turn


def sessions_in(
    path: Path,
    *,
    unit: TimeUnit | None,
    block: int | None,
    count_tokens: CountTokens | None,
    output_len: int | None,
) -> Sessions:
    """Return a file of sessions, with the meaning of its numbers inferred from its first rows.

    Raises:
        UsageError: If the rows do not show the size of blocks, or contradict each other.
        InputError: If a row is invalid; the message begins with ``path:line``.
    """
    shown = _Evidence()
    for _, key, turn in islice(turns_of(path), LOOKED_AT):
        shown.add(key, turn)
    modes = shown.modes - {None}
    if len(modes) > 1:
        msg = f"{path}: context_mode differs between rows ({', '.join(sorted(map(str, modes)))})"
        raise UsageError(msg)
    mode = next(iter(modes), None)
    is_whole = mode in WHOLE_MODES if mode else shown.whole > 0 and shown.whole >= FITS * shown.later
    size = (
        block
        or shown.blocks.block_tokens(path)
        or (MOONCAKE_BLOCK if shown.blocks.rows_with_ids else BAILIAN_BLOCK)
    )
    if mode:
        why = f"context_mode is {mode}"
    else:
        why = f"{shown.whole} of {shown.later} later turns can be whole prompts" if shown.later else ""
    note = say(
        "Timestamps and delays are read as {unit} (--time-unit); a turn is sent its delay after the answer "
        "to the turn before.[ Lengths of later turns are those of {what} ({why}).]",
        unit=UNIT_WORDS[unit or "ms"],
        what="whole prompts" if is_whole else "what is new in them, after the conversation so far",
        why=why,
    )
    return Sessions(
        unit or "ms",
        size,
        is_whole,
        mode == WITH_ANSWERS,
        shown.is_timed,
        note if shown.has_times else None,
        count_tokens,
        output_len,
    )
