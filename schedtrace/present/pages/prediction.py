"""Page of a replay: its basis, what scheduling would decide, and the resulting times."""

from collections.abc import Iterator

from schedtrace.model.message import Message, given
from schedtrace.model.prediction import Figure, Prediction, Proposal, Proposals, SettingChange
from schedtrace.model.say import say
from schedtrace.model.sweep_result import Bound
from schedtrace.present.phrases import change_range, number, percent, phrase
from schedtrace.present.sections import (
    Commands,
    Field,
    Headline,
    Note,
    Page,
    RootCauseSection,
    Section,
    Style,
    Styled,
    Table,
    figure,
    table,
)

LARGE_FRAC = 0.2
"""Share of extrapolated steps from which on it is said."""


def prediction_page(prediction: Prediction) -> Page[Prediction]:
    """Make the page of a prediction."""
    return Page(prediction, _sections)


def _sections(prediction: Prediction) -> Iterator[Section]:
    decides = say(
        "vLLM {vllm_version}'s own scheduler decides every step; only the step times are a model.", prediction
    )
    title = say(
        "Replay of {label:code}: {requests:n request}, [with {changes:code}][{unchanged:?}as recorded]",
        prediction,
        changes=_changes(prediction.changes),
        unchanged=not prediction.changes,
    )
    yield Headline(title, "", [decides], list(_warnings(prediction)))
    if prediction.compared_steps:
        yield Note(
            say(
                "{same_steps:n} of {compared_steps:n} steps have the same requests with the same tokens as "
                "recorded.",
                prediction,
            ),
            "Check:",
        )
    yield _table("decided, a trial", prediction.decided, prediction)
    yield _table("follows in time", prediction.measured, prediction)
    for note in prediction.notes:
        yield Note(Styled(note, Style.DIM))
    yield Note(Styled(prediction.step_times, Style.DIM), "Step times:")
    origin = "as recorded" if prediction.kv_blocks_recorded else "as set"
    blocks = say("{kv_blocks:n} blocks, {origin}.", prediction, origin=origin)
    yield Note(Styled(blocks, Style.DIM), "KV cache:")
    for folder in prediction.folders:
        yield Note(say("schedtrace analyze {folder:code}", folder=folder), "Next:")


def _changes(changes: list[SettingChange]) -> str:
    return ", ".join(f"{change.name} {change.recorded} -> {change.value}" for change in changes)


def _warnings(prediction: Prediction) -> Iterator[Message]:
    if _release(prediction.recorded_version) != _release(prediction.vllm_version):
        yield say("Recorded with vLLM {recorded_version}, whose scheduler may decide otherwise.", prediction)
    if prediction.outside_frac and prediction.outside_frac >= LARGE_FRAC:
        yield say(
            "{outside_frac:%} of the steps lie outside what was recorded: their times are extrapolated.",
            prediction,
        )
    if prediction.changes and prediction.trials < 2:  # noqa: PLR2004  # for a spread
        yield say(
            "One trial does not show how far trials differ[{given:!}, so no interval is given][{given:?}: "
            "intervals take how far its replay is off instead]: record {trials:setting}.",
            given=any(figure.low_frac is not None for figure in prediction.measured),
            trials="--trials 3",
        )


def _release(version: str) -> str:
    """Return the release without the build: the CPU build has the same scheduler."""
    return version.partition("+")[0]


def _table(heading: str, figures: list[Figure], prediction: Prediction) -> Table:
    fields: list[Field[Figure]] = [
        Field(heading, lambda row: f"{row.name} {row.unit}".strip()),
        figure("recorded", lambda row: number(row.recorded)),
        figure("replayed", lambda row: number(row.replayed)),
    ]
    if prediction.changes:
        fields.append(figure("with it", lambda row: number(row.changed)))
        fields.append(figure("change", lambda row: Styled(_change(row), _style(row))))
    return table([row for row in figures if row.recorded or row.replayed or row.changed], fields)


