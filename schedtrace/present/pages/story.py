"""Pages of a story: of a step, and of a request.

A step's page shows requests and their tokens, exits, waiting requests, and what else would have fitted. A
request's page shows its history event by event, and where its time went.
"""

from collections import defaultdict
from collections.abc import Iterator

from schedtrace.model.causes import interruption
from schedtrace.model.message import NOTHING, Count, Message, Number, Steps, Value, joined, phrase
from schedtrace.model.numbers import counted, integer, number
from schedtrace.model.say import say
from schedtrace.model.story import Life, LifeEvent, Newcomer, RankTurn, Scheduled, StepStory, Waiter
from schedtrace.present.phrases import EVENTS, state
from schedtrace.present.sections import (
    Band,
    Content,
    FactRow,
    Facts,
    Field,
    Headline,
    Note,
    Page,
    Section,
    States,
    Strip,
    Style,
    Styled,
    Table,
    Text,
    figure_field,
    table,
)

MOST_LISTED = 20
LISTED_BY = "--all lists them"
FEWEST_GROUPED = 4
"""Minimum number of equal decodes that share a line; fewer decodes are listed individually."""


MOST_NAMES = 6


def some(texts: list[Message], *, everything: bool) -> Message:
    """Return ``a, b, c, d, e, f and 9 more``; with ``everything``, all texts."""
    most = len(texts) if everything or len(texts) == MOST_NAMES + 1 else MOST_NAMES
    rest = len(texts) - most
    more = f" and {integer(rest)} more" if rest > 0 else ""
    return say("{names}{more}", names=joined(texts[:most], ", "), more=more)


def trial_suffix(trial: int | None) -> str:
    """Return `` of trial 1``; nothing for a trace without trials."""
    return {None: "", 0: " of the warm-up"}.get(trial, f" of trial {trial}")


def engine_suffix(rank: int) -> str:
    """Return ``, engine 2``; nothing for engine 0, the only engine of most runs."""
    return f", engine {rank}" if rank else ""


def scheduled_parts(scheduled: list[Scheduled], *, everything: bool) -> Iterator[Content | Table]:
    """Yield ordinary decodes on one line if there are many, and all other requests in a table.

    If ``everything`` is set, all requests are in the table.
    """
    plain = [share for share in scheduled if _plain(share)]
    grouped = [] if everything or len(plain) < FEWEST_GROUPED else plain
    listed = [share for share in scheduled if not _plain(share)] if grouped else scheduled
    if grouped:
        tokens = sorted({share.scheduled_tokens for share in grouped})
        each = counted(tokens[0], "token") if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]} tokens"
        drafts = sum(share.draft_tokens for share in grouped)
        drafted = f" ({counted(drafts, 'draft token')} among them)" if drafts else ""
        yield f"{counted(len(grouped), 'running request')} decoded {each} each{drafted}"
    if listed:
        fields: list[Field[Scheduled]] = [
            Field("request", lambda share: say("{request_id:id}", share)),
            Field("phase", lambda share: share.phase),
            Field("work", lambda share: share.work or "-"),
            figure_field("computed\nbefore", lambda share: integer(share.computed_tokens)),
            figure_field("tokens\nnow", lambda share: integer(share.scheduled_tokens)),
            figure_field("prompt", lambda share: integer(share.prompt_tokens)),
        ]
        if any(share.draft_tokens for share in listed):
            fields.append(figure_field("draft", lambda share: integer(share.draft_tokens)))
        if any(share.caps for share in listed):
            fields += [
                figure_field("wanted", lambda share: integer(share.wanted_tokens) if share.caps else ""),
                Field("", lambda share: "cut" if share.caps else ""),
            ]
        yield table(listed, fields, most=None if everything else MOST_LISTED, how=LISTED_BY)
        for caps in dict.fromkeys(tuple(share.caps) for share in listed if share.caps):
            cut = [share.request_id for share in listed if tuple(share.caps) == caps]
            limits = joined([say("{cap:cause}", cap=cap) for cap in caps], ", then ")
            names = some([say("{request:id}", request=name) for name in cut], everything=everything)
            yield say("cut by {limits}: {names}", limits=limits, names=names)


def _plain(share: Scheduled) -> bool:
    """Return whether the request is an ordinary decode, of which large batches have hundreds."""
    return share.phase == "running" and share.work == "decode" and not share.caps


MOST_WAITING = 10
MOST_RANKS = 8


