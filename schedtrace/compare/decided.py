"""The steps of a trace as decisions: which requests by their number, who was preempted, why it ended."""

import polars as pl

from schedtrace.timeline.timeline import Timeline

_NUMBER = r"^t\d+-(\d+)(?:-|$)"
_OF_TRIAL = ["trial", "request_id"]


def decided_steps(timeline: Timeline) -> pl.DataFrame:
    """The steps in which anything could be decided: somebody was scheduled, preempted, or waited for it.

    Beside the columns of ``Timeline.steps``: ``scheduled`` (``number: tokens`` each, in order), ``preempted``
    (numbers), ``causes`` (``loop: cause`` of the exits, each once) and ``arrived``: requests of the trial
    that had reached the scheduler when the step began.
    """
    numbers = _numbers(timeline)
    scheduled = _per_step(
        timeline.requests.join(numbers, on=_OF_TRIAL, how="left", nulls_equal=True, maintain_order="left"),
        pl.format("{}: {} tokens", pl.col("number").cast(pl.String).fill_null("?"), "scheduled_tokens"),
        "scheduled",
    )
    preempted = _per_step(
        timeline.preemptions.lazy()
        .filter(pl.col("in_schedule"))
        .join(numbers, on=_OF_TRIAL, how="left", nulls_equal=True, maintain_order="left"),
        pl.col("number"),
        "preempted_numbers",
    )
    causes = _per_step(
        timeline.exits.lazy(), pl.format("{}: {}", "loop", "cause").unique(maintain_order=True), "causes"
    )
    steps = timeline.steps
    for more in (scheduled, preempted, causes):
        name = more.columns[-1]
        steps = steps.join(more, on="step", how="left", maintain_order="left").with_columns(
            pl.col(name).fill_null(pl.lit([], dtype=more.schema[name]))
        )
    steps = steps.rename({"preempted_numbers": "preempted"})
    wanted = (pl.col("total_requests") > 0) | (pl.col("eligible_after") > 0)
    return _with_arrivals(steps.filter(wanted | (pl.col("preempted").list.len() > 0)), timeline)


def _per_step(rows: pl.LazyFrame, value: pl.Expr, name: str) -> pl.DataFrame:
    return rows.group_by("step", maintain_order=True).agg(value.alias(name)).collect()


def _numbers(timeline: Timeline) -> pl.LazyFrame:
    """Trial and request id to the request's number."""
    arrivals = timeline.arrivals.unique(_OF_TRIAL, keep="first", maintain_order=True)
    told = pl.col("request_id").str.extract(_NUMBER, 1).cast(pl.Int64)
    in_order = pl.col("queued_us").rank("ordinal").over("trial").cast(pl.Int64) - 1
    by_id = timeline.header.trial_ids and not timeline.header.hashed_ids
    return arrivals.select(*_OF_TRIAL, number=told if by_id else in_order).lazy()


def _with_arrivals(steps: pl.DataFrame, timeline: Timeline) -> pl.DataFrame:
    came = timeline.arrivals.filter(~pl.col("streaming_update")).sort("queued_us")
    counted = came.select(
        pl.col("trial").fill_null(-1), "queued_us", arrived=pl.col("queued_us").cum_count().over("trial")
    )
    return (
        steps.with_columns(of=pl.col("trial").fill_null(-1))
        .sort("start_us", maintain_order=True)
        .join_asof(
            counted.rename({"trial": "of"}),
            left_on="start_us",
            right_on="queued_us",
            by="of",
            check_sortedness=False,
        )
        .with_columns(pl.col("arrived").fill_null(0))
        .drop("of", "queued_us", strict=False)
    )
