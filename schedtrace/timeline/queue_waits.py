"""The waiting queue, reconstructed from the trace: requests that waited, or were refused for their size.

A request waits from the step whose line contains its arrival until the step that schedules it. It waits again
from a step that preempts it, or that finds it set aside. A request that waited when the trace began waits
from the trace's first step. ``mismatches`` compares the result with the counts that the recorder read from
vLLM.

Steps may refuse the head of the queue for its size (``refused_heads``). The module also determines which
requests would have been admitted if the scheduler had passed over the refused head. This is computed step by
step from the resources that each step left unused: tokens, KV blocks and seats. Requests behind the head are
admitted in queue order if they fit. Such a request keeps its seat and its blocks, which grow by one token per
step, until the step that really scheduled it, so no resource is used twice. A request that would have run out
of blocks before that step is not counted, because it would have been preempted.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl

from schedtrace.model.causes import OF_ITS_OWN_SIZE, Cause
from schedtrace.model.kv_need import KvNeed, kv_need
from schedtrace.timeline.frames import EngineFrames, after_gaps, next_steps, was_preempted
from schedtrace.timeline.spans import at_steps, level

NEVER = 2**62
"""Value of ``left_step`` for a wait that lasts until the end of the trace."""


def make_waits(frames: EngineFrames, departures: pl.DataFrame) -> pl.DataFrame:
    """Return one row per period in which a request waited.

    Columns: ``request_id``, ``trial``, ``since_step`` and ``left_step`` (it waits after every step
    ``since_step <= n < left_step``; step ``left_step`` scheduled it or is the first one after its abort),
    ``wanted_tokens``, ``preempted`` (it waited because it had lost its blocks), ``set_aside`` (its scheduler
    had removed it from the running list, but it kept its blocks), ``priority`` and ``order``, its place among
    waiting requests. Preempted requests come before new ones, the last victim first; with the priority
    policy, priority comes first. A queue that is not vLLM's has its own order (``Header.foreign_queues``).
    """
    arrivals, there = _arrivals(frames), _present(frames, frames.there_first)
    again = _present(frames, frames.there_after)
    there = pl.concat([there, again])
    entries = [arrivals.with_columns(preempted=pl.lit(value=False), set_aside=pl.lit(value=False))]
    if not there.is_empty():
        queued = there.filter(pl.col("state") != "running")
        queued = queued.with_columns(preempted=was_preempted(), set_aside=pl.lit(value=False))
        entries.insert(0, queued.select(entries[0].columns))
    if not (frames.preemptions.is_empty() and frames.set_aside.is_empty()):
        about = pl.concat([there.select(arrivals.columns), arrivals]).unique("request_id", keep="first")
        for rows, preempted in ((_preemptions(frames, about), True), (_set_aside(frames, about), False)):
            entries.append(
                rows.with_columns(preempted=pl.lit(value=preempted), set_aside=pl.lit(value=not preempted))
            )
    left = pl.min_horizontal("scheduled_step", "ended_step", "told_step").fill_null(NEVER)
    first = pl.col("priority") if frames.by_priority else pl.col("preempted").not_()
    columns = ("wanted_tokens", "preempted", "set_aside", "priority", "order")
    rows = (
        pl.concat(entries)
        .sort("request_id", "since_step", maintain_order=True)
        .sort("since_step")
        .join_asof(
            _scheduled(frames, again),
            left_on="since_step",
            right_on="scheduled_step",
            by="request_id",
            strategy="forward",
            allow_exact_matches=True,
            check_sortedness=False,
        )
        .join(_ends(frames, departures), on="request_id", how="left", maintain_order="left")
    )
    return (
        _until_gaps(frames.gaps, rows)
        .with_columns(left_step=left)
        .filter(pl.col("left_step") > pl.col("since_step"))
        .sort(first, "place", "request_id")
        .with_row_index("order")
        .select("request_id", "trial", "since_step", "left_step", *columns)
    )


def _until_gaps(gaps: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Add ``told_step``, the first step after the next gap, at which a waiting request begins a new wait.

    Whether the request ran in the gap is unknown.
    """
    if gaps.is_empty():
        return rows.with_columns(told_step=pl.lit(None, pl.Int64))
    return rows.join_asof(
        gaps.drop_nulls("told_us").select(told_step="next_step").sort("told_step"),
        left_on="since_step",
        right_on="told_step",
        strategy="forward",
        allow_exact_matches=False,
        check_sortedness=False,
        coalesce=False,
    )


