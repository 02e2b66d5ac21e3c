"""One step: who was there, who got what, where it stopped, who still waits, what else would have fitted."""

from collections.abc import Iterator

from schedtrace.model.message import NOTHING, Count, Duration, Message, Number, Value, joined
from schedtrace.model.say import say
from schedtrace.model.story import Leaver, Newcomer, Scheduled, StepStory, Waiter
from schedtrace.present.numbers import counted, integer, milliseconds
from schedtrace.present.pages.names import of_trial, some
from schedtrace.present.sections import (
    Cell,
    Column,
    Content,
    Fact,
    Facts,
    Headline,
    Note,
    Page,
    Section,
    Style,
    Styled,
    Table,
    Text,
)

MOST_LISTED = 20
FEWEST_GROUPED = 4
"""Decodes alike that share a line; fewer are listed."""


def scheduled_parts(scheduled: list[Scheduled], *, everything: bool) -> Iterator[Content | Table]:
    """Ordinary decodes on one line, everybody else in a table; each in the table if ``everything``."""
    plain = [share for share in scheduled if _plain(share)]
    grouped = [] if everything or len(plain) < FEWEST_GROUPED else plain
    listed = [share for share in scheduled if not _plain(share)] if grouped else scheduled
    if grouped:
        yield _decodes(grouped)
    if listed:
        yield _table(listed, len(listed) if everything else MOST_LISTED)
        yield from _cuts(listed, everything=everything)


def _plain(share: Scheduled) -> bool:
    """An ordinary decode, of which large batches have hundreds."""
    return share.phase == "running" and share.work == "decode" and not share.caps


def _decodes(grouped: list[Scheduled]) -> str:
    tokens = sorted({share.scheduled_tokens for share in grouped})
    each = counted(tokens[0], "token") if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]} tokens"
    drafts = sum(share.draft_tokens for share in grouped)
    drafted = f" ({counted(drafts, 'draft token')} among them)" if drafts else ""
    return f"{counted(len(grouped), 'running request')} decoded {each} each{drafted}"


def _table(scheduled: list[Scheduled], most: int) -> Table:
    drafts, caps = any(share.draft_tokens for share in scheduled), any(share.caps for share in scheduled)
    headings = ["computed\nbefore", "tokens\nnow", "prompt"]
    headings += ["draft"] * drafts + ["wanted"] * caps
    columns = [Column("request"), Column("phase"), Column("work")]
    columns += [Column(heading, numeric=True) for heading in headings]
    rows: list[list[Cell]] = [
        [
            say("{request:id}", request=share.request_id),
            share.phase,
            share.work or "-",
            integer(share.computed_tokens),
            integer(share.scheduled_tokens),
            integer(share.prompt_tokens),
            *([integer(share.draft_tokens)] * drafts),
            *([integer(share.wanted_tokens) if share.caps else "", "cut" if share.caps else ""] * caps),
        ]
        for share in scheduled[:most]
    ]
    more = f"{integer(len(scheduled) - most)} more: --all lists them" if len(scheduled) > most else ""
    return Table([*columns, *([Column("")] * caps)], rows, more)


def _cuts(scheduled: list[Scheduled], *, everything: bool) -> Iterator[Content]:
    """Below the table, since the names of limits are long."""
    for caps in dict.fromkeys(tuple(share.caps) for share in scheduled if share.caps):
        cut = [share.request_id for share in scheduled if tuple(share.caps) == caps]
        limits = joined([say("{cap:cause}", cap=cap) for cap in caps], ", then ")
        names = some([say("{request:id}", request=name) for name in cut], everything=everything)
        yield say("cut by {limits}: {names}", limits=limits, names=names)


MOST_WAITING = 10
MOST_RANKS = 8


def step_page(story: StepStory, *, everything: bool = False) -> Page[StepStory]:
    """A step.

    Args:
        story: The step.
        everything: List every request, however many there are.
    """
    return Page(story, lambda shown: _sections(shown, everything=everything))


def _sections(story: StepStory, *, everything: bool) -> Iterator[Section]:
    engine = f", engine {story.engine_rank}" if story.engine_rank else ""
    about = say(" of {label:code}{engine}", label=story.label, engine=engine)
    yield Headline(f"Step {story.step}{of_trial(story.trial)}", about, [_times(story)], list(story.problems))
    parts = (_before, _decided, _after)
    yield Facts([fact for part in parts for fact in part(story, everything=everything)])
    if story.ranks:
        yield Note(f"All ranks in this common step (wave {story.wave}, counter {story.step_counter}):")
        yield _ranks_table(story, len(story.ranks) if everything else MOST_RANKS)


