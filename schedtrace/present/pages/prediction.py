"""A replay: what it rests on, what scheduling would decide, what would follow in time."""

from collections.abc import Iterator

from schedtrace.model.message import Message, Share, given, joined
from schedtrace.model.prediction import Figure, Prediction, Proposal, Proposals
from schedtrace.model.say import say
from schedtrace.model.sweep_result import Bound
from schedtrace.present.numbers import change_range, number, percent
from schedtrace.present.phrases import phrase
from schedtrace.present.sections import (
    Cause,
    Cell,
    Column,
    Commands,
    Content,
    Headline,
    Note,
    Page,
    Section,
    Style,
    Styled,
    Table,
    Text,
)

LARGE_FRAC = 0.2
"""Share of extrapolated steps that is said as a warning."""


def prediction_page(prediction: Prediction) -> Page[Prediction]:
    """A prediction."""
    return Page(prediction, _sections)


def _sections(prediction: Prediction) -> Iterator[Section]:
    lines: list[Content] = [
        say(
            "vLLM {version}'s own scheduler decides every step; only the step times are a model.",
            version=prediction.vllm_version,
        )
    ]
    yield Headline(_title(prediction), "", lines, list(_warnings(prediction)))
    if prediction.compared_steps:
        yield Note(_same(prediction), "Check:")
    headings = ["recorded", "replayed", *(["with it", "change"] if prediction.changes else [])]
    yield Table([Column("decided, a trial"), *_columns(headings)], _rows(prediction, prediction.decided))
    yield Table([Column("follows in time"), *_columns(headings)], _rows(prediction, prediction.measured))
    for note in prediction.notes:
        yield Note(Styled(note, Style.DIM))
    yield Note(Styled(prediction.step_times, Style.DIM), "Step times:")
    origin = "as recorded" if prediction.kv_blocks_recorded else "as set"
    yield Note(Styled(f"{number(prediction.kv_blocks)} blocks, {origin}.", Style.DIM), "KV cache:")
    for folder in prediction.folders:
        yield Note(say("schedtrace analyze {folder:code}", folder=folder), "Next:")


def _title(prediction: Prediction) -> Message:
    load = say("{label:code}: {requests:n request}", label=prediction.label, requests=prediction.requests)
    if not prediction.changes:
        return say("Replay of {load}, as recorded", load=load)
    changes = ", ".join(f"{change.name} {change.recorded} -> {change.value}" for change in prediction.changes)
    return say("Replay of {load}, with {changes:code}", load=load, changes=changes)


def _same(prediction: Prediction) -> Message:
    return say(
        "{same} of {steps} steps have the same requests with the same tokens as recorded.",
        same=number(prediction.same_steps),
        steps=number(prediction.compared_steps),
    )


def _warnings(prediction: Prediction) -> Iterator[Message]:
    if _release(prediction.recorded_version) != _release(prediction.vllm_version):
        yield say(
            "Recorded with vLLM {version}, whose scheduler may decide otherwise.",
            version=prediction.recorded_version,
        )
    if prediction.outside_frac and prediction.outside_frac >= LARGE_FRAC:
        yield say(
            "{share:%} of the steps lie outside what was recorded: their times are extrapolated.",
            share=prediction.outside_frac,
        )
    if prediction.changes and prediction.trials < 2:  # noqa: PLR2004  # for a spread
        yield say(
            "One trial does not show how far trials differ, so no interval is given: record "
            "{trials:setting}.",
            trials="--trials 3",
        )


def _release(version: str) -> str:
    """Without the build: that of the CPU has the same scheduler."""
    return version.partition("+")[0]


def _columns(headings: list[str]) -> list[Column]:
    return [Column(heading, numeric=True) for heading in headings]