def _scheduled(frames: EngineFrames, again: pl.DataFrame) -> pl.DataFrame:
    """Return ``request_id`` and ``scheduled_step``: steps that may have taken the request off the queue.

    Args:
        frames: Frames of one engine.
        again: Requests present after a gap, with the columns of ``_present``.
    """
    steps = [frames.admitted.select("request_id", scheduled_step="step")]
    behind = after_gaps(frames)
    if behind.len():
        ran = pl.col("step").is_in(pl.lit(behind).implode()) & (pl.col("phase") == "running")
        steps.append(frames.requests_of(ran).select("request_id", scheduled_step="step"))
    if not again.is_empty():
        running = again.filter(pl.col("state") == "running")
        steps.append(running.select("request_id", scheduled_step="since_step").drop_nulls())
    return pl.concat(steps).sort("scheduled_step")


def waiting_after(waited: pl.DataFrame, step: int) -> pl.DataFrame:
    """Return the rows of ``timeline.waits`` for requests that still waited after a step, in queue order."""
    return waited.filter((pl.col("since_step") <= step) & (step < pl.col("left_step"))).sort("order")


def make_mismatches(frames: EngineFrames, waited: pl.DataFrame) -> pl.DataFrame:
    """Return the steps after which recorded and reconstructed queue lengths differ.

    Args:
        frames: Frames of one engine.
        waited: ``waits`` of the engine.
    """
    counted = level(waited, "since_step", "left_step", reconstructed=1)
    recorded = frames.steps.select("step", recorded="num_waiting_after")
    return at_steps(counted, recorded).filter(pl.col("recorded") != pl.col("reconstructed"))


def _arrivals(frames: EngineFrames) -> pl.DataFrame:
    """Return the arrivals with ``place`` and the first step that could have scheduled them."""
    place = pl.coalesce("arrived_us", "queued_us") if frames.by_priority else pl.int_range(pl.len())
    return (
        next_steps(frames, frames.new_requests, "queued_us")
        .select(
            "request_id",
            "trial",
            since_step=pl.coalesce("step", "next_step"),
            wanted_tokens="prompt_tokens",
            priority="priority",
            place=place,
        )
        .drop_nulls("since_step")
    )


PRESENT_SCHEMA = {
    "request_id": pl.String,
    "trial": pl.Int64,
    "since_step": pl.Int64,
    "wanted_tokens": pl.Int64,
    "priority": pl.Int64,
    "place": pl.Int64,
    "state": pl.String,
    "computed_tokens": pl.Int64,
}


def _present(frames: EngineFrames, there: pl.DataFrame) -> pl.DataFrame:
    """Return the requests present, with the columns of ``_arrivals``, ``state`` and ``computed_tokens``.

    Requests that are preempted later come before these in the queue.
    """
    if there.is_empty():
        return pl.DataFrame(schema=PRESENT_SCHEMA)
    before, place = was_preempted(), pl.int_range(pl.len())
    in_queue = pl.when(before).then(place + 1).otherwise(place - pl.len().cast(pl.Int64))
    rows = there if "next_step" in there.columns else next_steps(frames, there, "at_us")
    return rows.select(
        "request_id",
        "trial",
        since_step="next_step",
        wanted_tokens=pl.max_horizontal(
            pl.col("lost_tokens") + 1, pl.col("prompt_tokens") + pl.col("output_tokens")
        ),
        priority="priority",
        place=pl.coalesce("arrived_us", "queued_us") if frames.by_priority else in_queue,
        state="state",
        computed_tokens="computed_tokens",
    )


def _preemptions(frames: EngineFrames, about: pl.DataFrame) -> pl.DataFrame:
    """Return the preempted requests, which have to compute all their tokens again, including the last one."""
    about = about.select("request_id", "priority", "place", prompt="wanted_tokens")
    return frames.preemptions.join(about, on="request_id", how="left", maintain_order="left").select(
        "request_id",
        "trial",
        since_step="step",
        wanted_tokens=pl.max_horizontal(pl.col("lost_tokens") + 1, "prompt"),
        priority=pl.col("priority").fill_null(0),
        place=pl.col("place").fill_null(0) if frames.by_priority else -pl.int_range(pl.len()),
    )


