"""The waiting queue, reconstructed from the trace alone: requests that waited, and the tokens they wanted.

A request waits from the step in whose line it arrived until the step that schedules it. It waits again from a
step that preempts it or finds it set aside. A request that waited when the trace began waits from its first
step. Checked against the counts that the recorder took from vLLM: ``mismatches``.
"""

import polars as pl

from schedtrace.timeline.frames import EngineFrames
from schedtrace.timeline.spans import at_steps, level
from schedtrace.timeline.unrecorded import after

NEVER = 2**62
"""``left_step`` of a wait that lasts until the end of the trace."""


def waits(frames: EngineFrames, departures: pl.DataFrame) -> pl.DataFrame:
    """Return one row per time that a request waited.

    Args:
        frames: One engine's.
        departures: ``gone(frames)``.

    Columns: ``request_id``, ``trial``, ``since_step`` (the first step after which it still waited, if it was
    not scheduled in that step at once), ``left_step`` (the step that scheduled it, or the first one after it
    was aborted; it waits after every step ``since_step <= n < left_step``), ``wanted_tokens``, ``preempted``
    (it waited because it had lost its blocks), ``set_aside`` (its scheduler had taken it out of the running
    ones, its blocks kept), ``priority`` and ``order``, its place among those who wait: preempted requests
    come before new ones, the last victim first; under priority, priority comes first. A queue that is not
    vLLM's has an order of its own (``Header.foreign_queues``).
    """
    arrivals, there = _arrivals(frames), _present(frames, frames.there_first)
    again = _present(frames, after(frames))
    there = pl.concat([there, again])
    about = pl.concat([there.select(arrivals.columns), arrivals]).unique("request_id", keep="first")
    entries = pl.concat(
        [
            there.filter(pl.col("state") != "running")
            .with_columns(preempted=was_preempted(), set_aside=pl.lit(value=False))
            .select(*arrivals.columns, "preempted", "set_aside"),
            arrivals.with_columns(preempted=pl.lit(value=False), set_aside=pl.lit(value=False)),
            _preemptions(frames, about).with_columns(
                preempted=pl.lit(value=True), set_aside=pl.lit(value=False)
            ),
            _set_aside(frames, about).with_columns(
                preempted=pl.lit(value=False), set_aside=pl.lit(value=True)
            ),
        ]
    )
    ran = pl.col("step").is_in(after_gaps(frames).implode())
    ran_after = again.filter(pl.col("state") == "running").select("request_id", scheduled_step="since_step")
    scheduled = pl.concat(
        [
            pl.concat([frames.admitted, frames.requests_of(ran & (pl.col("phase") == "running"))]).select(
                "request_id", scheduled_step="step"
            ),
            ran_after.drop_nulls(),
        ]
    ).sort("scheduled_step")
    # Who waits after a gap waits anew: whether it had run meanwhile is not known.
    told_steps = frames.gaps.filter(pl.col("told_us").is_not_null())["next_step"].sort()
    until = pl.concat([told_steps, pl.Series([NEVER], dtype=pl.Int64)])
    left = pl.min_horizontal("scheduled_step", "ended_step", "told_step").fill_null(NEVER)
    first = pl.col("priority") if frames.by_priority else pl.col("preempted").not_()
    columns = ("wanted_tokens", "preempted", "set_aside", "priority", "order")
    return (
        entries.sort("request_id", "since_step", maintain_order=True)
        .sort("since_step")
        .join_asof(
            scheduled,
            left_on="since_step",
            right_on="scheduled_step",
            by="request_id",
            strategy="forward",
            allow_exact_matches=True,
            check_sortedness=False,
        )
        .join(_ends(frames, departures), on="request_id", how="left", maintain_order="left")
        .with_columns(
            told_step=pl.col("since_step").map_batches(
                lambda since: until.gather(told_steps.search_sorted(since, side="right")),
                return_dtype=pl.Int64,
            )
        )
        .with_columns(left_step=left)
        .filter(pl.col("left_step") > pl.col("since_step"))
        .sort(first, "place", "request_id")
        .with_row_index("order")
        .select("request_id", "trial", "since_step", "left_step", *columns)
    )


def after_gaps(frames: EngineFrames) -> pl.Series:
    """Return the numbers of steps that follow a missing step, in which requests may have been admitted."""
    number = frames.steps["step"]
    follows = number == number.shift(1) + 1
    return number.filter(~follows.fill_null(frames.header.first_step == 0))


def waiting_after(waited: pl.DataFrame, step: int) -> pl.DataFrame:
    """Return the rows of ``timeline.waits`` that still waited after a step, in queue order."""
    return waited.filter((pl.col("since_step") <= step) & (step < pl.col("left_step"))).sort("order")