def _change(figure: Figure) -> str:
    change = percent(figure.change_frac, signed=True)
    if figure.low_frac is None or figure.high_frac is None:
        return change
    return f"{change} ({change_range(figure.low_frac, figure.high_frac)})"


def _style(figure: Figure) -> Style | None:
    if figure.higher_is_better is None or not figure.change_frac:
        return None
    low, high = figure.low_frac, figure.high_frac
    if low is not None and high is not None and low < 0 < high:
        return Style.DIM
    return Style.GOOD if (figure.change_frac > 0) == figure.higher_is_better else Style.BAD


WORSE_FRAC = 0.02
"""A figure that gets worse by less is no cost."""


def proposals_page(proposals: Proposals) -> Page[Proposals]:
    """Return what ``advise`` found."""
    return Page(proposals, _proposal_sections)


def _proposal_sections(proposals: Proposals) -> Iterator[Section]:
    now = say(
        "As recorded (replayed): {bounds}; {goodput_requests_per_s:n2} requests/s meet {slo}.",
        proposals,
        bounds=_bounds(proposals.slo, proposals.bounds_ms),
        slo=", ".join(f"{_name(bound)} <= {phrase(given(bound.limit_ms))} ms" for bound in proposals.slo),
    )
    yield Headline(say("Advice for {label:code}", proposals), "", [now])
    if not proposals.proposals:
        tried = f"The objective is not met, and none of {proposals.tried} configurations is better."
        yield Note("The objective is met: nothing to change." if proposals.meets_slo else tried)
    for place, proposal in enumerate(proposals.proposals, 1):
        yield _proposal(place, proposal, proposals.slo)
    if proposals.commands:
        yield Commands("Try:", proposals.commands)
    replayed = f"{proposals.tried} configurations replayed with vLLM's scheduler. {proposals.step_times}"
    yield from (
        Note(Styled(note, Style.DIM)) for note in [say("{replayed}", replayed=replayed), *proposals.notes]
    )


def _proposal(place: int, proposal: Proposal, slo: list[Bound]) -> RootCauseSection:
    meets = "meets the objective" if proposal.meets_slo else "does not meet the objective"
    better, worse = (_figures(proposal.figures, worse=worse) for worse in (False, True))
    bounds = _bounds(slo, proposal.bounds_ms)
    outside = proposal.extrapolated_frac if (proposal.extrapolated_frac or 0) >= LARGE_FRAC else None
    paragraphs = [
        say("{bounds}; {goodput_requests_per_s:n2} requests/s meet it.", proposal, bounds=bounds),
        say("[Gains: {better}.]", better=better),
        say("Costs: {worse}.", worse=worse or "nothing that was measured"),
        say("[Removes: {codes}.]", codes=", ".join(proposal.removed)),
        say("[Brings: {codes}.]", codes=", ".join(proposal.appeared)),
        say("[{outside:%} of its steps lie outside what was recorded.]", outside=outside),
    ]
    style = Style.GOOD if proposal.meets_slo else Style.WARNING
    changes = say("{changes:code}", changes=_changes(proposal.changes))
    return RootCauseSection(
        place, Styled(changes, style), meets, [paragraph for paragraph in paragraphs if paragraph], []
    )


def _figures(figures: list[Figure], *, worse: bool) -> str:
    return ", ".join(
        f"{figure.name} {_change(figure)}"
        for figure in figures
        if figure.change_frac is not None
        and figure.higher_is_better is not None
        and abs(figure.change_frac) >= WORSE_FRAC
        and ((figure.change_frac > 0) != figure.higher_is_better) is worse
    )


def _bounds(slo: list[Bound], values: list[float | None]) -> str:
    parts = [f"{_name(bound)} {number(value)} ms" for bound, value in zip(slo, values, strict=True)]
    return ", ".join(parts)


def _name(bound: Bound) -> str:
    return f"{bound.latency.upper()} p{bound.percentile:g}"
