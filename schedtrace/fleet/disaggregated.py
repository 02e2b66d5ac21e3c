"""Time to first token, and held blocks, of requests that one engine prefills and another decodes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

import polars as pl

from schedtrace.diagnose.serving_metrics import distribution, single
from schedtrace.fleet.transfers import ClockOffset, MatchedFleet, MatchedRequest, clock_offset, match_requests
from schedtrace.model.disaggregated import (
    Disaggregated,
    HeldBlocks,
    SummaryTransfer,
    TransferPair,
    TransferPart,
    TransferPartName,
)
from schedtrace.model.fleet import EngineSummary
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.say import say
from schedtrace.model.statistics import Distribution

PARTS: tuple[TransferPartName, ...] = get_args(TransferPartName)
ON_DECODE: tuple[TransferPartName, ...] = ("decode_queue", "transfer", "decode_requeue", "first_step")
PART_WORDS: dict[TransferPartName, str] = {
    "prefill_queue": "waiting in the queue of the prefill engine",
    "prefill": "prefill",
    "handover": "the way from the prefill to the decode engine (router)",
    "decode_queue": "waiting in the queue of the decode engine before the transfer",
    "transfer": "the KV transfer",
    "decode_requeue": "waiting in the queue of the decode engine after the transfer",
    "first_step": "the first step on the decode engine",
}
HELD_WORDS: dict[TransferPartName, str] = {
    "handover": "on the way to {other_engine:code}",
    "decode_queue": "in the queue of {other_engine:code}",
    "transfer": "in the transfer to {other_engine:code}",
}
MOSTLY_FRAC = 0.5
"""Share of a part's total from which a pair of engines is named together with the part."""


@dataclass(frozen=True)
class PlacedRequest:
    """Matched request with the parts of its time to first token, in microseconds."""

    request: MatchedRequest
    parts: Mapping[TransferPartName, float | None]
    """Length of each part; None if unknown."""
    uncertain: Mapping[TransferPartName, float]
    """Maximum error of each length, from the clocks; 0 if absent."""

    @property
    def known_us(self) -> float:
        """Sum of the known parts."""
        return sum(us for us in self.parts.values() if us is not None)


def disaggregated(engines: Mapping[str, EngineSummary]) -> Disaggregated | None:
    """Return the report's part about requests that cross engines; None if no request does."""
    fleet = match_requests(engines)
    left_out = fleet.unmatched_requests()
    if not fleet.requests and not left_out:
        return None
    by_pair: dict[tuple[str, str], list[MatchedRequest]] = defaultdict(list)
    for request in fleet.requests:
        by_pair[request.prefill.engine, request.decode.engine].append(request)
    offsets = {
        (prefill, decode): clock_offset(engines[prefill], engines[decode], requests)
        for (prefill, decode), requests in by_pair.items()
    }
    placed = [
        place_request(request, offsets[request.prefill.engine, request.decode.engine])
        for request in fleet.requests
        if request.is_complete
    ]
    leading = _leading(placed)
    keys = [each.request.key for each in placed]
    pairs = sorted(_pairs(placed, offsets), key=lambda pair: -pair.mean_ms * pair.requests)
    held = _held(engines, fleet, offsets) if fleet.below is None else ()
    return Disaggregated(
        matched=len(placed),
        by_remote_id=keys.count("remote_request_id"),
        by_transfer_id=keys.count("transfer_id"),
        by_request_id=keys.count("request_id"),
        without_transfer=sum(each.request.decode.row.load_begun_us is None for each in placed),
        unmatched=left_out,
        sampled=fleet.below is not None,
        leading=leading,
        verdict=NOTHING if leading is None else _verdict(placed, leading),
        parts=[_part(name, placed) for name in PARTS] if placed else [],
        total=_distribution([each.known_us for each in placed if each.parts["handover"] is not None]),
        pairs=pairs,
        held=sorted(held, key=lambda each: -each.blocks / (each.blocks_total or each.blocks)),
    )