def _rows(prediction: Prediction, figures: list[Figure]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for figure in figures:
        if not any((figure.recorded, figure.replayed, figure.changed)):
            continue
        row: list[Cell] = [
            f"{figure.name} {figure.unit}".strip(),
            number(figure.recorded),
            number(figure.replayed),
        ]
        if prediction.changes:
            row += [number(figure.changed), Styled(_change(figure), _style(figure))]
        rows.append(row)
    return rows


def _change(figure: Figure) -> str:
    change = percent(figure.change_frac, signed=True)
    if figure.low_frac is None or figure.high_frac is None:
        return change
    return f"{change} ({change_range(figure.low_frac, figure.high_frac)})"


def _style(figure: Figure) -> Style | None:
    if figure.higher_is_better is None or not figure.change_frac:
        return None
    if (
        figure.low_frac is not None
        and figure.high_frac is not None
        and figure.low_frac < 0 < figure.high_frac
    ):
        return Style.DIM
    return Style.GOOD if (figure.change_frac > 0) == figure.higher_is_better else Style.BAD


WORSE_FRAC = 0.02
"""A figure that gets worse by less is no cost."""
LARGE_CHANGE_FRAC = 0.2
"""Share of extrapolated steps that is said."""


def proposals_page(proposals: Proposals) -> Page[Proposals]:
    """What ``advise`` found."""
    return Page(proposals, _proposal_sections)


def _proposal_sections(proposals: Proposals) -> Iterator[Section]:
    now = say(
        "As recorded (replayed): {bounds}; {goodput:n2} requests/s meet {slo}.",
        bounds=_bounds(proposals.slo, proposals.bounds_ms),
        goodput=proposals.goodput_requests_per_s,
        slo=_slo(proposals.slo),
    )
    yield Headline(say("Advice for {label:code}", label=proposals.label), "", [now])
    if not proposals.proposals:
        tried = f"The objective is not met, and none of {proposals.tried} configurations is better."
        yield Note("The objective is met: nothing to change." if proposals.meets_slo else tried)
    for place, proposal in enumerate(proposals.proposals, 1):
        yield _proposal(place, proposal, proposals.slo)
    if proposals.commands:
        yield Commands("Try:", proposals.commands)
    yield Note(
        Styled(
            f"{proposals.tried} configurations replayed with vLLM's scheduler. {proposals.step_times}",
            Style.DIM,
        )
    )
    for note in proposals.notes:
        yield Note(Styled(note, Style.DIM))


def _proposal(place: int, proposal: Proposal, slo: list[Bound]) -> Cause:
    changes = ", ".join(f"{change.name} {change.recorded} -> {change.value}" for change in proposal.changes)
    meets = "meets the objective" if proposal.meets_slo else "does not meet the objective"
    paragraphs: list[Content] = [
        say(
            "{bounds}; {goodput:n2} requests/s meet it.",
            bounds=_bounds(slo, proposal.bounds_ms),
            goodput=proposal.goodput_requests_per_s,
        )
    ]
    better, worse = (_figures(proposal.figures, worse=worse) for worse in (False, True))
    if better:
        paragraphs.append(say("Gains: {figures}.", figures=better))
    paragraphs.append(
        say("Costs: {figures}.", figures=worse) if worse else "Costs: nothing that was measured."
    )
    for word, codes in (("Removes", proposal.removed), ("Brings", proposal.appeared)):
        if codes:
            paragraphs.append(f"{word}: {', '.join(codes)}.")
    if proposal.extrapolated_frac and proposal.extrapolated_frac >= LARGE_CHANGE_FRAC:
        share = Share(proposal.extrapolated_frac)
        paragraphs.append(say("{share} of its steps lie outside what was recorded.", share=share))
    style = Style.GOOD if proposal.meets_slo else Style.WARNING
    return Cause(place, Styled(say("{changes:code}", changes=changes), style), meets, paragraphs, [])


def _figures(figures: list[Figure], *, worse: bool) -> Message:
    shown = [
        f"{figure.name} {percent(figure.change_frac, signed=True)}{_interval(figure)}"
        for figure in figures
        if figure.change_frac is not None
        and figure.higher_is_better is not None
        and abs(figure.change_frac) >= WORSE_FRAC
        and ((figure.change_frac > 0) != figure.higher_is_better) is worse
    ]
    return joined([say("{figure}", figure=one) for one in shown], ", ")


def _interval(figure: Figure) -> str:
    if figure.low_frac is None or figure.high_frac is None:
        return ""
    return f" ({change_range(figure.low_frac, figure.high_frac)})"


def _bounds(slo: list[Bound], values: list[float | None]) -> Text:
    parts = [f"{_name(bound)} {number(value)} ms" for bound, value in zip(slo, values, strict=True)]
    return ", ".join(parts)


def _slo(slo: list[Bound]) -> str:
    return ", ".join(f"{_name(bound)} <= {phrase(given(bound.limit_ms))} ms" for bound in slo)


def _name(bound: Bound) -> str:
    return f"{bound.latency.upper()} p{bound.percentile:g}"
