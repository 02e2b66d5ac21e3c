"""A replay: what it rests on, what scheduling would decide, what would follow in time."""

from collections.abc import Iterator

from schedtrace.model.message import Code, Count, Message, Setting, Share, message
from schedtrace.model.prediction import Figure, Prediction
from schedtrace.present.numbers import change_range, number, percent
from schedtrace.present.sections import (
    Cell,
    Column,
    Content,
    Headline,
    Note,
    Page,
    Section,
    Style,
    Styled,
    Table,
)

LARGE_FRAC = 0.2
"""Share of extrapolated steps that is said as a warning."""


def prediction_page(prediction: Prediction) -> Page[Prediction]:
    """A prediction."""
    return Page(prediction, _sections)


def _sections(prediction: Prediction) -> Iterator[Section]:
    lines: list[Content] = [
        message(
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
        yield Note(message("schedtrace analyze {folder}", folder=Code(folder)), "Next:")


def _title(prediction: Prediction) -> Message:
    load = message(
        "{label}: {requests}", label=Code(prediction.label), requests=Count(prediction.requests, "request")
    )
    if not prediction.changes:
        return message("Replay of {load}, as recorded", load=load)
    changes = ", ".join(f"{change.name} {change.recorded} -> {change.value}" for change in prediction.changes)
    return message("Replay of {load}, with {changes}", load=load, changes=Code(changes))


def _same(prediction: Prediction) -> Message:
    return message(
        "{same} of {steps} steps have the same requests with the same tokens as recorded.",
        same=number(prediction.same_steps),
        steps=number(prediction.compared_steps),
    )


def _warnings(prediction: Prediction) -> Iterator[Message]:
    if _release(prediction.recorded_version) != _release(prediction.vllm_version):
        yield message(
            "Recorded with vLLM {version}, whose scheduler may decide otherwise.",
            version=prediction.recorded_version,
        )
    if prediction.outside_frac and prediction.outside_frac >= LARGE_FRAC:
        yield message(
            "{share} of the steps lie outside what was recorded: their times are extrapolated.",
            share=Share(prediction.outside_frac),
        )
    if prediction.changes and prediction.trials < 2:  # noqa: PLR2004  # for a spread
        yield message(
            "One trial does not show how far trials differ, so no interval is given: record {trials}.",
            trials=Setting("--trials 3"),
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
