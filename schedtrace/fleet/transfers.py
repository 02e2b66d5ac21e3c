"""Requests of one engine whose KV cache goes to another engine or comes from one, for its summary."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import polars as pl

from schedtrace.diagnose.latencies import request_latencies
from schedtrace.model.disaggregated import SummaryTransfer
from schedtrace.timeline.timeline import Timeline

MOST_TRANSFERS = 20_000
"""Most requests of an engine in its summary; of more, a sample that is the same on all engines."""
ONE_SIDED = ("kv_producer", "kv_consumer")
"""Roles of engines all of whose requests cross engines."""
_PREFIX = re.compile(r"^(?:cmpl|chatcmpl|generate-tokens)-")
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
"""Suffix that vLLM's front end adds to every request id."""


def transfer_key(transfer: SummaryTransfer) -> str:
    """Return what a request has in common with the same one on the other engine.

    This is the transfer's id, or else the id on the prefill engine without what each front end adds.
    """
    comes_from = transfer.remote_request_id if transfer.remote == "prefill" else None
    return transfer.transfer_id or _RANDOM.sub("", _PREFIX.sub("", comes_from or transfer.request_id))


def key_hash(transfer: SummaryTransfer) -> int:
    """Return a number of 62 bits that depends on the key alone."""
    digest = hashlib.blake2b(transfer_key(transfer).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> 2


def sampled_transfers(
    transfers: Sequence[SummaryTransfer], most: int = MOST_TRANSFERS
) -> tuple[list[SummaryTransfer], int | None]:
    """Return at most that many requests, and the bound of their hashes; None if all are returned."""
    if len(transfers) <= most:
        return list(transfers), None
    below = sorted(map(key_hash, transfers))[most]
    return [transfer for transfer in transfers if key_hash(transfer) < below], below


def engine_transfers(timeline: Timeline) -> list[SummaryTransfer]:
    """Return the requests that arrived at an engine and cross engines, in order of arrival.

    These are all requests of an engine that only prefills or only decodes. Elsewhere, a request counts if its
    ``kv_transfer_params`` say so, if its KV cache was loaded, or if its blocks were kept after its end.
    """
    role = timeline.header.settings.get("kv_transfer_config.kv_role")
    arrived = timeline.first_arrivals
    loads, sends = _loads(timeline), _sends(timeline)
    crosses = pl.lit(role in ONE_SIDED) | pl.col("remote").is_not_null()
    crosses |= pl.col("load_begun_us").is_not_null() | pl.col("kept_us").is_not_null()
    rows = (
        arrived.select(
            *("request_id", "remote", "remote_request_id", "transfer_id"),
            arrived_us=pl.coalesce("arrived_us", "queued_us"),
        )
        .join(loads, on="request_id", how="left", maintain_order="left")
        .join(sends, on="request_id", how="left", maintain_order="left")
        .filter(crosses)
    )
    if rows.is_empty():
        return []
    times = ["arrived_us", "scheduled_us", "first_token_us"]
    times += ["load_begun_us", "load_ended_us", "kept_us", "sent_us"]
    placed = (
        rows.join(_first_steps(timeline), on="request_id", how="left", maintain_order="left")
        .with_columns(pl.col(times).cast(pl.Int64) - timeline.begin_us)
        .drop_nulls("arrived_us")
    )
    return [SummaryTransfer(**row) for row in placed.to_dicts()]


def _first_steps(timeline: Timeline) -> pl.DataFrame:
    """Return one row per request: ``request_id``, ``scheduled_us`` (first step) and ``first_token_us``."""
    queued = timeline.queue_times.select("request_id", scheduled_us=pl.col("queued_us") + pl.col("queue_us"))
    first = request_latencies(timeline).select("request_id", "first_token_us").unique("request_id")
    return queued.unique("request_id").join(first, on="request_id", how="left")


def _loads(timeline: Timeline) -> pl.DataFrame:
    """Return ``request_id``, ``load_begun_us``, ``load_ended_us`` and ``load_blocks`` of first loads."""
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


def _sends(timeline: Timeline) -> pl.DataFrame:
    """Return ``request_id``, ``kept_us``, ``sent_us`` and ``kept_blocks``."""
    is_begun = pl.col("event") == "begun"
    return timeline.kv_sends.group_by("request_id", maintain_order=True).agg(
        kept_us=pl.col("at_us").filter(is_begun).first(),
        sent_us=pl.col("at_us").filter(~is_begun).first(),
        kept_blocks=pl.col("blocks").filter(is_begun).first().list.sum(),
    )


def transfer_fields(timeline: Timeline) -> dict[str, Any]:
    """Return the fields of a summary that are about transfers."""
    transfers, below = sampled_transfers(engine_transfers(timeline))
    begin_us = timeline.header.monotonic_anchor_us
    return {
        "transfers": transfers,
        "transfers_below": below,
        "monotonic_begin_us": None if begin_us is None else begin_us + timeline.begin_us,
    }
