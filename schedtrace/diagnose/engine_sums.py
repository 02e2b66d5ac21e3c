"""What ``statistics`` needs of one engine: sums, a row a request, and durations, each value once."""

from dataclasses import dataclass

import polars as pl

from schedtrace.diagnose.distributions import counted, inter_token, single
from schedtrace.diagnose.throughput import counted_spans, sampled_tokens
from schedtrace.diagnose.trials import FINISHED
from schedtrace.model.facts import Fact
from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.rank import kv_used_frac
from schedtrace.timeline.request_states import QUEUED, queue_times
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class PrefixSums:
    """First schedulings of requests."""

    enabled: bool
    """Prefix caching was."""
    requests: int
    with_hit: int
    prompt_tokens: int
    hit_tokens: int
    local_tokens: int | None
    external_tokens: int | None
    """None: not recorded."""


@dataclass(frozen=True)
class EngineSums:
    """One engine."""

    rank: int
    facts: frozenset[Fact]
    requests: pl.DataFrame | None
    """One row per request that came: ``priority``, ``lora``, ``queue_us``, ``own_us`` and ``queued_us`` (its
    time in the engine and in the queue), ``done``; of those that ended well ``ttft_us``, ``decode_us``,
    ``e2e_us`` and ``output_tokens``. None: lives of requests are not recorded."""
    prefix: PrefixSums | None
    """None: not recorded."""
    drafts: int
    drafts_accepted: int
    drafts_invalid: int | None
    """Of requests that ended; None: not recorded."""
    draft_tokens: int
    used_tokens: int
    """Of its steps."""
    arrived: int
    finished: int
    aborted: int
    by_scheduler: int
    ended: int
    unfinished: int
    """Requests; ``ended`` in any way."""
    device: pl.DataFrame
    apart: pl.DataFrame
    """How long steps took on the device, and from start to start: ``us`` and ``weight``."""
    inter_token: pl.DataFrame | None
    """Likewise, between two outputs of a request; None: not recorded."""
    steps: int
    finished_in_steps: int
    output_tokens: int
    prompt_tokens: int
    """Those of its steps, and those of the prompts of requests that ended well, each time that they did."""
    preemptions: int | None
    """None: this scheduler cannot be asked for them."""
    running_us: int
    queued_us: int
    """All requests' time running, and in the queue."""
    busy_us: int
    dummy_batches: int
    dummy_us: int
    kv_used: tuple[float, int] | None
    """Mean share of KV blocks in use after its steps, and in how many it is known."""
    spans: pl.DataFrame
    """``throughput.counted_spans``."""


def engine_sums(timeline: Timeline) -> EngineSums:
    """Count one engine."""
    steps, finishes, facts = timeline.steps, timeline.finishes, timeline.facts
    lives = Fact.LIVES in facts
    came = timeline.arrivals.filter(~pl.col("streaming_update")).select("request_id").unique()
    last = finishes.unique("request_id", keep="last")
    left, itself = last["status"], (last["in_schedule"] & last["abort_us"].is_null()).fill_null(value=False)
    done = finishes.filter(pl.col("status").is_in(FINISHED))
    worked = pl.col("total_requests") > 0
    busy = (pl.col("num_running_after") > 0) | (pl.col("num_waiting_after") > 0)
    following = pl.col("start_us").shift(-1).over("trial") - pl.col("start_us")
    in_queue = pl.col("state").is_in(QUEUED)
    kv_used = steps.select(kv_used_frac()).to_series().drop_nulls()
    return EngineSums(
        rank=timeline.rank,
        facts=facts,
        requests=_requests(timeline) if lives else None,
        prefix=_prefix(timeline) if {Fact.CACHE, Fact.REQUESTS, Fact.LIVES} <= facts else None,
        drafts=known_sum(finishes, "drafts") or 0,
        drafts_accepted=known_sum(finishes, "drafts_accepted") or 0,
        drafts_invalid=known_sum(finishes, "drafts_invalid"),
        draft_tokens=int(steps["draft_tokens"].sum()),
        used_tokens=int(steps["used_tokens"].sum()),
        arrived=came.height,
        finished=int(left.is_in(FINISHED).sum()),
        aborted=int(((left == "ABORTED") & ~itself).sum()),
        by_scheduler=int((~left.is_in(FINISHED) & itself).sum()),
        ended=len(left),
        unfinished=came.join(finishes, on="request_id", how="anti").height,
        device=counted(single(steps, pl.when(worked).then("busy_us"))),
        apart=counted(single(steps, pl.when(worked & busy).then(following))),
        inter_token=counted(inter_token(timeline))
        if {Fact.REQUESTS, Fact.LIVES, Fact.TIMES} <= facts
        else None,
        steps=steps.height,
        finished_in_steps=done.height,
        output_tokens=sampled_tokens(steps, done),
        prompt_tokens=int(done["prompt_tokens"].sum()),
        preemptions=timeline.preemptions.filter("in_schedule").height
        if timeline.header.preemptions_recorded
        else None,
        running_us=_spent_us(timeline, ~in_queue & (pl.col("state") != "front_end")),
        queued_us=_spent_us(timeline, in_queue),
        busy_us=timeline.busy_us,
        dummy_batches=int(steps["dummy_batches"].sum()),
        dummy_us=int(steps["dummy_us"].sum()),
        kv_used=(float(kv_used.mean()), len(kv_used)) if len(kv_used) else None,  # type: ignore[arg-type]
        spans=counted_spans(timeline),
    )