def step_page(story: StepStory, *, everything: bool = False) -> Page[StepStory]:
    """Return the page of a step.

    Args:
        story: The step.
        everything: Whether to list every request, however many there are.
    """
    return Page(story, lambda shown: _step_sections(shown, everything=everything))


def _step_sections(story: StepStory, *, everything: bool) -> Iterator[Section]:
    about = say(" of {label:code}{engine}", story, engine=engine_suffix(story.engine_rank))
    back: Text = "its output has not come back"
    if story.output_us is not None:
        tokens = "" if story.output_tokens is None else f" with {counted(story.output_tokens, 'token')}"
        after = story.output_us - story.start_us
        back = say("its output was back after {after:us}{tokens}", after=after, tokens=tokens)
    times = say(
        "{start} s into the recording; schedule() took {schedule_us:us}, {back}",
        story,
        start=f"{story.into_recording_us / 1e6:,.3f}",
        back=back,
    )
    yield Headline(f"Step {story.step}{trial_suffix(story.trial)}", about, [times], list(story.problems))
    parts = (_before, _decided, _after_step)
    yield Facts([fact for part in parts for fact in part(story, everything=everything)])
    if story.ranks:
        yield Note(f"All ranks in this common step (wave {story.wave}, counter {story.step_counter}):")
        most = len(story.ranks) if everything else MOST_RANKS
        # This rank, and those whose outputs came last and determined the step's length.
        last = sorted(
            story.ranks, key=lambda turn: (turn.engine_rank != story.engine_rank, -(turn.back_us or 0))
        )
        shown_ranks = {turn.engine_rank for turn in last[:most]}
        shown = [turn for turn in story.ranks if turn.engine_rank in shown_ranks]
        less = len(story.ranks) - len(shown)
        yield table(shown, RANK, f"{integer(less)} more, back earlier: {LISTED_BY}" if less else "")


def _before(story: StepStory, *, everything: bool) -> Iterator[FactRow]:
    yield FactRow(
        "before",
        [_crowd(story, story.num_running_before, story.num_waiting_before, story.kv_blocks_free_before)],
    )
    if story.interruptions:
        yield FactRow("events", [Styled(sentence, Style.WARNING) for sentence in story.interruptions])
    if story.arrived:
        yield FactRow("arrived", [_arrived(story.arrived, everything=everything)])
    if story.finished:
        ends = [(leaver, counted(leaver.output_tokens, "token")) for leaver in story.finished]
        about = [
            (leaver.request_id, f", {leaver.status} with {tokens}", f" ({leaver.status}, {tokens})")
            for leaver, tokens in ends
        ]
        yield FactRow("finished", [_counted_names(about, everything=everything)])


def _decided(story: StepStory, *, everything: bool) -> Iterator[FactRow]:
    text = budget_use(
        Number(story.token_budget - story.remaining_budget),
        Count(story.token_budget, "token"),
        Number(story.remaining_budget),
        Count(len(story.scheduled), "request") if story.scheduled else None,
        allowed=None if story.token_budget_set is None else Number(story.token_budget_set),
    )
    yield FactRow("used", [text, *scheduled_parts(story.scheduled, everything=everything)])
    if story.preempted:
        lost: list[Content] = [Styled(victim.message, Style.WARNING) for victim in story.preempted]
        yield FactRow("preempted", [*lost])
    yield FactRow("stopped", [*(stop.message for stop in story.stops)] or ["no exit was recorded"])


def _after_step(story: StepStory, *, everything: bool) -> Iterator[FactRow]:
    if story.late:
        yield FactRow("too late", [_late(story, everything=everything)])
    yield FactRow(
        "after", [_crowd(story, story.num_running_after, story.num_waiting_after, story.kv_blocks_free_after)]
    )
    waiting: list[Content | Table | Strip] = []
    if not story.waiting_agrees:
        names, count = integer(len(story.waiting)), integer(story.num_waiting_after)
        text = (
            f"the recorder counted {count} waiting requests, the trace has {names}: some arrivals or "
            "departures are missing from it"
        )
        waiting.append(Styled(text, Style.WARNING))
    if story.num_not_ready_after:
        not_ready = integer(story.num_not_ready_after)
        waiting.append(f"{not_ready} of them wait for something else than the scheduler; who is not recorded")
    if story.waiting:
        most = None if everything else MOST_WAITING
        waiting.append(table(story.waiting, QUEUE, most=most, how=LISTED_BY))
    if story.waiting or not story.waiting_agrees:
        yield FactRow("waiting", waiting)
    if story.facts:
        yield FactRow("facts", [*story.facts])
    if story.what_if:
        assumed = say("Note: {assumed}.", assumed=joined(story.what_if_assumes, "; "))
        yield FactRow("what if", [*(answer.message for answer in story.what_if), Styled(assumed, Style.DIM)])