def _set_aside(frames: EngineFrames, about: pl.DataFrame) -> pl.DataFrame:
    """Return the requests that their scheduler set aside; they keep their computed tokens."""
    places = about[["request_id", "priority", "place"]]
    return (
        frames.set_aside.join(places, on="request_id", how="left", maintain_order="left")
        .select(
            "request_id",
            "trial",
            "wanted_tokens",
            pl.col("priority", "place").fill_null(0),
            since_step="step",
        )
        .select(about.columns)
    )


def overtakings(frames: EngineFrames, departures: pl.DataFrame) -> int:
    """Return the number of requests first scheduled while an earlier arrival was still waiting."""
    scheduled = frames.admitted.group_by("request_id").agg(first=pl.col("step").min())
    left = pl.min_horizontal("first", "ended_step").fill_null(NEVER)
    rows = (
        frames.first_arrivals[["request_id", "queued_us"]]
        .join(scheduled, on="request_id", how="left")
        .join(_ends(frames, departures), on="request_id", how="left")
        .sort("queued_us", maintain_order=True)
        .with_columns(earlier_left=left.cum_max().shift(1).fill_null(0))
    )
    return rows.filter(pl.col("first") < pl.col("earlier_left")).height


def _ends(frames: EngineFrames, departures: pl.DataFrame) -> pl.DataFrame:
    """Return, for each request, the step at which it left or at which the recording lost track of it."""
    ended = (
        next_steps(frames, frames.finishes, "finished_us")
        .select("request_id", ended_step=pl.coalesce("step", "next_step"))
        .unique("request_id", keep="last")
    )
    if departures.is_empty():
        return ended
    unrecorded = departures.select("request_id", ended_step="gone_step")
    return pl.concat(
        [ended, unrecorded.select(pl.col(name).cast(kind) for name, kind in ended.schema.items())]
    )


BY_SIZE = (Cause.KV_BLOCKS, Cause.CHUNKED_PREFILL_OFF)
"""Causes of refusals that would not affect a smaller request behind the head; all other causes, such as an
alignment, stop every request."""


@dataclass(frozen=True)
class AdmissionNeed:
    """Upper bound on the tokens and KV blocks that a waiting request needs, assuming no prefix-cache hits."""

    kv: KvNeed
    chunked: bool
    most_at_once: int
    """Value of ``long_prefill_token_threshold``; 0 if there is none."""
    whole: bool
    """Value of ``scheduler_reserve_full_isl``: whether the whole request must fit, not only its first chunk.
    """
    kept_free: int
    """Number of blocks that ``--watermark`` reserves."""

    def first_chunk(self, wanted: int, budget: int) -> int:
        """Return the number of tokens in the first chunk; 0 if no chunk fits."""
        chunk = min(wanted, self.most_at_once or wanted)
        if self.chunked:
            return min(chunk, budget)
        return chunk if chunk <= budget else 0

    def blocks_held(self, tokens: int, computed: int = 0) -> int:
        """Return the KV blocks held after a step that computes the tokens from ``computed`` to ``tokens``."""
        return sum(self.kv.held(computed, tokens) or ())

    def blocks_later(self, tokens: int, computed: int) -> int:
        """Return the most KV blocks that the request can hold later, whatever chunks it was computed in."""
        most = self.kv.sequence(tokens + self.kv.lookahead) or []
        return sum(map(min, most, self.kv.held(computed, tokens) or []))

    def blocks_asked(self, wanted: int, tokens: int) -> int:
        """Return the KV blocks that must be free to admit the request with a first chunk of this length."""
        chunk = self.blocks_held(tokens)
        return max(chunk, sum(self.kv.sequence(wanted) or ())) if self.whole else chunk


HEAD_SCHEMA = {
    "num_not_ready_after": pl.Int64,
    "budget_left": pl.Int64,
    "kv_blocks_free": pl.Int64,
    "seats_left": pl.Int64,
    "since_step": pl.Int64,
    "left_step": pl.Int64,
    "order": pl.UInt32,
    "head_tokens": pl.Int64,
    "fresh": pl.Boolean,
}
"""Columns of ``refused_heads`` that ``EngineFrames.exits`` does not have."""


