"""Page of ``queue``: requests that wait in engines now, the limits that refuse them, and block holders."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from schedtrace.model.causes import Cause
from schedtrace.model.live import MOST_ENTRIES, EngineQueue, EngineQueues, QueueEntry
from schedtrace.model.message import Message
from schedtrace.model.numbers import integer
from schedtrace.model.say import say
from schedtrace.present.sections import (
    Content,
    Field,
    Headline,
    Note,
    Page,
    Section,
    Text,
    figure_field,
    table,
)

MOST_ROWS = 20


def queue_page(queues: EngineQueues, *, most: int = MOST_ROWS) -> Page[EngineQueues]:
    """Return the page of the queues.

    Args:
        queues: Queues of all engines of a server.
        most: Maximum number of rows of each table.
    """
    return Page(queues, lambda shown: [part for engine in shown.engines for part in _engine(engine, most)])


def _engine(queue: EngineQueue, most: int) -> Iterator[Section]:
    about = say(" (pid {pid}): {model}", queue, pid=str(queue.pid))
    usable, free = queue.blocks_usable, queue.blocks_free
    load = say(
        "{running:n} of {seats:n seat} taken, {waiting:n} waiting{policy}"
        "[; {held:n} of {usable:n KV block} held]",
        running=queue.num_running,
        seats=queue.seats,
        waiting=queue.num_waiting,
        policy=f" ({queue.policy})" if queue.policy else "",
        held=None if usable is None or free is None else usable - free,
        usable=usable,
    )
    lines: list[Content] = [load, *_waiting_for(queue)]
    yield Headline(say("Engine {rank:n}", queue), about, lines, list(_warnings(queue)))
    how = "--limit shows more"
    if queue.waiting:
        yield Note("", "Waiting, next first")
        yield table(queue.waiting, _fields(queue.waiting, queued=True), most=most, how=how)
    if queue.running:
        yield Note("", "Running, most KV blocks first")
        holders = sorted(queue.running, key=lambda request: -request.blocks)
        yield table(holders, _fields(holders, queued=False), most=most, how=how)


def _waiting_for(queue: EngineQueue) -> Iterator[Message]:
    refused = Counter(request.refused_for for request in queue.waiting if request.refused_for is not None)
    causes = ", ".join(f"{cause} ({integer(count)})" for cause, count in refused.most_common())
    exits = {loop_exit.cause for loop_exit in queue.exits if loop_exit.loop == "waiting"}
    states = {request.state for request in queue.waiting}
    if queue.pause is not None and queue.waiting:
        yield say(
            "waiting until a client resumes the scheduler[; the latest step refused them for {causes}]",
            causes=causes,
        )
    elif causes and queue.more_waiting:
        yield say("the first {first:n} wait for {causes}", first=len(queue.waiting), causes=causes)
    elif causes:
        yield say("waiting for {causes}", causes=causes)
    elif queue.waiting and exits == {Cause.QUEUE_EMPTY} and states == {"waiting"}:
        yield say("no request waited after the latest known step: these have arrived since")
    elif queue.waiting:
        yield say("the cause of their wait is not known: the latest step refused no request, or was not seen")


UNSEEN = (
    "{requests:n request} in the engine's input queue: its process has received [{one:?}it][{one:!}them] and "
    "its thread has not taken [{one:?}it][{one:!}them]."
)


def _warnings(queue: EngineQueue) -> Iterator[Text]:
    for what, more in (("running", queue.more_running), ("waiting", queue.more_waiting)):
        if more:
            most = integer(MOST_ENTRIES)
            yield f"{integer(more)} more {what} requests are left out: an answer has {most} at most."
    if queue.pause is not None:
        yield f"The scheduler is paused ({queue.pause})."
    if queue.input_requests:
        yield say(UNSEEN, requests=queue.input_requests, one=queue.input_requests == 1)
    if not queue.between_steps:
        yield "The engine has been within one step for 5 s and was read meanwhile."


def _fields(entries: Sequence[QueueEntry], *, queued: bool) -> list[Field[QueueEntry]]:
    """Return the columns of a table that have a value in any row.

    Args:
        entries: The rows, in their order.
        queued: Whether the requests wait, and therefore have a place in the queue.
    """

    def counts(heading: str, count: Callable[[QueueEntry], int | None]) -> list[Field[QueueEntry]]:
        return (
            [figure_field(heading, lambda entry: integer(count(entry)))] if any(map(count, entries)) else []
        )

    places = itertools.count(1)
    several_states = queued and {entry.state for entry in entries} != {"waiting"}
    shows_cause = queued or any(entry.refused_for for entry in entries)
    return [
        *([figure_field("#", lambda _: integer(next(places)))] if queued else []),
        Field("request", lambda entry: entry.request_id),
        *([Field("state", lambda entry: entry.state)] if several_states else []),
        figure_field("age", lambda entry: f"{entry.age_s:,.1f} s"),
        figure_field("prompt", lambda entry: integer(entry.prompt_tokens)),
        *counts("computed", lambda entry: entry.computed_tokens),
        *counts("output", lambda entry: entry.output_tokens),
        *counts("blocks", lambda entry: entry.blocks),
        *counts("preempted", lambda entry: entry.num_preemptions),
        *counts("priority", lambda entry: entry.priority),
        *([Field("adapter", lambda entry: entry.lora or "")] if any(entry.lora for entry in entries) else []),
        *([Field("for", lambda entry: entry.refused_for or "")] if shows_cause else []),
    ]