def place_request(request: MatchedRequest, offset: ClockOffset) -> PlacedRequest:
    """Divide a complete request's time to first token into its parts.

    Parts within one engine are exact. The handover needs both clocks. If the decode engine may get a request
    before the prefill is done, the request's time on the decode engine until then does not count, because the
    prefill engine's parts cover it. The length of that time depends on both clocks, too.
    """
    prefill, decode = request.prefill.row, request.decode.row
    scheduled, output = prefill.scheduled_us or 0, prefill.first_token_us or 0
    parts: dict[TransferPartName, float | None] = {
        "prefill_queue": max(0, scheduled - prefill.arrived_us),
        "prefill": output - scheduled,
        "handover": None,
    }
    uncertain: dict[TransferPartName, float] = {}
    begin: float = decode.arrived_us
    if (ahead_us := offset.middle_us) is not None:
        output_there = output - offset.shift_us + ahead_us
        parts["handover"] = max(0.0, begin - output_there)
        uncertain["handover"] = offset.half_us
        if not request.in_order and output_there + offset.half_us > begin:
            begin = max(begin, output_there)
            uncertain |= dict.fromkeys(("decode_queue", "transfer"), offset.half_us)
    names, moments = ON_DECODE, [begin, decode.scheduled_us or 0, decode.first_token_us or 0]
    if decode.load_begun_us is None or decode.load_ended_us is None:
        names = ("decode_queue", "first_step")
    else:
        moments[1:1] = [decode.load_begun_us, decode.load_ended_us]
    lengths = [end - start for start, end in pairwise(accumulate(moments, max))]  # none below 0
    parts |= {**dict.fromkeys(ON_DECODE), **dict(zip(names, lengths, strict=True))}
    if ahead_us is None and not request.in_order:
        parts["decode_queue"] = parts["transfer"] = None
    return PlacedRequest(request, parts, uncertain)


def _total(placed: Sequence[PlacedRequest], part: TransferPartName) -> float:
    return sum(each.parts[part] or 0.0 for each in placed)


def _leading(placed: Sequence[PlacedRequest]) -> TransferPartName | None:
    """Return the part with the largest total; None if the clocks' errors leave open which it is."""
    if not placed:
        return None
    totals = {part: _total(placed, part) for part in PARTS}
    errors = {part: sum(each.uncertain.get(part, 0.0) for each in placed) for part in PARTS}
    leading = max(PARTS, key=totals.__getitem__)
    least = totals[leading] - errors[leading]
    is_clear = all(totals[part] + errors[part] < least for part in PARTS if part != leading)
    return leading if is_clear else None


def _part(part: TransferPartName, placed: Sequence[PlacedRequest]) -> TransferPart:
    values = [us for each in placed if (us := each.parts[part]) is not None]
    whole = sum(each.known_us for each in placed)
    return TransferPart(
        part=part,
        share_frac=sum(values) / whole if values and whole else None,
        uncertain_ms=max(each.uncertain.get(part, 0.0) for each in placed) / 1e3,
        times=_distribution(values),
    )


def _distribution(values: Sequence[float]) -> Distribution | None:
    return distribution(single(pl.DataFrame({"us": values}, schema={"us": pl.Float64}), pl.col("us")))


def _pairs(
    placed: Sequence[PlacedRequest], offsets: Mapping[tuple[str, str], ClockOffset]
) -> Iterator[TransferPair]:
    by_pair: dict[tuple[str, str], list[PlacedRequest]] = defaultdict(list)
    for each in placed:
        by_pair[each.request.prefill.engine, each.request.decode.engine].append(each)
    for (prefill, decode), requests in by_pair.items():
        offset = offsets[prefill, decode]
        whole = sum(each.known_us for each in requests)
        leading = max(PARTS, key=lambda part: _total(requests, part))
        yield TransferPair(
            prefill=prefill,
            decode=decode,
            requests=len(requests),
            mean_ms=whole / len(requests) / 1e3,
            leading=leading,
            leading_frac=_total(requests, leading) / whole if whole else 0.0,
            clock=offset.basis,
            ahead_least_ms=None if offset.least_us is None else offset.least_us / 1e3,
            ahead_most_ms=None if offset.most_us is None else offset.most_us / 1e3,
            out_of_order=offset.out_of_order,
        )


def _verdict(placed: Sequence[PlacedRequest], leading: TransferPartName) -> Message:
    """Return the sentence about the part that takes most of the time."""
    by_pair: dict[tuple[str, str], float] = defaultdict(float)
    for each in placed:
        by_pair[each.request.prefill.engine, each.request.decode.engine] += each.parts[leading] or 0.0
    prefill, decode = max(by_pair, key=by_pair.__getitem__)
    total, whole = _total(placed, leading), sum(each.known_us for each in placed)
    is_most = len(by_pair) > 1 and by_pair[prefill, decode] >= MOSTLY_FRAC * total
    return say(
        "{share:%} of the time to first token of {matched:n request} across prefill and decode engines is "
        "{what}[, most of it between {prefill:code} and {decode:code}][{unknown:?}; the handover between the "
        "engines is not known and not in this share].",
        share=total / whole if whole else 0.0,
        matched=len(placed),
        what=PART_WORDS[leading],
        prefill=prefill if is_most else "",
        decode=decode if is_most else "",
        unknown=any(each.parts["handover"] is None for each in placed),
    )