RANK: list[Field[RankTurn]] = [
    Field("engine", lambda turn: str(turn.engine_rank)),
    figure_field("step", lambda turn: "-" if turn.step is None else str(turn.step)),
    figure_field("requests", lambda turn: integer(turn.requests)),
    figure_field("prefill\ntok", lambda turn: integer(turn.prefill_tokens)),
    figure_field("decode\ntok", lambda turn: integer(turn.decode_tokens)),
    figure_field("running", lambda turn: integer(turn.num_running)),
    figure_field("waiting", lambda turn: integer(turn.num_waiting)),
    figure_field("back after\nms", lambda turn: number(None if turn.back_us is None else turn.back_us / 1e3)),
    Field("", lambda turn: {True: "dummy batch", False: "", None: "not recorded"}[turn.dummy]),
]


def _crowd(story: StepStory, running: int, waiting: int, free: int | None) -> Message:
    total = story.kv_blocks_total
    return crowd(
        Number(running),
        Number(waiting),
        None if free is None else Number(free),
        None if total is None else Number(total),
    )


def crowd(running: Value, waiting: Value, free: Value | None, total: Value | None) -> Message:
    """Return a text on the requests and free KV blocks before or after a step, from values or slots."""
    return say(
        "{running} running, {waiting} waiting[, {free}[ of {total}] KV blocks free]",
        running=running,
        waiting=waiting,
        free=free,
        total=total,
    )


def budget_use(
    tokens: Value, budget: Value, left: Value, requests: Value | None, allowed: Value | None = None
) -> Message:
    """Return a sentence on the tokens and requests that a step scheduled.

    ``requests`` is None if the step scheduled no request. ``allowed`` is the budget of the settings, if
    ``schedule()`` worked with a smaller one.
    """
    return say(
        "{used} of {budget} of budget[ ({allowed} are set)], {left} left[, by {requests}]",
        used=tokens,
        budget=budget,
        left=left,
        requests=requests,
        allowed=allowed,
    )


def _arrived(newcomers: list[Newcomer], *, everything: bool) -> Message:
    about = [
        (
            newcomer.request_id,
            f" of {counted(newcomer.prompt_tokens, 'prompt token')}",
            f" ({integer(newcomer.prompt_tokens)} tokens)",
        )
        for newcomer in newcomers
    ]
    return _counted_names(about, everything=everything)


def _counted_names(about: list[tuple[str, str, str]], *, everything: bool) -> Message:
    """Return ``2 requests of 9 tokens: a, b``, or ``2 requests: a (9 tokens), b (8 tokens)``.

    Args:
        about: Ids, each with the clause to use if all clauses are equal, and the clause to use otherwise.
        everything: Whether to list all names.
    """
    of_all = {shared for _, shared, _ in about}
    alike = of_all.pop() if len(of_all) == 1 else ""
    names = [say("{id:id}{about}", id=name, about="" if alike else each) for name, _, each in about]
    listed = some(names, everything=everything)
    return say("{count:n request}{alike}: {names}", count=len(about), alike=alike, names=listed)


def _late(story: StepStory, *, everything: bool) -> Message:
    end_us = story.start_us + story.schedule_us
    arrivals_us = [newcomer.queued_us - (newcomer.on_its_way_us or 0) for newcomer in story.late]
    return say(
        "{came}.[ {on_their_way:n} of them had reached the front end when schedule() ended.]"
        "[ The last one reached the front end {late_us:us} after schedule() ended, before this step's output "
        "was back.]",
        came=_arrived(story.late, everything=everything),
        on_their_way=sum(us <= end_us for us in arrivals_us),
        late_us=max(0, max(arrivals_us) - end_us),
    )


QUEUE: list[Field[Waiter]] = [
    Field("next in line", lambda waiter: say("{request_id:id}", waiter)),
    figure_field("tokens\nwanted", lambda waiter: integer(waiter.wanted_tokens)),
    figure_field("waits since\nstep", lambda waiter: str(waiter.since_step), of_steps=True),
    figure_field("for ms", lambda waiter: number(waiter.waited_ms)),
    Field("", lambda waiter: "was preempted" if waiter.preempted else ""),
]


MOST_CHUNKS = 8
MOST_GAPS = 3