def known_sum(frame: pl.DataFrame, column: str) -> int | None:
    """None where no row has a value."""
    if column not in frame.columns or frame[column].null_count() == frame.height:
        return None
    return int(frame[column].sum())


def _spent_us(timeline: Timeline, states: pl.Expr) -> int:
    return int(timeline.request_states.filter(states).select(LENGTH_US.sum()).item())


def _requests(timeline: Timeline) -> pl.DataFrame:
    own = LENGTH_US.filter(pl.col("state") != "front_end").sum()
    queued = LENGTH_US.filter(pl.col("state").is_in(QUEUED)).sum()
    spent = timeline.request_states.group_by("request_id").agg(own_us=own, queued_us=queued)
    ended = (
        timeline.finishes.filter(pl.col("status").is_in(FINISHED))
        .unique("request_id", keep="last")
        .select("request_id", "first_token_us", "last_token_us", "output_tokens", done=pl.lit(value=True))
    )
    first, last, came = pl.col("first_token_us"), pl.col("last_token_us"), pl.col("arrived_us")
    queue = queue_times(timeline).select("request_id", "queue_us")
    return (
        timeline.arrivals.filter(~pl.col("streaming_update"))
        .unique("request_id", keep="first", maintain_order=True)
        .select("request_id", "arrived_us", "priority", "lora")
        .join(queue, on="request_id", how="left", maintain_order="left")
        .join(spent, on="request_id", how="left", maintain_order="left")
        .join(ended, on="request_id", how="left", maintain_order="left")
        .select(
            *("priority", "lora", "queue_us", "own_us", "queued_us", "output_tokens"),
            pl.col("done").fill_null(value=False),
            ttft_us=first - came,
            decode_us=last - first,
            e2e_us=last - came,
        )
    )


def _prefix(timeline: Timeline) -> PrefixSums:
    came = timeline.arrivals.filter(~pl.col("streaming_update")).unique("request_id", keep="first")
    new = timeline.admitted.filter(pl.col("phase") == "new")
    known = came.join(new, on="request_id").select(
        prompt=pl.col("prompt_tokens").cast(pl.Int64), hit=pl.col("computed_tokens").cast(pl.Int64)
    )
    admitted = timeline.lists.get("admitted")
    sources = None if admitted is None else admitted.select("local_tokens", "external_tokens").collect()
    return PrefixSums(
        enabled=bool(timeline.header.enable_prefix_caching),
        requests=known.height,
        with_hit=known.filter(pl.col("hit") > 0).height,
        prompt_tokens=int(known["prompt"].sum()),
        hit_tokens=int(known["hit"].sum()),
        local_tokens=None if sources is None else known_sum(sources, "local_tokens"),
        external_tokens=None if sources is None else known_sum(sources, "external_tokens"),
    )
