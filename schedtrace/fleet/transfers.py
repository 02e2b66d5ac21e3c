"""Requests whose KV cache goes from one engine to another: their part of the summary, and matching.

Each such request has a half on the prefill engine and one on the decode engine. Halves are matched by their
ids; their times bound the offset between the engines' clocks.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl

from schedtrace.diagnose.serving_metrics import request_latencies
from schedtrace.model.disaggregated import ClockBasis, SummaryTransfer, UnmatchedRequests
from schedtrace.model.fleet import EngineSummary
from schedtrace.timeline.timeline import Timeline

MOST_TRANSFERS = 20_000
"""Maximum number of requests in an engine's summary; if there are more, it contains a sample, for which all
engines choose the same requests."""
ONE_SIDED = ("kv_producer", "kv_consumer")
"""Roles of engines whose requests all cross to or from another engine."""
_PREFIX = re.compile(r"^(?:cmpl|chatcmpl|generate-tokens)-")
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
"""Pattern of the suffix that vLLM's front end adds to every request id."""


def transfer_key(transfer: SummaryTransfer) -> str:
    """Return the key that a request shares with its counterpart on the other engine.

    This is the transfer's id, or else the id on the prefill engine without the parts that each front end
    adds.
    """
    comes_from = transfer.remote_request_id if transfer.remote == "prefill" else None
    return transfer.transfer_id or _RANDOM.sub("", _PREFIX.sub("", comes_from or transfer.request_id))