def mismatches(frames: EngineFrames, waited: pl.DataFrame) -> pl.DataFrame:
    """Return the steps after which a different number waited: ``step``, ``recorded``, ``reconstructed``.

    Args:
        frames: One engine's.
        waited: Its ``waits``.
    """
    counted = level(waited, "since_step", "left_step", reconstructed=1)
    recorded = frames.steps.select("step", recorded="num_waiting_after")
    return at_steps(counted, recorded).filter(pl.col("recorded") != pl.col("reconstructed"))


def next_steps(frames: EngineFrames, rows: pl.DataFrame, moment: str) -> pl.DataFrame:
    """Sort rows by a ``moment`` and add the first step from then on: ``next_step`` and its ``begin_us``."""
    begins = frames.steps.select(begin_us="start_us", next_step="step").sort("begin_us")
    return rows.sort(moment, maintain_order=True).join_asof(
        begins,
        left_on=moment,
        right_on="begin_us",
        strategy="forward",
        coalesce=False,
        check_sortedness=False,
    )


def _arrivals(frames: EngineFrames) -> pl.DataFrame:
    """Return the arrivals with the first step that could have scheduled them and their ``place``."""
    arrivals = frames.arrivals.filter(~pl.col("streaming_update"))
    place = pl.coalesce("arrived_us", "queued_us") if frames.by_priority else pl.int_range(pl.len())
    return (
        next_steps(frames, arrivals, "queued_us")
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


def _present(frames: EngineFrames, there: pl.DataFrame) -> pl.DataFrame:
    """Return the same for the requests present; victims of later preemptions come before them."""
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


def was_preempted() -> pl.Expr:
    """Select requests of ``EngineFrames.present`` that a preemption returned to the queue."""
    return (pl.col("state") == "preempted") & (pl.col("computed_tokens") == 0)


def lost_before(frames: EngineFrames) -> pl.DataFrame:
    """Return ``request_id`` and ``lost_tokens`` of requests that had been preempted when the trace began.

    A request with output tokens had computed all but the last of them. The loss of a request without output
    is unknown.
    """
    return _losses(frames.there_first).select("request_id", "lost_tokens")


def lost_in_gaps(frames: EngineFrames) -> pl.DataFrame:
    """Return the same for requests present after a gap; ``step`` is the first step after it."""
    return _losses(after(frames)).select("request_id", "lost_tokens", step="next_step")


def _losses(there: pl.DataFrame) -> pl.DataFrame:
    return there.with_columns(lost_tokens=known_loss()).filter(pl.col("lost_tokens") > 0)


def known_loss() -> pl.Expr:
    """Return the tokens that a preemption discarded, if a row of ``Present`` contains them."""
    sampled = pl.col("prompt_tokens") + pl.col("output_tokens") - 1
    again = (pl.col("output_tokens") > 0) & (pl.col("computed_tokens") < sampled)
    return pl.max_horizontal("lost_tokens", pl.when(again).then(sampled))


def _preemptions(frames: EngineFrames, about: pl.DataFrame) -> pl.DataFrame:
    """Return the preempted requests, which want all computed tokens and the token sampled after them."""
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
    """Return the requests that their scheduler removed from the running list with their computed tokens."""
    places = about.select("request_id", "priority", "place")
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
    """Count the requests that were first scheduled before an earlier arrival that was still present.

    Args:
        frames: One engine's.
        departures: ``gone(frames)``.
    """
    scheduled = frames.admitted.group_by("request_id").agg(first=pl.col("step").min())
    left = pl.min_horizontal("first", "ended_step").fill_null(NEVER)
    rows = (
        frames.first_arrivals.select("request_id", "queued_us")
        .join(scheduled, on="request_id", how="left")
        .join(_ends(frames, departures), on="request_id", how="left")
        .sort("queued_us", maintain_order=True)
        .with_columns(earlier_left=left.cum_max().shift(1).fill_null(0))
    )
    return rows.filter(pl.col("first") < pl.col("earlier_left")).height


def _ends(frames: EngineFrames, departures: pl.DataFrame) -> pl.DataFrame:
    """Return the first step after each request was gone, or after which nothing is known about it."""
    ended = (
        next_steps(frames, frames.finishes, "finished_us")
        .select("request_id", ended_step=pl.coalesce("step", "next_step"))
        .unique("request_id", keep="last")
    )
    unrecorded = departures.select("request_id", ended_step="gone_step")
    return pl.concat(
        [ended, unrecorded.select(pl.col(name).cast(kind) for name, kind in ended.schema.items())]
    )