def make_refused_heads(frames: EngineFrames, waits: pl.DataFrame, mismatches: pl.DataFrame) -> pl.DataFrame:
    """Return one row per step whose waiting loop ended at a request that was too large for the step.

    Steps whose reconstructed queue differs in length from the recorded one are left out.

    Columns: those of ``EngineFrames.exits`` with ``head`` for the request's id, ``order`` (its place in
    ``waits``), ``head_tokens``, ``fresh`` (it was not preempted before), and ``num_not_ready_after``,
    ``budget_left``, ``kv_blocks_free`` and ``seats_left`` after the step.
    """
    by_size = (
        (pl.col("loop") == "waiting")
        & (pl.col("kind") == "break")
        & pl.col("cause").is_in(OF_ITS_OWN_SIZE)
        & pl.col("refusal")
    )
    refused = frames.exits.filter(by_size).drop("budget_left")
    if refused.is_empty():
        return refused.rename({"request_id": "head"}).with_columns(
            pl.lit(None, kind).alias(name) for name, kind in HEAD_SCHEMA.items()
        )
    left_over = frames.steps.select(
        "step",
        "num_not_ready_after",
        budget_left="remaining_budget",
        kv_blocks_free="kv_blocks_free_after",
        seats_left=frames.seats - pl.col("num_running_after"),
    )
    refused = (
        refused.unique("step", keep="last", maintain_order=True)
        .join(left_over, on="step", maintain_order="left")
        .join(mismatches, on="step", how="anti", maintain_order="left")
        .filter(pl.col("kv_blocks_free").is_not_null())
    )
    places = waits.select(
        "request_id",
        "since_step",
        "left_step",
        "order",
        head_tokens="wanted_tokens",
        fresh=~pl.col("preempted"),
    )
    return (
        refused.join(places, on="request_id", maintain_order="left")
        .filter((pl.col("since_step") <= pl.col("step")) & (pl.col("step") < pl.col("left_step")))
        .rename({"request_id": "head"})
    )