def key_hash(transfer: SummaryTransfer) -> int:
    """Return a 62-bit number that depends only on the key."""
    digest = hashlib.blake2b(transfer_key(transfer).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> 2


def sampled_transfers(
    transfers: Sequence[SummaryTransfer], most: int = MOST_TRANSFERS
) -> tuple[list[SummaryTransfer], int | None]:
    """Return at most ``most`` requests, and the bound of their hashes (None if all are returned)."""
    if len(transfers) <= most:
        return list(transfers), None
    below = sorted(map(key_hash, transfers))[most]
    return [transfer for transfer in transfers if key_hash(transfer) < below], below


def engine_transfers(timeline: Timeline) -> list[SummaryTransfer]:
    """Return the requests that arrived at an engine and cross engines, in order of arrival.

    These are all requests of an engine that only prefills or only decodes. On any other engine, a request
    counts if its ``kv_transfer_params`` name another engine, if its KV cache was loaded, or if its blocks
    were kept after its end.
    """
    role = timeline.header.settings.get("kv_transfer_config.kv_role")
    is_begun = pl.col("event") == "begun"
    sends = timeline.kv_sends.group_by("request_id", maintain_order=True).agg(
        kept_us=pl.col("at_us").filter(is_begun).first(),
        sent_us=pl.col("at_us").filter(~is_begun).first(),
        kept_blocks=pl.col("blocks").filter(is_begun).first().list.sum(),
    )
    crosses = pl.lit(role in ONE_SIDED) | pl.col("remote").is_not_null()
    crosses |= pl.col("load_begun_us").is_not_null() | pl.col("kept_us").is_not_null()
    rows = (
        timeline.first_arrivals.select(
            *("request_id", "remote", "remote_request_id", "transfer_id"),
            arrived_us=pl.coalesce("arrived_us", "queued_us"),
        )
        .join(_loads(timeline), on="request_id", how="left", maintain_order="left")
        .join(sends, on="request_id", how="left", maintain_order="left")
        .filter(crosses)
    )
    if rows.is_empty():
        return []
    times = ["arrived_us", "scheduled_us", "first_token_us"]
    times += ["load_begun_us", "load_ended_us", "kept_us", "sent_us"]
    queued = timeline.queue_times.select("request_id", scheduled_us=pl.col("queued_us") + pl.col("queue_us"))
    first_tokens = request_latencies(timeline).select("request_id", "first_token_us").unique("request_id")
    first_steps = queued.unique("request_id").join(first_tokens, on="request_id", how="left")
    placed = (
        rows.join(first_steps, on="request_id", how="left", maintain_order="left")
        .with_columns(pl.col(times).cast(pl.Int64) - timeline.begin_us)
        .drop_nulls("arrived_us")
    )
    return [SummaryTransfer(**row) for row in placed.to_dicts()]


def _loads(timeline: Timeline) -> pl.DataFrame:
    """Return ``load_begun_us``, ``load_ended_us`` and ``load_blocks`` of each request's first load."""
    none: dict[str, Any] = {
        "request_id": pl.String,
        "event": pl.String,
        "at_us": pl.Int64,
        "blocks": pl.List(pl.Int64),
    }
    frame = timeline.lists.get("kv_loads", pl.LazyFrame(schema=none))
    loads = frame.select(*none).collect()
    begun = loads.filter(pl.col("event") == "begun").group_by("request_id", maintain_order=True)
    over = loads.filter(pl.col("event") != "begun").group_by("request_id", maintain_order=True)
    return begun.agg(
        load_begun_us=pl.col("at_us").first(), load_blocks=pl.col("blocks").first().list.sum()
    ).join(over.agg(load_ended_us=pl.col("at_us").first()), on="request_id", how="left")


def transfer_fields(timeline: Timeline) -> dict[str, Any]:
    """Return the fields of a summary that are about transfers."""
    transfers, below = sampled_transfers(engine_transfers(timeline))
    begin_us = timeline.header.monotonic_anchor_us
    return {
        "transfers": transfers,
        "transfers_below": below,
        "monotonic_begin_us": None if begin_us is None else begin_us + timeline.begin_us,
    }


Reason = Literal["no_prefill", "no_decode", "ambiguous", "incomplete"]
REASONS: tuple[Reason, ...] = ("no_prefill", "no_decode", "ambiguous", "incomplete")
Key = Literal["remote_request_id", "transfer_id", "request_id"]


@dataclass(frozen=True)
class Half:
    """Request on one of its two engines."""

    engine: str
    role: str
    """Role of the engine (``kv_role``)."""
    row: SummaryTransfer

    @property
    def decodes(self) -> bool:
        """Whether the engine decodes the request, whose KV cache comes from elsewhere."""
        if self.row.remote is not None:
            return self.row.remote == "prefill"
        loads = self.row.load_begun_us is not None
        return self.role == "kv_consumer" or (loads and self.role != "kv_producer")

    @property
    def crosses(self) -> bool:
        """Whether the other half is certainly on another engine, not in a store of KV blocks."""
        return self.row.remote is not None or self.role in ONE_SIDED


@dataclass(frozen=True)
class MatchedRequest:
    """Request with both of its halves."""

    prefill: Half
    decode: Half
    key: Key
    """Key by which the two halves were matched."""

    @property
    def in_order(self) -> bool:
        """Whether the decode engine gets the request only after its prefill, which gives it the id."""
        return self.key == "remote_request_id"

    @property
    def is_complete(self) -> bool:
        """Whether all times are recorded."""
        prefill, decode = self.prefill.row, self.decode.row
        times = (prefill.scheduled_us, prefill.first_token_us, decode.scheduled_us, decode.first_token_us)
        loaded = decode.load_ended_us is not None or decode.load_begun_us is None
        return loaded and None not in times


@dataclass
class MatchedFleet:
    """Matched requests of a fleet, and those that could not be matched."""

    requests: list[MatchedRequest] = field(default_factory=list)
    unmatched: dict[Reason, list[Half]] = field(default_factory=lambda: defaultdict(list))
    below: int | None = None
    """Bound of the hashes in a sample; None if all requests are included."""

    def unmatched_requests(self) -> list[UnmatchedRequests]:
        """Return the requests that are in no figure, with the reason."""
        incomplete = [request.decode for request in self.requests if not request.is_complete]
        by_reason = {**self.unmatched, "incomplete": incomplete}
        return [
            UnmatchedRequests(
                reason=reason, requests=len(by_reason[reason]), example=by_reason[reason][0].row.request_id
            )
            for reason in REASONS
            if by_reason.get(reason)
        ]


def match_requests(engines: Mapping[str, EngineSummary]) -> MatchedFleet:
    """Match the requests that one engine prefills and another decodes.

    A decode request is matched by its transfer's id or, if it has none, by its id on the prefill engine. If
    that is not recorded either, request ids are compared without prefix and random suffix. If several
    requests fit, none is matched. Children of one request may share their prefill, unless only request ids
    match.
    """
    fleet = MatchedFleet()
    bounds = [each.transfers_below for each in engines.values() if each.transfers_below is not None]
    fleet.below = min(bounds, default=None)
    prefills, decodes = defaultdict(list), []
    for name, summary in engines.items():
        for row in summary.transfers:
            if fleet.below is not None and key_hash(row) >= fleet.below:
                continue
            half = Half(name, summary.role, row)
            if half.decodes:
                decodes.append(half)
            else:
                prefills[transfer_key(row)].append(half)
    used: set[int] = set()
    for half in decodes:
        candidates, key = _candidates(half, prefills.get(transfer_key(half.row), ()))
        used.update(map(id, candidates))
        if len(candidates) == 1:
            fleet.requests.append(MatchedRequest(candidates[0], half, key))
        elif half.crosses:
            fleet.unmatched["ambiguous" if candidates else "no_prefill"].append(half)
    alone = [half for halves in prefills.values() for half in halves if id(half) not in used and half.crosses]
    if alone:
        fleet.unmatched["no_decode"] = alone
    # Of requests of decode engines that share one prefill by its id, none is taken.
    uses = Counter(id(request.prefill) for request in fleet.requests if request.key == "request_id")
    shared = [request for request in fleet.requests if uses[id(request.prefill)] > 1]
    if shared:
        fleet.unmatched["ambiguous"] += [request.decode for request in shared]
        fleet.requests = [request for request in fleet.requests if uses[id(request.prefill)] <= 1]
    return fleet


def _candidates(decode: Half, prefills: Sequence[Half]) -> tuple[list[Half], Key]:
    """Return the prefill halves that may belong to a decode half, and the kind of id that they share."""
    elsewhere = [half for half in prefills if half.engine != decode.engine]
    row = decode.row
    if row.transfer_id is not None:
        return elsewhere, "transfer_id"
    named = [half for half in elsewhere if half.row.request_id == row.remote_request_id]
    if row.remote_request_id is not None:
        return named, "remote_request_id"
    same = [half for half in elsewhere if half.row.request_id == row.request_id]
    return same or elsewhere, "request_id"


@dataclass(frozen=True)
class ClockOffset:
    """Relation between the clocks of a prefill engine and a decode engine."""

    shift_us: int
    """Number to add to a time of the decode engine to convert it to the prefill engine's clock, if the
    recorded clocks are right."""
    basis: ClockBasis
    least_us: float | None
    """Lower bound of the time by which the decode engine's clock is ahead; None if unknown."""
    most_us: float | None
    """Upper bound of the time by which the decode engine's clock is ahead; None if unknown."""
    out_of_order: int = 0
    """Number of requests whose times contradict the order of events."""

    @property
    def middle_us(self) -> float | None:
        """Middle of both bounds; None if a bound is missing."""
        if self.least_us is None or self.most_us is None:
            return None
        return (self.least_us + self.most_us) / 2

    @property
    def half_us(self) -> float:
        """Maximum error of ``middle_us``; 0 if a bound is missing."""
        if self.least_us is None or self.most_us is None:
            return 0.0
        return (self.most_us - self.least_us) / 2


def clock_offset(
    prefill: EngineSummary, decode: EngineSummary, requests: Sequence[MatchedRequest]
) -> ClockOffset:
    """Return the relation between two engines' clocks.

    On different machines, the offset is bounded by the recorded errors of both clocks and by the order of
    events.
    """
    if prefill.clock == decode.clock == "virtual":
        return ClockOffset(decode.begin_unix_us - prefill.begin_unix_us, "same", 0.0, 0.0)
    begins = (prefill.monotonic_begin_us, decode.monotonic_begin_us)
    if prefill.clock_id is not None and prefill.clock_id == decode.clock_id and None not in begins:
        return ClockOffset((begins[1] or 0) - (begins[0] or 0), "same", 0.0, 0.0)
    shift_us = decode.begin_unix_us - prefill.begin_unix_us
    errors = (prefill.clock_error_us, decode.clock_error_us)
    error_us = None if None in errors else float(sum(error or 0 for error in errors))
    upper = [most + shift_us for request in requests for most in _upper_bounds(request)]
    lower = [least + shift_us for request in requests for least in _lower_bounds(request)]
    allowed_us = error_us or 0.0
    out_of_order = sum(bound < -allowed_us for bound in upper) + sum(bound > allowed_us for bound in lower)
    least: float | None = max(lower, default=None)
    most: float | None = min(upper, default=None)
    if least is not None and most is not None and least > most:
        return ClockOffset(shift_us, "contradictory", None, None, out_of_order)
    if error_us is None or out_of_order:
        basis: ClockBasis = "unknown" if least is None and most is None else "events"
        return ClockOffset(shift_us, basis, least, most, out_of_order)
    least = -error_us if least is None else max(least, -error_us)
    most = error_us if most is None else min(most, error_us)
    return ClockOffset(shift_us, "recorded", least, most)


def _upper_bounds(request: MatchedRequest) -> Iterator[int]:
    """Yield upper bounds on the clock offset.

    Each is the decode engine's time of an event minus the prefill engine's time of an earlier event.
    """
    prefill, decode = request.prefill.row, request.decode.row
    if request.in_order and prefill.first_token_us is not None:
        yield decode.arrived_us - prefill.first_token_us
    elif decode.load_ended_us is not None and prefill.scheduled_us is not None:
        yield decode.load_ended_us - prefill.scheduled_us


def _lower_bounds(request: MatchedRequest) -> Iterator[int]:
    """Yield lower bounds on the clock offset: decode times of events minus prefill times of later events."""
    prefill, decode = request.prefill.row, request.decode.row
    if decode.load_begun_us is not None and decode.load_ended_us is not None and prefill.sent_us is not None:
        yield decode.load_begun_us - prefill.sent_us
