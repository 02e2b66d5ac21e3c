"""A step's story as text for a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from schedtrace.model.story import Leaver, Newcomer, StepStory, Waiter
from schedtrace.present.layout import plain_table, section_grid
from schedtrace.present.numbers import integer, milliseconds
from schedtrace.present.phrases import plain
from schedtrace.present.shares import shares_view
from schedtrace.present.words import counted, of_trial, some

MOST_WAITING = 10

Row = tuple[str, RenderableType]
"""A label and what stands beside it."""


def step_view(story: StepStory, *, everything: bool = False) -> RenderableType:
    """Who was there, who got what, where it stopped, who still waits, what else would have fitted.

    Args:
        story: The step.
        everything: List every request, however many there are.
    """
    grid = section_grid()
    parts = (_before, _decided, _after)
    for name, content in (row for part in parts for row in part(story, everything=everything)):
        grid.add_row(name, content)
    return Group(*_head(story), Text(), grid)


def _head(story: StepStory) -> Iterator[Text]:
    engine = f", engine {story.engine_rank}" if story.engine_rank else ""
    yield Text.assemble((f"Step {story.step}{of_trial(story.trial)}", "bold"), f" of {story.label}{engine}")
    took = f"schedule() took {milliseconds(story.schedule_us / 1e3)} ms"
    back = "its output has not come back"
    if story.output_us is not None:
        back = f"its output was back after {milliseconds((story.output_us - story.start_us) / 1e3)} ms"
        if story.output_tokens is not None:
            back += f" with {counted(story.output_tokens, 'token')}"
    yield Text(f"{story.start_us / 1e6:,.3f} s into the trace; {took}, {back}")


def _before(story: StepStory, *, everything: bool) -> Iterator[Row]:
    blocks = _blocks(story, story.kv_blocks_free_before)
    yield "before", Text(_crowd(story.num_running_before, story.num_waiting_before, blocks))
    if story.arrived:
        yield "arrived", Text(_arrived(story.arrived, everything=everything))
    if story.finished:
        yield "finished", Text(_finished(story.finished, everything=everything))


def _decided(story: StepStory, *, everything: bool) -> Iterator[Row]:
    used = integer(story.token_budget - story.remaining_budget)
    left = integer(story.remaining_budget)
    by = f", by {counted(len(story.scheduled), 'request')}" if story.scheduled else ""
    yield "used", Text(f"{used} of {counted(story.token_budget, 'token')} of budget, {left} left{by}")
    if story.scheduled:
        yield "", Group(*shares_view(story.scheduled, everything=everything))
    for victim in story.preempted:
        yield "preempted", Text(plain(victim.message), style="yellow")
    for at, stop in enumerate(story.stops):
        yield "" if at else "stopped", Text(plain(stop.message))
    if not story.stops:
        yield "stopped", Text("no exit was recorded")


def _after(story: StepStory, *, everything: bool) -> Iterator[Row]:
    if story.late:
        yield "too late", Text(_late(story, everything=everything))
    blocks = _blocks(story, story.kv_blocks_free_after)
    yield "after", Text(_crowd(story.num_running_after, story.num_waiting_after, blocks))
    if story.waiting or not story.waiting_agrees:
        yield "waiting", Group(*_waiting(story, everything=everything))
    for at, fact in enumerate(story.facts):
        yield "" if at else "facts", Text(plain(fact))
    for at, answer in enumerate(story.what_if):
        yield "" if at else "what if", Text(plain(answer.message))
    if story.what_if:
        yield "", Text(f"Note: {'; '.join(map(plain, story.what_if_assumes))}.", style="dim")


def _crowd(running: int, waiting: int, blocks: str) -> str:
    return f"{integer(running)} running, {integer(waiting)} waiting{blocks}"


def _blocks(story: StepStory, free: int | None) -> str:
    if free is None:
        return ""
    of = "" if story.kv_blocks_total is None else f" of {integer(story.kv_blocks_total)}"
    return f", {integer(free)}{of} KV blocks free"


def _arrived(newcomers: list[Newcomer], *, everything: bool) -> str:
    lengths = {one.prompt_tokens for one in newcomers}
    if len(lengths) == 1:
        names = some([one.request_id for one in newcomers], everything=everything)
        return f"{counted(len(newcomers), 'request')} of {counted(lengths.pop(), 'prompt token')}: {names}"
    each = [f"{one.request_id} ({integer(one.prompt_tokens)} tokens)" for one in newcomers]
    return f"{counted(len(newcomers), 'request')}: {some(each, everything=everything)}"


def _finished(leavers: list[Leaver], *, everything: bool) -> str:
    how = {(one.status, one.output_tokens) for one in leavers}
    if len(how) == 1:
        status, tokens = how.pop()
        names = some([one.request_id for one in leavers], everything=everything)
        return f"{counted(len(leavers), 'request')}, {status} with {counted(tokens, 'token')}: {names}"
    each = [f"{one.request_id} ({one.status}, {counted(one.output_tokens, 'token')})" for one in leavers]
    return f"{counted(len(leavers), 'request')}: {some(each, everything=everything)}"


def _late(story: StepStory, *, everything: bool) -> str:
    end_us = story.start_us + story.schedule_us
    came = [(one.queued_us - (one.on_its_way_us or 0), one) for one in story.late]
    on_their_way = sum(us <= end_us for us, _ in came)
    said = f"{_arrived(story.late, everything=everything)}. "
    if on_their_way:
        said += f"{integer(on_their_way)} of them had reached the front end when schedule() ended. "
    if on_their_way < len(came):
        last_ms = (max(us for us, _ in came) - end_us) / 1e3
        said += f"The last one reached the front end {milliseconds(last_ms)} ms after schedule() ended, "
        said += "before this step's output was back."
    return said.strip()


def _waiting(story: StepStory, *, everything: bool) -> Iterator[RenderableType]:
    if not story.waiting_agrees:
        names, count = integer(len(story.waiting)), integer(story.num_waiting_after)
        said = (
            f"the recorder counted {count}, the trace tells of {names}: not all that came and went is in it"
        )
        yield Text(said, style="yellow")
    if story.num_not_ready_after:
        ready = integer(story.num_not_ready_after)
        yield Text(f"{ready} of them wait for something else than the scheduler; who is not recorded")
    most = len(story.waiting) if everything else MOST_WAITING
    if story.waiting:
        yield _queue_table(story.waiting[:most])
    if len(story.waiting) > most:
        yield Text(f"{integer(len(story.waiting) - most)} more: --all lists them", style="dim")


def _queue_table(waiting: list[Waiter]) -> Table:
    table = plain_table("next in line", right=["tokens\nwanted", "waits since\nstep", "for ms"], last="")
    for one in waiting:
        table.add_row(
            one.request_id,
            integer(one.wanted_tokens),
            str(one.since_step),
            milliseconds(one.waited_ms),
            "was preempted" if one.preempted else "",
        )
    return table
