"""Who waits in engines now, for what, and who holds it."""

from collections import Counter
from collections.abc import Iterator, Sequence

from schedtrace.model.causes import Cause
from schedtrace.model.message import Message
from schedtrace.model.queue import EngineQueue, EngineQueues, QueueEntry
from schedtrace.model.say import say
from schedtrace.present.numbers import integer
from schedtrace.present.sections import (
    Content,
    Field,
    Headline,
    Note,
    Page,
    Section,
    figure,
    table,
)

MOST_ROWS = 20


def queue_page(queues: EngineQueues, *, most: int = MOST_ROWS) -> Page[EngineQueues]:
    """The queues.

    Args:
        queues: Of all engines of a server.
        most: Rows of each table.
    """
    return Page(queues, lambda shown: [part for one in shown.engines for part in _engine(one, most)])


def _engine(queue: EngineQueue, most: int) -> Iterator[Section]:
    about = say(" (pid {pid}): {model}", queue, pid=str(queue.pid))
    lines: list[Content] = [_load(queue), *_waiting_for(queue)]
    yield Headline(say("Engine {rank:n}", queue), about, lines, list(_warnings(queue)))
    how = "--limit shows more"
    if queue.waiting:
        yield Note("", "Waiting, next first")
        yield table(list(enumerate(queue.waiting, 1)), _waiting(queue.waiting), most=most, how=how)
    if queue.running:
        yield Note("", "Running, most KV blocks first")
        holders = sorted(queue.running, key=lambda one: -one.blocks)
        yield table(holders, _running(queue.running), most=most, how=how)


def _load(queue: EngineQueue) -> Message:
    usable, free = queue.blocks_usable, queue.blocks_free
    held = None if usable is None or free is None else usable - free
    return say(
        "{running:n} of {seats:n seat} taken, {waiting:n} waiting{policy}"
        "[; {held:n} of {usable:n KV block} held]",
        running=len(queue.running),
        seats=queue.seats,
        waiting=len(queue.waiting),
        policy=f" ({queue.policy})" if queue.policy else "",
        held=held,
        usable=usable,
    )


def _waiting_for(queue: EngineQueue) -> Iterator[Message]:
    refused = Counter(one.refused_for for one in queue.waiting if one.refused_for is not None)
    causes = ", ".join(f"{cause} ({integer(count)})" for cause, count in refused.most_common())
    if causes:
        yield say("waiting for {causes}", causes=causes)
    elif queue.waiting and _came_since(queue):
        yield say("the latest step that is known left nobody waiting: they have arrived since")
    elif queue.waiting:
        yield say("what they wait for is not known: the latest step refused nobody, or was not seen")


def _came_since(queue: EngineQueue) -> bool:
    """Whether the latest step has emptied the waiting queue, and nobody was preempted or set aside since."""
    causes = {one.cause for one in queue.exits if one.loop == "waiting"}
    return causes == {Cause.QUEUE_EMPTY} and all(one.state == "waiting" for one in queue.waiting)


def _warnings(queue: EngineQueue) -> Iterator[str]:
    if queue.pause is not None:
        yield f"The scheduler is paused ({queue.pause})."
    if not queue.between_steps:
        yield "The engine has been within one step for 5 s and was read meanwhile."


Numbered = tuple[int, QueueEntry]


def _waiting(entries: Sequence[QueueEntry]) -> list[Field[Numbered]]:
    fields: list[Field[Numbered]] = [figure("#", lambda row: integer(row[0])), *_of_entries(entries)]
    states = {one.state for one in entries}
    if states != {"waiting"}:
        fields.insert(2, Field("state", lambda row: row[1].state))
    return [*fields, Field("for", lambda row: row[1].refused_for or "")]


def _of_entries(entries: Sequence[QueueEntry]) -> list[Field[Numbered]]:
    return [
        Field(one.heading, lambda row, one=one: one.cell(row[1]), one.numeric)  # type: ignore[misc]  # its default binds it
        for one in _common(entries)
    ]


def _common(entries: Sequence[QueueEntry]) -> list[Field[QueueEntry]]:
    """Columns of both tables; one that is empty in every row is left out."""
    fields: list[Field[QueueEntry]] = [
        Field("request", lambda one: one.request_id),
        figure("age", lambda one: f"{one.age_s:,.1f} s"),
        figure("prompt", lambda one: integer(one.prompt_tokens)),
    ]
    if any(one.computed_tokens for one in entries):
        fields.append(figure("computed", lambda one: integer(one.computed_tokens)))
    if any(one.output_tokens for one in entries):
        fields.append(figure("output", lambda one: integer(one.output_tokens)))
    if any(one.blocks for one in entries):
        fields.append(figure("blocks", lambda one: integer(one.blocks)))
    if any(one.num_preemptions for one in entries):
        fields.append(figure("preempted", lambda one: integer(one.num_preemptions)))
    if any(one.priority for one in entries):
        fields.append(figure("priority", lambda one: integer(one.priority)))
    if any(one.lora for one in entries):
        fields.append(Field("adapter", lambda one: one.lora or ""))
    return fields


def _running(entries: Sequence[QueueEntry]) -> list[Field[QueueEntry]]:
    fields = _common(entries)
    if any(one.refused_for for one in entries):
        fields.append(Field("for", lambda one: one.refused_for or ""))
    return fields
