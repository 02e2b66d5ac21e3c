"""Proposed configurations: what each would do to the objective, what it costs, and how to try it."""

from collections.abc import Iterator

from schedtrace.model.message import Code, Message, Number, Share, given, joined, message
from schedtrace.model.prediction import Figure
from schedtrace.model.proposals import Proposal, Proposals
from schedtrace.model.sweep import Bound
from schedtrace.present.numbers import change_range, number, percent
from schedtrace.present.phrases import phrase
from schedtrace.present.sections import (
    Cause,
    Commands,
    Content,
    Headline,
    Note,
    Page,
    Section,
    Style,
    Styled,
    Text,
)

WORSE_FRAC = 0.02
"""A figure that gets worse by less is no cost."""
LARGE_FRAC = 0.2
"""Share of extrapolated steps that is said."""


def proposals_page(proposals: Proposals) -> Page[Proposals]:
    """What ``advise`` found."""
    return Page(proposals, _sections)


def _sections(proposals: Proposals) -> Iterator[Section]:
    now = message(
        "As recorded (replayed): {bounds}; {goodput} requests/s meet {slo}.",
        bounds=_bounds(proposals.slo, proposals.bounds_ms),
        goodput=Number(proposals.goodput_requests_per_s, 2),
        slo=_slo(proposals.slo),
    )
    yield Headline(message("Advice for {label}", label=Code(proposals.label)), "", [now])
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
        message(
            "{bounds}; {goodput} requests/s meet it.",
            bounds=_bounds(slo, proposal.bounds_ms),
            goodput=Number(proposal.goodput_requests_per_s, 2),
        )
    ]
    better, worse = (_figures(proposal.figures, worse=worse) for worse in (False, True))
    if better:
        paragraphs.append(message("Gains: {figures}.", figures=better))
    paragraphs.append(
        message("Costs: {figures}.", figures=worse) if worse else "Costs: nothing that was measured."
    )
    for word, codes in (("Removes", proposal.removed), ("Brings", proposal.appeared)):
        if codes:
            paragraphs.append(f"{word}: {', '.join(codes)}.")
    if proposal.extrapolated_frac and proposal.extrapolated_frac >= LARGE_FRAC:
        share = Share(proposal.extrapolated_frac)
        paragraphs.append(message("{share} of its steps lie outside what was recorded.", share=share))
    style = Style.GOOD if proposal.meets_slo else Style.WARNING
    return Cause(place, Styled(message("{changes}", changes=Code(changes)), style), meets, paragraphs, [])


def _figures(figures: list[Figure], *, worse: bool) -> Message:
    shown = [
        f"{figure.name} {percent(figure.change_frac, signed=True)}{_interval(figure)}"
        for figure in figures
        if figure.change_frac is not None
        and figure.higher_is_better is not None
        and abs(figure.change_frac) >= WORSE_FRAC
        and ((figure.change_frac > 0) != figure.higher_is_better) is worse
    ]
    return joined([message("{figure}", figure=one) for one in shown], ", ")


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
