"""Requests across prefill and decode engines: parts of the time to first token, clocks, and held blocks."""

from collections.abc import Iterator

from schedtrace.model.disaggregated import (
    Disaggregated,
    TransferPair,
    TransferPart,
    TransferPartName,
    UnmatchedRequests,
)
from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.printable import integer, number, percent
from schedtrace.model.say import say
from schedtrace.present.sections import (
    Field,
    Note,
    Part,
    Section,
    Shares,
    Style,
    Table,
    basis_note,
    figure_field,
    table,
)

MOST_PAIRS, MOST_HELD = 6, 3
HELD_FROM_FRAC = 0.1
"""Share of an engine's blocks from which those that transfers hold are shown."""
LABELS: dict[TransferPartName, tuple[str, Style]] = {
    "prefill_queue": ("queue at prefill", Style.WARNING),
    "prefill": ("prefill", Style.PREFILL),
    "handover": ("handover (router)", Style.INFO),
    "decode_queue": ("queue at decode, before", Style.WARNING),
    "transfer": ("KV transfer", Style.BAD),
    "decode_requeue": ("queue at decode, after", Style.WARNING),
    "first_step": ("first decode step", Style.DECODE),
}


def disaggregated_sections(across: Disaggregated) -> Iterator[Section]:
    """Yield the sections about requests across engines."""
    if across.parts:
        yield Shares(
            "Time to first token across prefill and decode engines",
            [
                Part(LABELS[part.part][0], part.share_frac, LABELS[part.part][1])
                for part in across.parts
                if part.share_frac is not None
            ],
        )
        yield _parts_table(across)
        yield _pairs_table(across.pairs)
    for held in _large_holders(across):
        yield Note(held, "Held blocks:")
    yield basis_note("Matched:", _matched(across))
    if clocks := _clocks(across.pairs):
        yield basis_note("Clocks of these engines:", clocks)


def _parts_table(across: Disaggregated) -> Table:
    fields: list[Field[TransferPart]] = [
        Field("time to first token, ms", lambda part: LABELS[part.part][0]),
        figure_field("requests", lambda part: integer(part.times.count if part.times else 0)),
        figure_field("mean", lambda part: number(part.times.mean if part.times else None)),
        figure_field("p50", lambda part: number(part.times.p50 if part.times else None)),
        figure_field("p90", lambda part: number(part.times.p90 if part.times else None)),
        figure_field("p99", lambda part: number(part.times.p99 if part.times else None)),
        figure_field("max", lambda part: number(part.times.max if part.times else None)),
        figure_field("clock\nerror", lambda part: number(part.uncertain_ms) if part.times else "not known"),
    ]
    return table(across.parts, fields)


def _pairs_table(pairs: list[TransferPair]) -> Table:
    fields: list[Field[TransferPair]] = [
        Field("prefill", lambda pair: pair.prefill),
        Field("decode", lambda pair: pair.decode),
        figure_field("requests", lambda pair: integer(pair.requests)),
        figure_field("mean ms", lambda pair: number(pair.mean_ms)),
        Field("most of it", lambda pair: f"{LABELS[pair.leading][0]} {percent(pair.leading_frac)}"),
        Field("clock ahead, ms", _ahead),
    ]
    return table(pairs, fields, most=MOST_PAIRS)


def _ahead(pair: TransferPair) -> str:
    """Return by how much the decode engine's clock is ahead: ``same``, a range, a bound, or unknown."""
    least, most = (number(bound) for bound in (pair.ahead_least_ms, pair.ahead_most_ms))
    if pair.clock == "same":
        return "same clock"
    if pair.ahead_least_ms is None:
        return "not known" if pair.ahead_most_ms is None else f"at most {most}"
    return f"at least {least}" if pair.ahead_most_ms is None else f"{least} to {most}"


def _large_holders(across: Disaggregated) -> list[Message]:
    large = [
        held
        for held in across.held
        if held.blocks_total is not None and held.blocks >= HELD_FROM_FRAC * held.blocks_total
    ]
    return [held.message for held in large[:MOST_HELD]]


def _matched(across: Disaggregated) -> Message:
    keys = [
        say("[{n:n} by the id on the prefill engine]", n=across.by_remote_id),
        say("[{n:n} by the transfer's id]", n=across.by_transfer_id),
        say("[{n:n} by the request's id]", n=across.by_request_id),
    ]
    how = joined([key for key in keys if key], ", ")
    left_out = joined([_left_out(each) for each in across.unmatched], "; ")
    return say(
        "{matched:n request}[: {how}][; {without_transfer:n} of them without a recorded transfer].[ Not in "
        "these figures: {left_out}.][{sampled:?} These are a sample: more requests than a summary holds.]",
        across,
        how=how,
        left_out=left_out,
    )


def _left_out(unmatched: UnmatchedRequests) -> Message:
    match unmatched.reason:
        case "no_prefill":
            return say("{requests:n request} without a prefill in these traces ({example:id})", unmatched)
        case "no_decode":
            return say("{requests:n request} without a decode in these traces ({example:id})", unmatched)
        case "ambiguous":
            return say("{requests:n request} whose id others share ({example:id})", unmatched)
        case _:
            return say("{requests:n request} for which a time is missing ({example:id})", unmatched)


def _clocks(pairs: list[TransferPair]) -> Message:
    """Return what is known of the clocks of engines on different hosts."""
    apart = [pair for pair in pairs if pair.clock != "same"]
    if not apart:
        return NOTHING
    wrong = [pair for pair in apart if pair.out_of_order]
    return say(
        "Only parts with a clock error compare times of two hosts.[ For {unknown:n pair} of engines they "
        "are not known, because nothing bounds the offset of their clocks.][ The clocks of "
        "{wrong:n pair} contradict the order of events[: {example}].]",
        unknown=sum(pair.ahead_least_ms is None or pair.ahead_most_ms is None for pair in apart),
        wrong=len(wrong),
        example=_offset_of(wrong[0]) if wrong else NOTHING,
    )


def _offset_of(pair: TransferPair) -> Message:
    """Return by how much at least two clocks differ, or nothing if no offset fits all events."""
    if pair.ahead_least_ms is not None and pair.ahead_least_ms > 0:
        least, direction = pair.ahead_least_ms, "ahead of"
    elif pair.ahead_most_ms is not None and pair.ahead_most_ms < 0:
        least, direction = -pair.ahead_most_ms, "behind"
    else:
        return NOTHING
    return say(
        "that of {decode:code} is at least {least:ms} {direction} that of {prefill:code}",
        pair,
        least=least,
        direction=direction,
    )
