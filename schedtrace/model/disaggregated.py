"""Requests that one engine prefills and another decodes: a part of the report of ``schedtrace fleet``."""

from typing import Literal

import msgspec

from schedtrace.model.message import NOTHING, Message
from schedtrace.model.statistics import Distribution

TransferPartName = Literal[
    "prefill_queue", "prefill", "handover", "decode_queue", "transfer", "decode_requeue", "first_step"
]
"""``prefill_queue``: from the arrival at the prefill engine to the first step that schedules the request.
``prefill``: from then to the output of its last chunk. ``handover``: from then to the arrival at the decode
engine. ``decode_queue``: from then until the transfer begins, or to the first step if none is recorded.
``transfer``: until the scheduler of the decode engine learns that the KV cache is there. ``decode_requeue``:
until the first step that schedules the request. ``first_step``: until the output with its first token.
"""
ClockBasis = Literal["same", "recorded", "events", "contradictory", "unknown"]
"""``same``: both engines read one clock. ``recorded``: the recorded errors of both clocks bound the offset,
and the order of events may narrow it. ``events``: the order of events alone bounds it, because no errors are
recorded or the order contradicts them. ``contradictory``: no offset fits all events. ``unknown``: nothing
bounds the offset.
"""


class SummaryTransfer(msgspec.Struct, kw_only=True):
    """Request of an engine with a KV connector; times count from the beginning of the engine's first step."""

    request_id: str
    """Id in the trace."""
    remote: str | None
    """Work that another engine does for the request: ``prefill`` or ``decode``; null: none, or not recorded.
    """
    remote_request_id: str | None
    """Id of the request on the other engine."""
    transfer_id: str | None
    """Id of the transfer, equal on both engines."""
    arrived_us: int
    """Time of arrival at the front end."""
    scheduled_us: int | None
    """Beginning of the first step that scheduled the request."""
    first_token_us: int | None
    """Time of the output with the request's first token."""
    load_begun_us: int | None
    """Time at which the load of the request's KV cache from elsewhere began."""
    load_ended_us: int | None
    """Time at which the load of the request's KV cache from elsewhere ended."""
    load_blocks: int | None
    """Number of KV blocks that the request holds during the load."""
    kept_us: int | None
    """Time at which the request ended; its KV blocks stay until they are sent."""
    sent_us: int | None
    """Time at which the last of the kept KV blocks was sent."""
    kept_blocks: int | None
    """Number of KV blocks that stay until they are sent."""


class TransferPart(msgspec.Struct, kw_only=True):
    """Part of the time to first token of matched requests."""

    part: TransferPartName
    """Name of the part."""
    share_frac: float | None
    """Share of the total of all parts that are known; null if this part is not known."""
    uncertain_ms: float
    """Largest possible error of one request's value, from the clocks of two hosts; 0: one clock."""
    times: Distribution | None
    """Distribution over the requests for which the part is known, in ms; null: no request."""


class TransferPair(msgspec.Struct, kw_only=True):
    """Prefill engine and decode engine that share requests."""

    prefill: str
    """Name of the prefill engine."""
    decode: str
    """Name of the decode engine."""
    requests: int
    """Number of matched requests with all times."""
    mean_ms: float
    """Mean sum of the known parts of a request, over the matched requests."""
    leading: TransferPartName
    """Part with the largest total."""
    leading_frac: float
    """Share of the leading part in the total of the known parts."""
    clock: ClockBasis
    """Relation of the two clocks."""
    ahead_least_ms: float | None
    """Smallest time by which the decode engine's clock is ahead of the prefill engine's; null: not bounded.
    """
    ahead_most_ms: float | None
    """Largest time by which the decode engine's clock is ahead of the prefill engine's; null: not bounded."""
    out_of_order: int
    """Number of requests whose recorded times contradict the order of events, such as an arrival at the
    decode engine before the prefill."""


class HeldBlocks(msgspec.Struct, kw_only=True):
    """KV blocks that transfers hold on one engine, at the moment when they hold the most."""

    engine: str
    """Engine whose blocks are held."""
    side: Literal["prefill", "decode"]
    """``prefill``: finished requests keep them until they are sent. ``decode``: requests hold them while
    their KV cache is on its way."""
    other_engine: str
    """Engine on the other side; empty if its trace is not among the inputs."""
    requests: int
    """Number of requests whose blocks transfers hold."""
    blocks: int
    """Number of KV blocks that transfers hold."""
    blocks_total: int | None
    """Number of KV blocks of the engine."""
    waits_for: TransferPartName | None
    """Part in which these requests spent most of the time while they held blocks; null: not known."""
    message: Message
    """Sentence with these figures."""


UnmatchedReason = Literal["no_prefill", "no_decode", "ambiguous", "incomplete"]


class UnmatchedRequests(msgspec.Struct, kw_only=True):
    """Requests of prefill or decode engines that no figure includes."""

    reason: UnmatchedReason
    """``no_prefill``: no engine among the inputs prefilled the request under this id. ``no_decode``: none
    decoded it. ``ambiguous``: several requests have its id. ``incomplete``: matched, but a time is missing,
    because the request was aborted, never got a token, or lies at the edge of a recording."""
    requests: int
    """Number of requests."""
    example: str
    """Id of the first unmatched request."""


class Disaggregated(msgspec.Struct, kw_only=True):
    """Time to first token of requests that one engine prefills and another decodes."""

    matched: int
    """Number of requests that were matched across two engines and whose times are all recorded."""
    by_remote_id: int
    """Number of requests that were matched by the id on the other engine in ``kv_transfer_params``."""
    by_transfer_id: int
    """Number of requests that were matched by the transfer's id."""
    by_request_id: int
    """Number of requests that were matched by request ids without prefix and random suffix."""
    without_transfer: int
    """Number of matched requests without a recorded transfer: the whole prompt was cached, or the connector
    loads within the first step."""
    unmatched: list[UnmatchedRequests]
    """Requests that no figure includes, by reason."""
    sampled: bool
    """Whether the figures are from a sample of the requests, the same on all engines, because an engine has
    very many; ``held`` is then empty."""
    verdict: Message = NOTHING
    """Sentence about the part that takes most of the time; empty if the clocks' errors leave open which part
    does."""
    leading: TransferPartName | None = None
    """Part that the verdict names."""
    parts: list[TransferPart]
    """Parts in chronological order."""
    total: Distribution | None
    """Distribution of the sum of the parts, in ms, over requests whose parts are all known."""
    pairs: list[TransferPair]
    """Pairs of engines; those with the largest total time come first."""
    held: list[HeldBlocks]
    """Blocks that transfers hold; the largest share of an engine's blocks comes first."""
