"""A request's life as text for a terminal."""

from collections import Counter
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from schedtrace.model.life import Life, LifeEvent, StateRun
from schedtrace.present.layout import plain_table, section_grid
from schedtrace.present.numbers import integer, milliseconds, percent
from schedtrace.present.phrases import plain
from schedtrace.present.words import of_trial

MOST_CHUNKS = 8
CHARACTERS = {
    "waiting": (".", "yellow"),
    "prefill": ("P", "green"),
    "recompute": ("R", "magenta"),
    "decode": ("=", "cyan"),
    "preempted": ("x", "red"),
    "skipped": ("_", "dim"),
}
SHOWN_FIRST = ("prefill", "recompute")
"""Few steps, but the ones to be found in a long life."""
WORDS = {"front_end": "front end", "skipped": "running, got nothing"}


def life_view(life: Life) -> RenderableType:
    """What it was, where its time went, step by step, event by event."""
    grid = section_grid()
    if life.spans:
        grid.add_row("time", _spans(life))
    if life.states:
        grid.add_row("steps", StateStrip(life.states))
    if life.gaps:
        grid.add_row("outputs", _gaps(life))
    return Group(*_head(life), Text(), _event_table(life), Text(), grid)


def _head(life: Life) -> Iterator[Text]:
    engine = f", engine {life.engine_rank}" if life.engine_rank else ""
    of_run = f"{of_trial(life.trial)} of {life.label}{engine}"
    yield Text.assemble((f"Request {life.request_id}", "bold"), of_run)
    output = "" if life.output_tokens is None else f" + {integer(life.output_tokens)} output tokens"
    ended = "did not end in this trace" if life.status is None else f"{life.status}"
    took = "" if life.e2e_ms is None else f" after {milliseconds(life.e2e_ms)} ms"
    first = "" if life.ttft_ms is None else f", first token after {milliseconds(life.ttft_ms)} ms"
    yield Text(f"{integer(life.prompt_tokens)} prompt tokens{output}; {ended}{took}{first}")


def _event_table(life: Life) -> Table:
    table = plain_table(right=["ms", "step"], last="what happened (times since its arrival)")
    events = life.events
    chunks = [event for event in events if event.what == "chunk"]
    hidden = chunks[MOST_CHUNKS - 1 : -1] if len(chunks) > MOST_CHUNKS else []
    for event in events:
        if hidden and event is hidden[0]:
            table.add_row(
                "", "", Text(f"{integer(len(hidden))} more chunks: --format json lists them", style="dim")
            )
        if not any(event is one for one in hidden):
            style = {"preempted": "red", "first_token": "bold"}.get(event.what, "")
            table.add_row(f"{event.at_ms:,.1f}", _steps(event), Text(plain(event.message), style=style))
    return table


def _steps(event: LifeEvent) -> str:
    if event.step is None:
        return ""
    return str(event.step) if event.last_step == event.step else f"{event.step}-{event.last_step}"


def _spans(life: Life) -> Text:
    sums: Counter[str] = Counter()
    for span in life.spans:
        sums[span.state] += span.to_ms - span.from_ms  # type: ignore[assignment]  # a counter of milliseconds
    whole = sum(sums.values())
    parts = [
        f"{WORDS.get(state, state)} {milliseconds(took)} ({percent(took / whole if whole else None)})"
        for state, took in sums.items()
    ]
    return Text(f"{' + '.join(parts)} = {milliseconds(whole)} ms")


def _gaps(life: Life) -> Text:
    lost = {True: " (preempted)", False: ""}
    longest = [
        f"{milliseconds(gap.gap_ms)} ms before that of step {gap.step}{lost[gap.preempted]}"
        for gap in life.gaps[:3]
    ]
    return Text(
        f"{integer(life.outputs)}, {milliseconds(life.mean_gap_ms)} ms apart on average; longest gaps: "
        f"{', '.join(longest)}"
    )


class StateStrip:
    """One character a step, or for several of them, as wide as there is room."""

    def __init__(self, states: list[StateRun]) -> None:
        self.states = states

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """The strip and its legend."""
        steps = [run.state for run in self.states for _ in range(run.steps)]
        cells = min(options.max_width, len(steps))
        strip = Text(no_wrap=True, overflow="crop")
        for cell in range(cells):
            character, style = CHARACTERS[
                _shown(steps[cell * len(steps) // cells : (cell + 1) * len(steps) // cells])
            ]
            strip.append(character, style=style)
        yield strip
        last = self.states[-1]
        legend = ", ".join(
            f"{character} {WORDS.get(state, state)}"
            for state, (character, _) in CHARACTERS.items()
            if state in steps
        )
        each = (
            "one character a step"
            if cells == len(steps)
            else f"{integer(len(steps))} steps, several a character"
        )
        yield Text(
            f"steps {self.states[0].first_step} to {last.first_step + last.steps - 1}, {each}: {legend}",
            style="dim",
        )


def _shown(states: list[str]) -> str:
    """What a character stands for: a prefill wherever there is one, else what most of its steps were."""
    return next((state for state in SHOWN_FIRST if state in states), Counter(states).most_common(1)[0][0])