def heads_by_size(heads: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ``refused_heads`` in which a smaller request could have been admitted."""
    return heads.filter(pl.col("cause").is_in([str(cause) for cause in BY_SIZE]))


def need_of(frames: EngineFrames, heads: pl.DataFrame) -> AdmissionNeed | None:
    """Return the resources that a request needs on this engine; None if its KV blocks cannot be counted.

    Args:
        frames: The engine's trace.
        heads: ``refused_heads``; if a head needed more blocks than are counted here, the count differs from
            vLLM's, and the result is None.
    """
    config, header = frames.header.scheduler_config, frames.header
    kv = kv_need(header)
    if kv is None or kv.held(1, 2) is None or kv.sequence(1) is None:
        return None
    if "scheduler.num_lookahead_tokens" not in header.settings and int(frames.steps["draft_tokens"].sum()):
        kv = replace(kv, lookahead=max(group.block_size for group in kv.groups))
    need = AdmissionNeed(
        kv=kv,
        chunked=bool(config.get("enable_chunked_prefill", True)),
        most_at_once=int(config.get("long_prefill_token_threshold") or 0),
        whole=bool(config.get("scheduler_reserve_full_isl")),
        kept_free=int(float(config.get("watermark") or 0) * (header.kv_blocks_total or 0)),
    )
    recorded = heads.filter(pl.col("fresh"))[["head_tokens", "blocks_needed"]].drop_nulls().unique()
    is_vllms = all(needed <= need.blocks_asked(tokens, tokens) for tokens, needed in recorded.iter_rows())
    return need if is_vllms else None


PASSED_SCHEMA = {
    "step": pl.Int64,
    "trial": pl.Int64,
    "head": pl.String,
    "head_tokens": pl.Int64,
    "cause": pl.String,
    "budget_left": pl.Int64,
    "kv_blocks_free": pl.Int64,
    "seats_left": pl.Int64,
    "request_id": pl.String,
    "tokens": pl.Int64,
    "blocks": pl.Int64,
    "left_step": pl.Int64,
}


def behind_head(frames: EngineFrames, waits: pl.DataFrame, heads: pl.DataFrame) -> pl.DataFrame:
    """Return the requests that would have fitted, but were behind a refused head.

    Each has one row, for the first such step.

    Args:
        frames: The engine's trace.
        waits: ``waits`` of the engine.
        heads: ``refused_heads``. No request passes in a step in which more requests are not ready than the
            trace names.

    Returns:
        ``PASSED_SCHEMA``: ``head`` is the refused request; ``budget_left``, ``kv_blocks_free`` and
        ``seats_left`` are what the step left unused; ``tokens`` and ``blocks`` are what the request would
        have got; ``left_step`` is the step in which it really left the queue (``queue_waits.NEVER``: none).
    """
    unknown_order = bool(frames.header.foreign_queues)
    need = None if heads.is_empty() or unknown_order else need_of(frames, heads)
    if need is None:
        return pl.DataFrame(schema=PASSED_SCHEMA)
    queue = _queue(frames, waits)
    rows = queue.to_dicts()
    since, left = queue["since_step"].to_numpy(), queue["left_step"].to_numpy()
    ready = queue["ready"].to_numpy()
    passing = _Passing(need)
    refused = {head["step"]: head for head in heads.iter_rows(named=True)}
    for step, free in frames.steps[["step", "kv_blocks_free_after"]].iter_rows():
        passing.drop_gone(step, free)
        if step not in refused:
            continue
        there = (since <= step) & (step < left)
        if refused[step]["num_not_ready_after"] > (there & ~ready).sum():
            continue  # who else cannot run is not known
        (behind,) = (there & ready).nonzero()
        passing.let_pass(refused[step], [rows[at] for at in behind[behind > refused[step]["order"]]])
    return pl.DataFrame(list(passing.passed.values()), schema=PASSED_SCHEMA)


@dataclass
class _Passing:
    """Hypothetical admissions so far, by the requests' places in the queue."""

    need: AdmissionNeed
    passed: dict[int, dict[str, Any]] = field(default_factory=dict)
    inside: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Admitted requests that really still wait, with the step of their hypothetical admission
    (``passed_step``)."""
    given_up: set[int] = field(default_factory=set)
    """Queue places of requests that vLLM would have preempted again."""

    def drop_gone(self, step: int, free: int | None) -> None:
        """Drop requests that have left the queue, and those that no longer fit into the free blocks."""
        self.inside = {at: request for at, request in self.inside.items() if request["left_step"] > step}
        while self.inside and free is not None and self._held(step) > free:
            at, _ = self.inside.popitem()  # vLLM preempts the one that began last
            self.given_up.add(at)
            del self.passed[at]

    def let_pass(self, head: dict[str, Any], behind: list[dict[str, Any]]) -> None:
        """Admit requests behind the head into the room that this step left unused."""
        step, need = head["step"], self.need
        budget = head["budget_left"] - len(self.inside)
        seats = head["seats_left"] - len(self.inside)
        free = head["kv_blocks_free"] - need.kept_free - self._held(step)
        for request in behind:
            if min(seats, budget, free) <= 0:
                return
            tokens = need.first_chunk(request["wanted_tokens"], budget)
            blocks = need.blocks_asked(request["wanted_tokens"], tokens)
            has_passed = request["order"] in self.inside or request["order"] in self.given_up
            if has_passed or not tokens or blocks > free:
                continue
            seats, budget, free = seats - 1, budget - tokens, free - need.blocks_held(tokens)
            self.inside[request["order"]] = {**request, "passed_step": step}
            grant = {"request_id": request["request_id"], "tokens": tokens, "blocks": blocks}
            row = {**head, **grant, "left_step": request["left_step"]}
            self.passed[request["order"]] = {name: row[name] for name in PASSED_SCHEMA}

    def _held(self, step: int) -> int:
        """Return the blocks that these requests would hold, with a token computed in each step since."""
        held = 0
        for request in self.inside.values():
            more = min(step - request["passed_step"], request["most_after_prompt"])
            tokens = request["wanted_tokens"] + more
            held += self.need.blocks_later(tokens, tokens - 1 if more else 0)
        return held


def _queue(frames: EngineFrames, queue: pl.DataFrame) -> pl.DataFrame:
    """Return ``waits`` with ``most_after_prompt`` (tokens to compute) and ``ready`` (was never skipped)."""
    most = (
        (pl.col("max_tokens") - 1).fill_null(NEVER).alias("most_after_prompt")
    )  # the last one is not computed
    asked = frames.known_requests.select("request_id", most)
    skipped = (
        frames.exits.filter((pl.col("loop") == "waiting") & (pl.col("kind") == "continue"))
        .select("request_id", pl.col("step").alias("skip"))
        .drop_nulls()
    )
    not_ready = (
        queue.join(skipped, on="request_id")
        .filter((pl.col("since_step") <= pl.col("skip")) & (pl.col("skip") < pl.col("left_step")))["order"]
        .unique()
    )
    return queue.join(asked, on="request_id", how="left", maintain_order="left").with_columns(
        pl.col("most_after_prompt").fill_null(NEVER),
        ready=~pl.col("order").is_in(pl.lit(not_ready).implode()),
    )
