"""One request's life: what it was, event by event, where its time went, step by step."""

from collections import defaultdict
from collections.abc import Iterator

from schedtrace.model.life import Life, LifeEvent
from schedtrace.model.message import Duration, Message, Steps, joined
from schedtrace.model.say import say
from schedtrace.present.numbers import counted, integer
from schedtrace.present.pages.names import of_trial
from schedtrace.present.phrases import plain
from schedtrace.present.sections import (
    Band,
    Cell,
    Column,
    Fact,
    Facts,
    Headline,
    Page,
    Section,
    States,
    Strip,
    Styled,
    Table,
    Text,
)
from schedtrace.present.words import EVENTS, state

MOST_CHUNKS = 8
MOST_GAPS = 3


def request_page(life: Life) -> Page[Life]:
    """A request."""
    return Page(life, _sections)


def _sections(life: Life) -> Iterator[Section]:
    yield _headline(life)
    yield _event_table(life.events)
    facts = []
    if life.states:
        facts.append(Fact("time", [_time(life)]))
    if any(piece.steps for piece in life.states):
        facts.append(Fact("steps", [_steps_strip(life)]))
    if life.gaps:
        facts.append(Fact("outputs", [_gaps(life)]))
    if facts:
        yield Facts(facts)


def _headline(life: Life) -> Headline:
    engine = f", engine {life.engine_rank}" if life.engine_rank else ""
    about = say(
        "{trial} of {label:code}{engine}", trial=of_trial(life.trial), label=life.label, engine=engine
    )
    title = say("Request {request:id}", request=life.request_id)
    return Headline(title, about, [joined([*_summary(life)], "; ")], list(life.problems))


def _summary(life: Life) -> Iterator[Message]:
    output = "" if life.output_tokens is None else f" + {counted(life.output_tokens, 'output token')}"
    yield say("{prompt} prompt tokens{output}", prompt=integer(life.prompt_tokens), output=output)
    took = _after(life.e2e_ms)
    first = say(", first token{after}", after=_after(life.ttft_ms)) if life.ttft_ms is not None else ""
    ended = life.status or "did not end in this trace"
    yield say("{ended}{took}{first}", ended=ended, took=took, first=first)
    lost = [counted(life.num_preemptions, "preemption")] if life.num_preemptions else []
    if life.num_cache_resets:
        lost.append(f"{counted(life.num_cache_resets, 'time')} preempted by a reset of the prefix cache")
    if lost:
        yield say("{lost}", lost=", ".join(lost))


def _after(ms: float | None) -> Text:
    return "" if ms is None else say(" after {time:us}", time=1e3 * ms)


def _event_table(events: list[LifeEvent]) -> Table:
    columns = [
        Column("ms", numeric=True),
        Column("step", numeric=True, of_steps=True),
        Column("what happened (times since its arrival)"),
    ]
    chunks = [at for at, event in enumerate(events) if event.what == "chunk"]
    hidden = chunks[MOST_CHUNKS - 1 : -1] if len(chunks) > MOST_CHUNKS else []
    rows: list[list[Cell]] = [
        [f"{event.at_ms:,.1f}", _steps(event), Styled(event.message, EVENTS.get(event.what))]
        for at, event in enumerate(events)
        if at not in hidden
    ]
    more = f"{counted(len(hidden), 'chunk')} left out: --format json lists them" if hidden else ""
    return Table(columns, rows, more)


def _steps(event: LifeEvent) -> str:
    if event.step is None:
        return ""
    return str(event.step) if event.last_step == event.step else f"{event.step}-{event.last_step}"


def _time(life: Life) -> Message:
    sums: defaultdict[str, float] = defaultdict(float)
    for piece in life.states:
        sums[piece.state] += piece.to_ms - piece.from_ms
    whole = sum(sums.values())
    parts = [
        say(
            "{state} {took:us} ({share:%})",
            state=state(word).word,
            took=1e3 * took,
            share=took / whole if whole else None,
        )
        for word, took in sums.items()
    ]
    device = sum(piece.device_ms for piece in life.states)
    return say(
        "{parts} = {whole:us}; the device was busy for {device:%} of it",
        parts=joined(parts, " + "),
        whole=1e3 * whole,
        device=device / whole if whole else None,
    )


def _steps_strip(life: Life) -> Strip:
    known = [piece for piece in life.states if piece.first_step is not None and piece.last_step is not None]
    runs = [(state(piece.state), piece.steps) for piece in known]
    first, last = known[0].first_step or 0, known[-1].last_step or 0
    steps = plain(say("{steps}", steps=Steps(first, last)))
    return Strip([Band("", States(runs))], f"{steps}, left to right")


def _gaps(life: Life) -> Message:
    longest = [
        say(
            "{gap:us} before that of {step:step}{preempted}",
            gap=1e3 * gap.gap_ms,
            step=gap.step,
            preempted=" (preempted)" if gap.preempted else "",
        )
        for gap in life.gaps[:MOST_GAPS]
    ]
    mean = "unknown" if life.mean_gap_ms is None else Duration(1e3 * life.mean_gap_ms)
    return say(
        "{count}, {mean} apart on average; longest gaps: {longest}",
        count=integer(life.outputs),
        mean=mean,
        longest=joined(longest, ", "),
    )
