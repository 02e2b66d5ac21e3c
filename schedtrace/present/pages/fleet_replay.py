"""Page of a fleet's load, replayed through another router or on another number of engines."""

from collections.abc import Iterator

from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.model.what_if import Figure, Replays
from schedtrace.present.pages.what_if import replay_page
from schedtrace.present.phrases import change_range
from schedtrace.present.sections import Headline, Page, Section, Text, answer_note, basis_note

ENGINES, ROUTER = "data_parallel_size", "router"

ROUTER_WORDS = {
    "better": "The router is to blame: behind {router:code},",
    "worse": "The router is not to blame: behind {router:code},",
    "unclear": "The router is not to blame as far as this replay can tell: behind {router:code},",
}
ENGINES_WORDS = {
    "better": "{now:n engine} instead of {before:n} serve requests faster:",
    "worse": "{now:n engine} instead of {before:n} serve requests more slowly:",
    "unclear": "{now:n engine} instead of {before:n} would do as far as this replay can tell:",
}


def fleet_replay_page(replays: Replays) -> Page[Replays]:
    """Return the page of a fleet's replay: the answer, the figures, and what the answer rests on."""
    return Page(replays, _sections)


def _sections(replays: Replays) -> Iterator[Section]:
    shown = replays.configurations[1]
    for section in replay_page(replays).sections:
        if isinstance(section, Headline):
            words = "{requests:n request} of {engines:n engine}, replayed on {now:n} behind {router:code}"
            title = say(
                words,
                replays.load,
                engines=replays.settings[ENGINES],
                now=shown.changes[ENGINES],
                router=shown.changes[ROUTER],
            )
            warnings = [warning for warning in section.warnings if not _asks_for_trials(warning)]
            yield Headline(title, section.about, section.lines, warnings)
            yield answer_note(answer(replays))
            yield from (basis_note("Replayed:", part) for part in _part(replays))
        else:
            yield section


def _asks_for_trials(warning: Text) -> bool:
    """Return whether a warning asks for more trials, which the load of a fleet does not have."""
    return isinstance(warning, Message) and "trials" in warning.arguments


def answer(replays: Replays) -> Message:
    """Return whether the number of engines would do, or whether the router is to blame."""
    shown, judged = replays.configurations[1], replays.baseline and replays.baseline.judged_by
    figure = shown.figure(judged or "")
    if figure is None or figure.change_frac is None:
        return say("The replay has no latency by which to judge.")
    before, now = replays.settings[ENGINES], shown.changes[ENGINES]
    words = ROUTER_WORDS if now == before else ENGINES_WORDS
    return say(
        f"{words[_outcome(figure)]} {{name}} changes by {{change_frac:+%}}[ (90 % interval: {{interval}})].",
        figure,
        **({"router": shown.changes[ROUTER]} if now == before else {"now": now, "before": before}),
        interval=_interval(figure),
    )


def _outcome(figure: Figure) -> str:
    """Return ``better``, ``worse`` or ``unclear``: the interval covers no change, or there is none."""
    low, high = figure.low_frac, figure.high_frac
    if low is None or high is None or low <= 0 <= high:
        return "unclear"
    return "worse" if low > 0 else "better"


def _interval(figure: Figure) -> Message | str:
    if figure.low_frac is None or figure.high_frac is None:
        return ""
    return change_range(figure.low_frac, figure.high_frac)


def _part(replays: Replays) -> Iterator[Message]:
    """Yield the part of the load that was replayed, or nothing if it is the whole."""
    if replays.load.part is not None:
        yield say("{part}.", part=replays.load.part.words)
