"""Every moment of an engine, once: what it did, or that it had nothing to do.

An engine that runs ahead (asynchronous scheduling) does several things at a time. Then the device counts
first: host work that hides behind it costs nothing.
"""

import polars as pl

from schedtrace.timeline.spans import time_within
from schedtrace.timeline.timeline import Timeline

STATES = ("device", "schedule", "update", "dummy", "host_gap", "idle")
"""In the order in which they count."""
BUSY = STATES[:-1]
SCHEMA = {
    "engine_rank": pl.Int64,
    "trial": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "state": pl.String,
}
_KINDS = ("device", "schedule", "update", "dummy", "there")


def engine_states(timeline: Timeline) -> pl.DataFrame:
    """One row per time that the engine was in one state, from the first step to the trace's end.

    Columns, in order of time: ``engine_rank``, ``trial`` (of the step before), ``begin_us``, ``end_us``,
    ``state``:

    * ``device``: a worker executed a batch; without its clock in the trace, from when the batch could begin
      (``schedule()`` was done, the output before was back) to its output,
    * ``schedule`` and ``update``: vLLM's ``schedule()`` and ``update_from_output()`` ran,
    * ``dummy``: a batch only to keep other data-parallel ranks company. A trace tells how long these took,
      not when, so they stand right before the step that reports them,
    * ``host_gap``: requests were in the scheduler and nothing of this ran,
    * ``idle``: none were.
    """
    began = timeline.steps.select(pl.col("start_us").min()).item()
    if began is None:
        return pl.DataFrame(schema=SCHEMA)
    changes = (
        pl.concat([_work(timeline), _presence(timeline)])
        .with_columns(pl.col("us").clip(began, timeline.end_us))
        .group_by("us", "kind")
        .agg(pl.col("change").sum())
        .pivot("kind", index="us", values="change")
        .sort("us")
    )
    active = [
        (pl.col(kind).fill_null(0).cum_sum() > 0).alias(kind) for kind in _KINDS if kind in changes.columns
    ]
    state = pl.lit("idle")
    for kind in reversed([kind for kind in _KINDS if kind in changes.columns]):
        state = pl.when(kind).then(pl.lit("host_gap" if kind == "there" else kind)).otherwise(state)
    spans = (
        changes.with_columns(active)
        .select(begin_us="us", state=state)
        .with_columns(end_us=pl.col("begin_us").shift(-1).fill_null(timeline.end_us))
        .filter(pl.col("end_us") > pl.col("begin_us"))
        .with_columns(run=pl.col("state").ne(pl.col("state").shift(1)).fill_null(value=True).cum_sum())
        .group_by("run", maintain_order=True)
        .agg(pl.col("begin_us", "state").first(), pl.col("end_us").last())
    )
    trials = timeline.steps.select("start_us", "trial").sort("start_us")
    return (
        spans.sort("begin_us")
        .join_asof(trials, left_on="begin_us", right_on="start_us")
        .select(pl.lit(timeline.rank, pl.Int64).alias("engine_rank"), "trial", "begin_us", "end_us", "state")
    )


def _work(timeline: Timeline) -> pl.DataFrame:
    """When each kind of work begins (1) and ends (-1)."""
    steps = timeline.steps
    done = pl.col("start_us") + pl.col("schedule_us")
    before = pl.col("output_us").cum_max().shift(1).fill_null(0)
    could = pl.max_horizontal(done, before)
    executed = pl.col("start_us") + pl.col("execute_after_us")
    works = pl.col("total_requests") > 0
    dummy = steps.filter(pl.col("dummy_us") > 0)
    return pl.concat(
        [
            _changes(
                steps.with_columns(begin=pl.coalesce(executed, could)).filter(works),
                "device",
                pl.col("begin"),
                pl.coalesce(executed + pl.col("execute_us"), "output_us"),
            ),
            _changes(steps, "schedule", pl.col("start_us"), done),
            _changes(steps, "update", pl.col("output_us"), pl.col("output_us") + pl.col("update_us")),
            _changes(dummy, "dummy", pl.col("start_us") - pl.col("dummy_us"), pl.col("start_us")),
        ]
    )


def _presence(timeline: Timeline) -> pl.DataFrame:
    """When requests come to the scheduler (1) and leave it (-1)."""
    states = timeline.request_states.filter(pl.col("state") != "front_end")
    lives = states.group_by("request_id").agg(pl.col("begin_us").min(), pl.col("end_us").max())
    return _changes(lives, "there", pl.col("begin_us"), pl.col("end_us"))


def _changes(frame: pl.DataFrame, kind: str, begin: pl.Expr, end: pl.Expr) -> pl.DataFrame:
    spans = frame.select(begin=begin.cast(pl.Int64), end=end.cast(pl.Int64)).drop_nulls()
    spans = spans.filter(pl.col("end") > pl.col("begin"))
    return pl.concat(
        [
            spans.select(us="begin", kind=pl.lit(kind), change=pl.lit(1)),
            spans.select(us="end", kind=pl.lit(kind), change=pl.lit(-1)),
        ]
    )


def with_engine_time(states: pl.DataFrame, engine: pl.DataFrame) -> pl.DataFrame:
    """Rows of ``request_states`` with the engine's time in each: ``device_us``, ``host_us`` and ``idle_us``.

    ``host_us`` is all that is neither the device's nor idle. What lies before the first step is in none of
    them.
    """
    kinds = {"device_us": ["device"], "idle_us": ["idle"], "host_us": [*set(BUSY) - {"device"}]}
    spent = time_within(states, engine, {name: pl.col("state").is_in(of) for name, of in kinds.items()})
    return states.with_columns(spent)
