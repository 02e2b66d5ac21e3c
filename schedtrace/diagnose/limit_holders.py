"""Who holds what requests wait for, for the limits that have no rule of their own."""

import polars as pl

from schedtrace.diagnose.waits import Charged, mean, steps_inside
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Code, Count, Duration, Message, Number, Request, Share, message
from schedtrace.timeline.timeline import Timeline


def holder_of(timeline: Timeline, cause: str, waits: Charged) -> Message:
    """A sentence about the holders; nothing where the trace does not tell them."""
    match cause:
        case Cause.LORA_CAP:
            return _adapters(timeline, waits)
        case Cause.GRAMMAR_PENDING:
            return _grammars(timeline)
        case Cause.MAMBA_ALIGNMENT | Cause.CHUNKED_PREFILL_OFF | Cause.PREFILL_LOOKAHEAD:
            return _budget(waits)
        case Cause.ENCODER_BUDGET:
            return _encoder(timeline, waits)
        case Cause.REMOTE_KV_PENDING:
            return _loads(timeline)
        case _:
            return NOTHING


def _adapters(timeline: Timeline, waits: Charged) -> Message:
    """The adapters of the requests that ran in these steps, and those waited for."""
    adapters = timeline.arrivals.select("request_id", "lora").unique("request_id", keep="first")
    wanted = waits.rows.join(adapters, on="request_id").group_by("lora").agg(pl.col("time_us").sum())
    wanted = wanted.drop_nulls().sort("time_us", "lora", descending=[True, False])
    ran = timeline.request_states.filter(pl.col("tokens") > 0).join(adapters.drop_nulls(), on="request_id")
    held = (
        ran.with_columns(steps=steps_inside(ran, waits.steps))
        .group_by("lora")
        .agg(pl.col("steps").sum(), requests=pl.col("request_id").n_unique())
        .filter(pl.col("steps") > 0)
        .sort("steps", "lora", descending=[True, False])
    )
    if held.is_empty() or wanted.is_empty():
        return NOTHING
    most = timeline.header.settings.get("lora_config.max_loras")
    return message(
        "Adapter {holder} ran the most meanwhile ({requests}){of}; {wanted} waited the longest.",
        holder=Code(str(held["lora"][0])),
        requests=Count(int(held["requests"][0]), "request"),
        of=message(", with {slots} for all", slots=Count(int(most), "slot")) if most else NOTHING,
        wanted=Code(str(wanted["lora"][0])),
    )


def _grammars(timeline: Timeline) -> Message:
    if "grammars" not in timeline.lists:
        return NOTHING
    took = (
        timeline.lists["grammars"]
        .select("request_id", us=pl.col("compiled_us") - pl.col("started_us"))
        .collect()
        .sort("us", descending=True)
    )
    if took.is_empty():
        return NOTHING
    return message(
        "{grammars} compiled, {request} the longest ({time}).",
        grammars=Count(took.height, "grammar"),
        request=Request(str(took["request_id"][0])),
        time=Duration(int(took["us"][0])),
    )


def _budget(waits: Charged) -> Message:
    """What the running requests left of the steps' budget."""
    left, decodes = mean(waits.steps, pl.col("remaining_budget")), mean(waits.steps, pl.col("decode_tokens"))
    budget = mean(waits.steps, pl.col("token_budget"))
    if left is None or decodes is None or not budget:
        return NOTHING
    return message(
        "Decodes take {decodes} of the {budget} tokens of such a step; {left} ({share}) stay unused.",
        decodes=Number(decodes, 1),
        budget=Number(budget),
        left=Number(left, 1),
        share=Share(left / budget),
    )


def _encoder(timeline: Timeline, waits: Charged) -> Message:
    free = mean(waits.steps, pl.col("encoder_slots_free"))
    freeable = mean(waits.steps, pl.col("encoder_slots_freeable"))
    size = timeline.header.scheduler_config.get("encoder_cache_size")
    if free is None or freeable is None or not isinstance(size, int):
        return NOTHING
    return message(
        "Of {size} encoder cache slots, {held} are held by requests in use and {free} are free on average.",
        size=Number(size),
        held=Number(round(size - freeable)),
        free=Number(round(free)),
    )


def _loads(timeline: Timeline) -> Message:
    if "kv_loads" not in timeline.lists:
        return NOTHING
    loads = timeline.lists["kv_loads"].select("request_id", "event", "at_us").collect()
    begun = loads.filter(pl.col("event") == "begun").unique("request_id", keep="first")
    over = loads.filter(pl.col("event") != "begun").group_by("request_id").agg(over_us=pl.col("at_us").min())
    took = begun.join(over, on="request_id", how="left").with_columns(
        us=pl.col("over_us").fill_null(timeline.end_us) - pl.col("at_us")
    )
    if took.is_empty():
        return NOTHING
    pending = took["over_us"].null_count()
    return message(
        "{loads} began and took {median} (median){pending}.",
        loads=Count(took.height, "KV load"),
        median=Duration(float(took["us"].median() or 0)),  # type: ignore[arg-type]  # integers
        pending=message("; {count} never arrived", count=Number(pending)) if pending else NOTHING,
    )