@dataclass(frozen=True)
class _Holder:
    """Request that holds blocks for a transfer."""

    row: SummaryTransfer
    begin_us: int
    end_us: int
    blocks: int


def _held(
    engines: Mapping[str, EngineSummary],
    fleet: MatchedFleet,
    offsets: Mapping[tuple[str, str], ClockOffset],
) -> Iterator[HeldBlocks]:
    """Yield the most blocks that transfers hold at once on each engine, by the engine at the other end."""
    of_prefill = {id(request.prefill.row): request for request in fleet.requests}
    of_decode = {id(request.decode.row): request for request in fleet.requests}
    for name, summary in engines.items():
        end_us = summary.length_us
        # Finished requests keep their blocks until they are sent, as far as the trace shows.
        finished = [
            _Holder(row, row.kept_us, end_us if row.sent_us is None else row.sent_us, row.kept_blocks)
            for row in summary.transfers
            if row.kept_us is not None and row.kept_blocks and row.remote != "prefill"
        ]
        by_other: dict[str, list[_Holder]] = defaultdict(list)
        for holder in _at_peak(finished):
            request = of_prefill.get(id(holder.row))
            by_other["" if request is None else request.decode.engine].append(holder)
        for other_engine, holders in by_other.items():
            requests = [of_prefill[id(holder.row)] for holder in holders] if other_engine else []
            waits_for = _waits_for(requests, offsets.get((name, other_engine)))
            yield _held_blocks(name, summary, other_engine, holders, "prefill", waits_for)
        loading = [
            _Holder(
                row,
                row.load_begun_us,
                end_us if row.load_ended_us is None else row.load_ended_us,
                row.load_blocks,
            )
            for row in summary.transfers
            if row.load_begun_us is not None and row.load_blocks and id(row) in of_decode
        ]
        by_other = defaultdict(list)
        for holder in _at_peak(loading):
            by_other[of_decode[id(holder.row)].prefill.engine].append(holder)
        for other_engine, holders in by_other.items():
            yield _held_blocks(name, summary, other_engine, holders, "decode", "transfer")


def _at_peak(holders: Sequence[_Holder]) -> list[_Holder]:
    """Return the holders at the first moment at which they hold the most blocks together."""
    begins = [(each.begin_us, each.blocks) for each in holders]
    ends = [(each.end_us, -each.blocks) for each in holders]
    peak_us, most, blocks = 0, 0, 0
    for at_us, change in sorted(begins + ends):  # at one time, ends first
        blocks += change
        if blocks > most:
            peak_us, most = at_us, blocks
    return [each for each in holders if each.begin_us <= peak_us < each.end_us]


def _waits_for(requests: Sequence[MatchedRequest], offset: ClockOffset | None) -> TransferPartName | None:
    """Return the part in which requests spent most of the time from their prefill to the transfer's end."""
    totals: dict[TransferPartName, float] = defaultdict(float)
    for request in requests if offset is not None else ():
        if offset is not None and request.is_complete:
            parts = place_request(request, offset).parts
            for part in HELD_WORDS:
                totals[part] += parts[part] or 0.0
    return max(totals, key=totals.__getitem__, default=None)


KEPT = (
    "{blocks} of {engine:code} were held at once by {requests:n finished request}[ that {other_engine:code} "
    "had not fetched][{unknown:?} whose decode engine is not known][; most of that time passed {state}]."
)
"""Sentence about blocks that finished requests of a prefill engine keep for one decode engine."""
LOADING = (
    "{blocks} of {engine:code} were held at once by {requests:n request} whose KV cache was on its way from "
    "{other_engine:code}."
)
"""Sentence about blocks that a decode engine's requests hold while another engine sends their KV cache."""


def _held_blocks(
    engine: str,
    summary: EngineSummary,
    other_engine: str,
    holders: Sequence[_Holder],
    side: Literal["prefill", "decode"],
    waits_for: TransferPartName | None,
) -> HeldBlocks:
    blocks, total = sum(holder.blocks for holder in holders), summary.kv_blocks
    count = say("{blocks:n block}", blocks=blocks)
    if total is not None:
        count = say("{blocks:n} of {total:n block}", blocks=blocks, total=total)
    own: dict[str, Any] = {}
    if side == "prefill":
        state = NOTHING if waits_for is None else say(HELD_WORDS[waits_for], other_engine=other_engine)
        own = {"unknown": not other_engine, "state": state}
    return HeldBlocks(
        engine=engine,
        side=side,
        other_engine=other_engine,
        requests=len(holders),
        blocks=blocks,
        blocks_total=total,
        waits_for=waits_for,
        message=say(
            KEPT if side == "prefill" else LOADING,
            blocks=count,
            engine=engine,
            requests=len(holders),
            other_engine=other_engine,
            **own,
        ),
    )