def _times(story: StepStory) -> Text:
    back: Text = "its output has not come back"
    if story.output_us is not None:
        tokens = "" if story.output_tokens is None else f" with {counted(story.output_tokens, 'token')}"
        after = Duration(story.output_us - story.start_us)
        back = say("its output was back after {after}{tokens}", after=after, tokens=tokens)
    return say(
        "{start} s into the trace; schedule() took {took:us}, {back}",
        start=f"{story.start_us / 1e6:,.3f}",
        took=story.schedule_us,
        back=back,
    )


def _before(story: StepStory, *, everything: bool) -> Iterator[Fact]:
    yield Fact(
        "before",
        [_crowd(story, story.num_running_before, story.num_waiting_before, story.kv_blocks_free_before)],
    )
    if story.arrived:
        yield Fact("arrived", [_arrived(story.arrived, everything=everything)])
    if story.finished:
        yield Fact("finished", [_finished(story.finished, everything=everything)])


def _decided(story: StepStory, *, everything: bool) -> Iterator[Fact]:
    text = used(
        Number(story.token_budget - story.remaining_budget),
        Count(story.token_budget, "token"),
        Number(story.remaining_budget),
        Count(len(story.scheduled), "request") if story.scheduled else None,
    )
    yield Fact("used", [text, *scheduled_parts(story.scheduled, everything=everything)])
    if story.preempted:
        lost: list[Content] = [Styled(victim.message, Style.WARNING) for victim in story.preempted]
        yield Fact("preempted", [*lost])
    yield Fact("stopped", [*(stop.message for stop in story.stops)] or ["no exit was recorded"])


def _after(story: StepStory, *, everything: bool) -> Iterator[Fact]:
    if story.late:
        yield Fact("too late", [_late(story, everything=everything)])
    yield Fact(
        "after", [_crowd(story, story.num_running_after, story.num_waiting_after, story.kv_blocks_free_after)]
    )
    if story.waiting or not story.waiting_agrees:
        yield Fact("waiting", [*_waiting(story, everything=everything)])
    if story.facts:
        yield Fact("facts", [*story.facts])
    if story.what_if:
        assumed = Styled(_assumed(story), Style.DIM)
        yield Fact("what if", [*(answer.message for answer in story.what_if), assumed])


def _ranks_table(story: StepStory, most: int) -> Table:
    """The rank that the page is about, and those whose outputs were last: these made the step so long."""
    last = sorted(story.ranks, key=lambda turn: (turn.engine_rank != story.engine_rank, -(turn.back_us or 0)))
    kept = {turn.engine_rank for turn in last[:most]}
    columns = [
        Column("engine"),
        Column("step", numeric=True),
        Column("requests", numeric=True),
        Column("prefill\ntok", numeric=True),
        Column("decode\ntok", numeric=True),
        Column("running", numeric=True),
        Column("waiting", numeric=True),
        Column("back after\nms", numeric=True),
        Column(""),
    ]
    rows: list[list[Cell]] = [
        [
            str(turn.engine_rank),
            "-" if turn.step is None else str(turn.step),
            integer(turn.requests),
            integer(turn.prefill_tokens),
            integer(turn.decode_tokens),
            integer(turn.num_running),
            integer(turn.num_waiting),
            "-" if turn.back_us is None else milliseconds(turn.back_us / 1e3),
            {True: "dummy batch", False: "", None: "not recorded"}[turn.dummy],
        ]
        for turn in story.ranks
        if turn.engine_rank in kept
    ]
    less = len(story.ranks) - len(rows)
    return Table(columns, rows, f"{integer(less)} more, back earlier: --all lists them" if less else "")


def _assumed(story: StepStory) -> Message:
    names = {f"a{at}": text for at, text in enumerate(story.what_if_assumes)}
    return say(f"Note: {'; '.join(f'{{{name}}}' for name in names)}.", **names)


def _crowd(story: StepStory, running: int, waiting: int, free: int | None) -> Message:
    total = story.kv_blocks_total
    return crowd(
        Number(running),
        Number(waiting),
        None if free is None else Number(free),
        None if total is None else Number(total),
    )