def request_page(life: Life) -> Page[Life]:
    """Return the page of a request."""
    return Page(life, _life_sections)


def _life_sections(life: Life) -> Iterator[Section]:
    about = say(
        "{trial} of {label:code}{engine}",
        life,
        trial=trial_suffix(life.trial),
        engine=engine_suffix(life.engine_rank),
    )
    lines = [joined([*_summary(life)], "; ")]
    yield Headline(say("Request {request_id:id}", life), about, [*lines], list(life.problems))
    chunks = [at for at, event in enumerate(life.events) if event.what == "chunk"]
    hidden = chunks[MOST_CHUNKS - 1 : -1] if len(chunks) > MOST_CHUNKS else []
    more = f"{counted(len(hidden), 'chunk')} left out: --format json lists them" if hidden else ""
    yield table([event for at, event in enumerate(life.events) if at not in hidden], EVENT, more)
    facts = []
    if life.states:
        facts.append(FactRow("time", [_time(life)]))
    if any(piece.step_count for piece in life.states):
        pieces = [
            piece for piece in life.states if piece.first_step is not None and piece.last_step is not None
        ]
        runs = [(state(piece.state), piece.step_count) for piece in pieces]
        first, last = pieces[0].first_step or 0, pieces[-1].last_step or 0
        facts.append(
            FactRow(
                "steps", [Strip([Band("", States(runs))], f"{phrase(Steps(first, last))}, left to right")]
            )
        )
    if life.gaps:
        facts.append(FactRow("outputs", [_gaps(life)]))
    if facts:
        yield Facts(facts)


def _summary(life: Life) -> Iterator[Message]:
    generated = (
        say(" + {count:n output token}", count=life.output_tokens) if life.output_tokens is not None else ""
    )
    yield say("{prompt_tokens:n} prompt tokens{generated}", life, generated=generated)
    yield say("arrived {start} s into the recording", start=f"{life.into_recording_ms / 1e3:,.3f}")
    yield say(
        "{ended}{took}[, first token{after}]",
        ended=life.status or "did not end in this trace",
        took=_elapsed(life.e2e_ms),
        after=_elapsed(life.ttft_ms),
    )
    lost = [counted(life.num_preemptions, "preemption")] if life.num_preemptions else []
    if life.num_cache_resets:
        lost.append(f"{counted(life.num_cache_resets, 'time')} preempted by a reset of the prefix cache")
    if lost:
        yield say("{lost}", lost=", ".join(lost))


def _elapsed(ms: float | None) -> Message:
    return NOTHING if ms is None else say(" after {time:ms}", time=ms)


def _steps(event: LifeEvent) -> str:
    if event.step is None:
        return ""
    return str(event.step) if event.last_step == event.step else f"{event.step}-{event.last_step}"


EVENT: list[Field[LifeEvent]] = [
    figure_field("ms", lambda event: f"{event.at_ms:,.1f}"),
    figure_field("step", _steps, of_steps=True),
    Field(
        "what happened (times since its arrival)",
        lambda event: Styled(event.message, EVENTS.get(event.what)),
    ),
]


def _time(life: Life) -> Message:
    sums: defaultdict[str, float] = defaultdict(float)
    for piece in life.states:
        word = interruption(piece.cause) if piece.of_state is not None else state(piece.state).word
        sums[word] += piece.to_ms - piece.from_ms
    whole = sum(sums.values())
    parts = [
        say(
            "{state} {took:ms} ({share:%})",
            state=word,
            took=took,
            share=took / whole if whole else None,
        )
        for word, took in sums.items()
    ]
    device = sum(piece.device_ms for piece in life.states)
    recorded = whole - sums[state("unrecorded").word] - sums[state("not_recorded").word]
    return say(
        "{parts} = {whole:ms}; the device was busy for {device:%} of [{all:!}what was recorded][{all:?}it]",
        parts=joined(parts, " + "),
        whole=whole,
        device=device / recorded if recorded else None,
        all=recorded == whole,
    )


def _gaps(life: Life) -> Message:
    longest = [
        say("{gap_ms:ms} before that of {step:step}[{preempted:?} (preempted)]", gap)
        for gap in life.gaps[:MOST_GAPS]
    ]
    mean = "unknown" if life.mean_gap_ms is None else say("{mean_gap_ms:ms}", life)
    return say(
        "{outputs:n}, {mean} apart on average; longest gaps: {longest}",
        life,
        mean=mean,
        longest=joined(longest, ", "),
    )
