"""Page of a request: its history event by event, and where its time went."""

from collections import defaultdict
from collections.abc import Iterator

from schedtrace.model.causes import interruption
from schedtrace.model.message import NOTHING, Message, Steps, joined
from schedtrace.model.printable import counted
from schedtrace.model.say import say
from schedtrace.model.story import Life, LifeEvent
from schedtrace.present.phrases import EVENTS, engine_suffix, phrase, state, trial_suffix
from schedtrace.present.sections import (
    Band,
    FactRow,
    Facts,
    Field,
    Headline,
    Page,
    Section,
    States,
    Strip,
    Styled,
    figure_field,
    table,
)

MOST_CHUNKS = 8
MOST_GAPS = 3


def request_page(life: Life) -> Page[Life]:
    """Return the page of a request."""
    return Page(life, _sections)


def _sections(life: Life) -> Iterator[Section]:
    yield _headline(life)
    chunks = [at for at, event in enumerate(life.events) if event.what == "chunk"]
    hidden = chunks[MOST_CHUNKS - 1 : -1] if len(chunks) > MOST_CHUNKS else []
    more = f"{counted(len(hidden), 'chunk')} left out: --format json lists them" if hidden else ""
    yield table([event for at, event in enumerate(life.events) if at not in hidden], EVENT, more)
    facts = []
    if life.states:
        facts.append(FactRow("time", [_time(life)]))
    if any(piece.steps for piece in life.states):
        facts.append(FactRow("steps", [_steps_strip(life)]))
    if life.gaps:
        facts.append(FactRow("outputs", [_gaps(life)]))
    if facts:
        yield Facts(facts)


def _headline(life: Life) -> Headline:
    about = say(
        "{trial} of {label:code}{engine}",
        life,
        trial=trial_suffix(life.trial),
        engine=engine_suffix(life.engine_rank),
    )
    lines = [joined([*_summary(life)], "; ")]
    return Headline(say("Request {request_id:id}", life), about, [*lines], list(life.problems))


def _summary(life: Life) -> Iterator[Message]:
    generated = (
        say(" + {count:n output token}", count=life.output_tokens) if life.output_tokens is not None else ""
    )
    yield say("{prompt_tokens:n} prompt tokens{generated}", life, generated=generated)
    yield say("arrived {start} s into the recording", start=f"{life.into_recording_ms / 1e3:,.3f}")
    yield say(
        "{ended}{took}[, first token{after}]",
        ended=life.status or "did not end in this trace",
        took=_after(life.e2e_ms),
        after=_after(life.ttft_ms),
    )
    lost = [counted(life.num_preemptions, "preemption")] if life.num_preemptions else []
    if life.num_cache_resets:
        lost.append(f"{counted(life.num_cache_resets, 'time')} preempted by a reset of the prefix cache")
    if lost:
        yield say("{lost}", lost=", ".join(lost))


def _after(ms: float | None) -> Message:
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


def _steps_strip(life: Life) -> Strip:
    pieces = [piece for piece in life.states if piece.first_step is not None and piece.last_step is not None]
    runs = [(state(piece.state), piece.steps) for piece in pieces]
    first, last = pieces[0].first_step or 0, pieces[-1].last_step or 0
    return Strip([Band("", States(runs))], f"{phrase(Steps(first, last))}, left to right")


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