def crowd(running: Value, waiting: Value, free: Value | None, total: Value | None) -> Message:
    """Requests and KV blocks before or after a step; without a value where it is not known, or with slots."""
    of = NOTHING if total is None else say(" of {total}", total=total)
    blocks = NOTHING if free is None else say(", {free}{of} KV blocks free", free=free, of=of)
    return say(
        "{running} running, {waiting} waiting{blocks}", running=running, waiting=waiting, blocks=blocks
    )


def used(tokens: Value, budget: Value, left: Value, requests: Value | None) -> Message:
    """What a step scheduled; ``requests`` is None where it scheduled nobody."""
    by = NOTHING if requests is None else say(", by {requests}", requests=requests)
    return say("{used} of {budget} of budget, {left} left{by}", used=tokens, budget=budget, left=left, by=by)


def _arrived(newcomers: list[Newcomer], *, everything: bool) -> Message:
    lengths = {newcomer.prompt_tokens for newcomer in newcomers}
    alike = f" of {counted(lengths.pop(), 'prompt token')}" if len(lengths) == 1 else ""
    names = [
        _named(newcomer.request_id, "" if alike else f" ({integer(newcomer.prompt_tokens)} tokens)")
        for newcomer in newcomers
    ]
    return _counted_names(len(newcomers), alike, names, everything=everything)


def _finished(leavers: list[Leaver], *, everything: bool) -> Message:
    endings = {(leaver.status, leaver.output_tokens) for leaver in leavers}
    alike = ""
    if len(endings) == 1:
        status, tokens = endings.pop()
        alike = f", {status} with {counted(tokens, 'token')}"
    names = [
        _named(
            leaver.request_id,
            "" if alike else f" ({leaver.status}, {counted(leaver.output_tokens, 'token')})",
        )
        for leaver in leavers
    ]
    return _counted_names(len(leavers), alike, names, everything=everything)


def _named(request_id: str, about: str) -> Message:
    return say("{request:id}{about}", request=request_id, about=about)


def _counted_names(count: int, alike: str, names: list[Message], *, everything: bool) -> Message:
    listed = some(names, everything=everything)
    return say("{count}{alike}: {names}", count=counted(count, "request"), alike=alike, names=listed)


def _late(story: StepStory, *, everything: bool) -> Message:
    end_us = story.start_us + story.schedule_us
    came = [newcomer.queued_us - (newcomer.on_its_way_us or 0) for newcomer in story.late]
    on_their_way = sum(us <= end_us for us in came)
    text: Text = ""
    if on_their_way:
        text = f" {integer(on_their_way)} of them had reached the front end when schedule() ended."
    if on_their_way < len(came):
        text = say(
            "{text} The last one reached the front end {late:us} after schedule() ended, before "
            "this step's output was back.",
            text=text,
            late=max(came) - end_us,
        )
    return say("{came}.{text}", came=_arrived(story.late, everything=everything), text=text)


def _waiting(story: StepStory, *, everything: bool) -> Iterator[Content | Table]:
    if not story.waiting_agrees:
        names, count = integer(len(story.waiting)), integer(story.num_waiting_after)
        text = (
            f"the recorder counted {count} waiting requests, the trace has {names}: some arrivals or "
            "departures are missing from it"
        )
        yield Styled(text, Style.WARNING)
    if story.num_not_ready_after:
        not_ready = integer(story.num_not_ready_after)
        yield f"{not_ready} of them wait for something else than the scheduler; who is not recorded"
    if story.waiting:
        yield _queue_table(story.waiting, len(story.waiting) if everything else MOST_WAITING)


def _queue_table(waiting: list[Waiter], most: int) -> Table:
    columns = [
        Column("next in line"),
        Column("tokens\nwanted", numeric=True),
        Column("waits since\nstep", numeric=True, of_steps=True),
        Column("for ms", numeric=True),
        Column(""),
    ]
    rows: list[list[Cell]] = [
        [
            say("{request:id}", request=waiter.request_id),
            integer(waiter.wanted_tokens),
            str(waiter.since_step),
            milliseconds(waiter.waited_ms),
            "was preempted" if waiter.preempted else "",
        ]
        for waiter in waiting[:most]
    ]
    more = f"{integer(len(waiting) - most)} more: --all lists them" if len(waiting) > most else ""
    return Table(columns, rows, more)
