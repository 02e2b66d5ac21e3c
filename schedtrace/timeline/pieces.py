"""Pieces of requests' histories: in the waiting queue, and while they run.

A piece states when a request entered a state; ``request_states.py`` puts the pieces together. A piece has no
end: it lasts until the request's next piece begins. The pieces of a request can therefore neither overlap nor
leave a gap.

Every request in the queue after a step was refused, either by a skip that passed over it or by the exit that
ended the loop. The cause of that skip or exit applies from the start of the step to the start of the next.

A request computes from the start of the step that admits it until its next token is back: ``prefill``, or
``recompute`` after a preemption. From then on it decodes. A running request is ``stalled`` from the first
step that does not schedule it (or from the return of its last output, if that is later) to the start of the
step that schedules it again. A step that passes over a request because its output is in flight (asynchronous
scheduling) costs nothing.

An example: a request with a prompt of 100 tokens is prefilled in steps 1 and 2, decodes in step 3, is not
scheduled in step 4 for lack of token budget, and decodes in step 5. Step ``n`` starts at ``100 n`` us; its
output is back 50 us later. From the request's stretches, ``_portions`` makes these rows (step 2 has the first
output):

    step  last_step  place  last_place  decodes  state    tokens  output_us  output_place
    1     1          0      0           False    prefill  60      250        1
    2     2          1      1           False    prefill  40      250        1
    3     3          2      2           True     decode   1       250        1
    5     5          4      4           True     decode   1       250        1

From these, ``running_pieces`` makes these pieces, in order of ``place`` and ``rank``:

    place  rank          since_us  state    cause         begin_step  end_step  tokens
    0      COMPUTES (2)  100       prefill                1           2         100
    1      DECODES (3)   250       decode                                       0
    2      DECODES (3)   250       decode                 3           3         1
    3      WAITS (1)     400       stalled  token_budget  4           4         0
    4      DECODES (3)   500       decode                 5           5         1

Each piece lasts until the next begins: the request prefills for 150 us, decodes for 150 us, and is stalled
for 100 us.
"""

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.frames import (
    BEFORE,
    EngineFrames,
    after_gaps,
    known_loss,
    next_steps,
    was_preempted,
)

PIECE_SCHEMA = {
    "request_id": pl.String,
    "place": pl.Int64,
    "rank": pl.Int8,
    "since_us": pl.Int64,
    "state": pl.String,
    "cause": pl.String,
    "begin_step": pl.Int64,
    "end_step": pl.Int64,
    "tokens": pl.Int64,
}
"""Columns of a table of pieces. ``place`` is the index, among the engine's steps, of the step that began the
piece (-1 if none did); ``rank`` orders the pieces of that step. With several steps in flight, ``place`` and
``rank`` give the order of events, whereas ``since_us`` (the beginning in microseconds) may not.
``begin_step`` to ``end_step`` are the steps of the piece, null if no step knew of the request; ``tokens``
counts the tokens of the request in these steps.
"""

NEXT_STEP = "next_step"
"""Cause of waiting for the first step that can see the request, because no step has refused it yet."""
OTHER = pl.lit(str(Cause.OTHER))
ARRIVES, WAITS, COMPUTES, DECODES, TOLD = range(5)
"""Values of ``rank``, in the order of events: a request arrives, a step refuses it, a step computes it, the
step's output lets it decode. A list of present requests comes last, after all pieces of the step before it.
"""


def piece_table(frame: pl.DataFrame, **columns: pl.Expr) -> pl.DataFrame:
    """Return a table of pieces with the given columns, and others from the frame.

    By default, ``cause``, ``begin_step`` and ``end_step`` are null, and ``tokens`` is 0.
    """
    missing = {name: pl.lit(None) for name in ("cause", "begin_step", "end_step")} | {"tokens": pl.lit(0)}
    values = missing | columns
    own = {name: values.get(name, pl.col(name)).cast(dtype) for name, dtype in PIECE_SCHEMA.items()}
    return frame.select(**own)


def placed(steps: pl.DataFrame) -> pl.DataFrame:
    """Return ``step`` (sorted), ``place`` (its index), ``start_us`` and ``output_us`` of each step."""
    place = pl.int_range(steps.height, eager=True).alias("place")
    return steps[["step", "start_us", "output_us"]].insert_column(0, place)


def place_of(rows: pl.DataFrame, steps: pl.DataFrame, column: str, name: str) -> pl.DataFrame:
    """Add as ``name`` the index of the first step with a number of at least ``column``.

    If there is no such step, it is the number of steps.
    """
    place = steps["step"].to_numpy().searchsorted(rows[column].to_numpy())
    return rows.hstack([pl.Series(name, place, dtype=pl.Int64)])


def cause_runs(
    spans: pl.DataFrame, usual: pl.Series, named: pl.DataFrame, steps: pl.DataFrame
) -> pl.DataFrame:
    """Return one row per span and series of steps with the same cause, in order.

    Args:
        spans: ``request_id``, and ``first`` and ``end``: the places of the first step of the span and of the
            first step after it. Other columns are kept.
        usual: Cause, by step, for requests that no skip in the step names.
        named: ``step``, ``request_id``, ``cause``: requests that a skip names.
        steps: ``placed(frames.steps)``.

    Returns:
        The columns of ``spans``, ``cause``, and ``place`` and ``last``: places of the first and last step.
    """
    spans = spans.filter(pl.col("end") > pl.col("first")).with_row_index("span")
    if spans.is_empty():
        columns = {"place": pl.Int64, "cause": pl.String, "last": pl.Int64}
        return spans.drop("span").with_columns(
            pl.lit(None, dtype).alias(name) for name, dtype in columns.items()
        )
    changes = _step_changes(spans, usual)
    if not named.is_empty():
        changes = pl.concat([changes, _name_changes(spans, usual, named, steps)])
    changes = changes.sort("span", "place", "weight").unique(
        ["span", "place"], keep="last", maintain_order=True
    )
    kind = ["span", "cause"]
    changed = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in kind)
    return (
        changes.filter(changed)
        .with_columns(last=pl.col("place").shift(-1).over("span").fill_null(pl.col("end")) - 1)
        .drop("span", "weight")
    )


def _step_changes(spans: pl.DataFrame, usual: pl.Series) -> pl.DataFrame:
    """Return the places at which the usual cause changes, for each span."""
    import numpy as np  # noqa: PLC0415  # the command line must answer before it is loaded

    run = usual.rle_id().to_numpy().astype(np.int64)
    begins = np.flatnonzero(np.diff(run, prepend=-1))
    first, end = (spans[name].to_numpy() for name in ("first", "end"))
    counts = run[end - 1] - run[first] + 1
    span = np.repeat(np.arange(spans.height), counts)
    nth = np.arange(len(span)) - np.repeat(counts.cumsum() - counts, counts)
    place = np.maximum(begins[run[first][span] + nth], first[span])
    return spans[span].with_columns(
        pl.Series("place", place), usual.gather(place).alias("cause"), weight=_weight(0)
    )


def _name_changes(
    spans: pl.DataFrame, usual: pl.Series, named: pl.DataFrame, steps: pl.DataFrame
) -> pl.DataFrame:
    """Return the places of steps whose skips name a request, and of the steps right after these."""
    latest = named.drop_nulls().unique(["step", "request_id"], keep="last", maintain_order=True)
    own = (
        place_of(latest, steps, "step", "place")
        .join(spans, on="request_id", maintain_order="left")
        .filter((pl.col("first") <= pl.col("place")) & (pl.col("place") < pl.col("end")))
        .select(*spans.columns, "place", "cause", weight=_weight(2))
    )
    if own.is_empty():
        return own
    after = own.with_columns(pl.col("place") + 1).filter(pl.col("place") < pl.col("end"))
    return pl.concat(
        [own, after.with_columns(usual.gather(after["place"]).alias("cause"), weight=_weight(1))]
    )


def _weight(value: int) -> pl.Expr:
    """Return the weight of a change; of several changes at one place, the heaviest counts."""
    return pl.lit(value, pl.Int8)


def waiting_pieces(frames: EngineFrames, steps: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Return a piece for each series of steps in which a request waited for the same reason."""
    if waits.is_empty():
        return pl.DataFrame(schema=PIECE_SCHEMA)
    queued = waits[["request_id", "since_step", "left_step", "preempted", "set_aside"]]
    queued = place_of(place_of(queued, steps, "since_step", "first"), steps, "left_step", "end")
    named = frames.exits.filter(_skips())[["step", "request_id", "cause"]]
    runs = cause_runs(queued, loop_ends(frames), named, steps)
    number = steps["step"]
    return piece_table(
        runs.with_columns(
            since_us=steps["start_us"].gather(runs["place"]),
            begin_step=number.gather(runs["place"]),
            end_step=number.gather(runs["last"]),
        ),
        rank=pl.lit(WAITS),
        state=pl.when("preempted")
        .then(pl.lit("preempted"))
        .when("set_aside")
        .then(pl.lit("set_aside"))
        .otherwise(pl.lit("waiting")),
        **{name: pl.col(name) for name in ("cause", "begin_step", "end_step")},
    )


def arrival_pieces(frames: EngineFrames) -> pl.DataFrame:
    """Return the pieces of requests between the front end and the first step that can schedule them."""
    if frames.first_arrivals.is_empty():
        return pl.DataFrame(schema=PIECE_SCHEMA)
    first = {"place": pl.lit(-1)}
    arrivals = _where_known(frames, frames.first_arrivals)
    through_front_end = arrivals.filter(pl.col("arrived_us") < pl.col("queued_us"))
    return pl.concat(
        [
            piece_table(
                through_front_end,
                since_us=pl.col("arrived_us"),
                rank=pl.lit(ARRIVES),
                state=pl.lit("front_end"),
                **first,
            ),
            piece_table(
                arrivals,
                since_us=pl.col("queued_us"),
                rank=pl.lit(WAITS),
                state=pl.lit("waiting"),
                cause=pl.lit(NEXT_STEP),
                **first,
            ),
        ]
    )


def present_pieces(frames: EngineFrames, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the pieces of requests that were present when the trace began, or after a gap."""
    if frames.there_first.is_empty() and frames.there_after.is_empty():
        return pl.DataFrame(schema=PIECE_SCHEMA)
    first = frames.there_first.with_columns(next_step=pl.lit(0, pl.Int64))
    there = pl.concat([first, frames.there_after], how="diagonal")
    there = place_of(there, steps, "next_step", "first_place")
    runs = pl.col("state") == "running"
    again = pl.col("computed_tokens") < known_loss()
    computes = (
        pl.when(again).then(pl.lit("recompute")).when(pl.col("output_tokens") > 0).then(pl.lit("decode"))
    )
    waits = pl.when(was_preempted()).then(pl.lit("preempted")).otherwise(pl.lit("waiting"))
    origin = {"place": pl.col("first_place") - 1, "rank": pl.lit(TOLD)}
    # The recorder tells who is there when a step ends: the output of its first token may be in flight.
    in_flight = (
        runs & ~again.fill_null(value=False) & (pl.col("first_token_us") > pl.col("at_us"))
    ).fill_null(value=False)
    state = pl.when(runs).then(computes.otherwise(pl.lit("prefill"))).otherwise(waits)
    return pl.concat(
        [
            piece_table(
                there,
                since_us=pl.col("at_us"),
                state=pl.when(in_flight).then(pl.lit("prefill")).otherwise(state),
                cause=pl.when(~runs).then(pl.lit(NEXT_STEP)),
                **origin,
            ),
            piece_table(
                there.filter(in_flight), since_us=pl.col("first_token_us"), state=pl.lit("decode"), **origin
            ),
        ]
    )


def _where_known(frames: EngineFrames, arrivals: pl.DataFrame) -> pl.DataFrame:
    """Let a request's life begin at the next recorded step if the step after its arrival is missing."""
    gaps, arrivals = after_gaps(frames), next_steps(frames, arrivals, "queued_us")
    if gaps.is_empty():
        return arrivals
    unknown = pl.col("next_step").is_in(pl.lit(gaps).implode()) & pl.col("step").is_null()
    since = pl.when(unknown).then(pl.max_horizontal("queued_us", "begin_us")).otherwise("queued_us")
    return arrivals.with_columns(
        queued_us=since, arrived_us=pl.when(unknown).then(None).otherwise("arrived_us")
    )


def waits_for(frames: EngineFrames) -> tuple[str | None, dict[str, str]]:
    """Return the usual cause of waiting after the last step, and the requests with a different cause.

    The cause is None if there is no step.
    """
    if frames.steps.is_empty():
        return None, {}
    named = frames.exits.filter(_skips() & (pl.col("step") == frames.steps["step"][-1]))
    causes = named[["request_id", "cause"]].drop_nulls().iter_rows()
    return str(loop_ends(frames)[-1]), dict(causes)


def _skips() -> pl.Expr:
    """Select the exits that pass over a request and continue with the next one."""
    return (pl.col("loop") == "waiting") & (pl.col("kind") == "continue")


def loop_ends(frames: EngineFrames) -> pl.Series:
    """Return, for each step, the cause of waiting of the requests that no skip names."""
    # An empty queue cannot be why a request in it waits.
    unexplained = pl.col("waiting_cause") == str(Cause.QUEUE_EMPTY)
    cause = pl.when(unexplained).then(OTHER).otherwise(pl.col("waiting_cause"))
    return frames.steps.select(cause.fill_null(OTHER).alias("cause"))["cause"]


ADMISSION = ["request_id", "admission"]


def running_pieces(frames: EngineFrames, steps: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """Return the pieces of all running requests.

    Args:
        frames: One engine's trace.
        steps: ``placed(frames.steps)``.
        ends: ``request_id`` and ``end_us``: the time at which the request left, or the trace ended.
    """
    portions = _portions(frames, steps)
    lost = place_of(frames.preemptions[["request_id", "step"]], steps, "step", "lost_place")
    queued = frames.set_aside[["request_id", "step"]]
    if not frames.there_after.is_empty():
        again = frames.there_after.filter(pl.col("state") != "running")
        queued = pl.concat([queued, again.select("request_id", step="next_step")])
    queued = place_of(queued, steps, "step", "lost_place")
    stalled = _stalls(frames, steps, portions, ends, pl.concat([lost, queued]))
    stalled_pieces = _stalled_pieces(frames, stalled)
    if portions.is_empty():
        return stalled_pieces
    resumed = stalled.select("request_id", place="resume_place", after_stall=pl.lit(value=True)).unique()
    behind = frames.gaps["next_step"].sort()
    portions = portions.hstack(
        [pl.Series("gap", behind.search_sorted(portions["step"], side="right"), dtype=pl.Int64)]
    )
    begins = pl.col("gap") > pl.col("gap").shift(1).over("request_id")  # behind a gap of the trace
    runs = (
        portions.join(resumed, on=["request_id", "place"], how="left", maintain_order="left")
        .with_columns(
            after_stall=pl.col("after_stall").fill_null(value=False) | begins.fill_null(value=False)
        )
        .with_columns(run=pl.col("after_stall").cum_sum().over("request_id"))
        .group_by(*ADMISSION, "decodes", "run", maintain_order=True)
        .agg(
            pl.col("place", "step", "state", "output_us", "output_place", "after_stall").first(),
            pl.col("last_step").last(),
            pl.col("tokens").sum(),
        )
    )
    began = pl.lit(steps["start_us"]).gather("place")
    back = pl.coalesce("output_us", began)  # null: the step before the first of the trace
    resumes = pl.when("after_stall").then(pl.max_horizontal(began, back)).otherwise(back)
    runs = runs.with_columns(since_us=pl.when("decodes").then(resumes).otherwise(began))
    last_lost = lost.group_by("request_id").agg(pl.col("lost_place").max())
    # One that ends with its first token never decodes; one whose end is not recorded lives on.
    has_end = pl.col("request_id").is_in(pl.lit(frames.finishes["request_id"]).implode())
    lost_again = pl.col("lost_place") > pl.col("output_place")
    goes_on = pl.col("decodes").any().over(ADMISSION) | lost_again | ~has_end
    first = (
        runs.join(last_lost, on="request_id", how="left", maintain_order="left")
        .filter(pl.col("output_us").is_not_null() & goes_on)
        .unique(ADMISSION, keep="first", maintain_order=True)
    )
    return pl.concat(
        [
            piece_table(
                runs,
                rank=pl.when("decodes").then(pl.lit(DECODES)).otherwise(pl.lit(COMPUTES)),
                begin_step=pl.col("step"),
                end_step=pl.col("last_step"),
                tokens=pl.col("tokens"),
            ),
            # A stall or a preemption may come between its first token and the step that decodes the next.
            piece_table(
                first,
                place=pl.col("output_place"),
                since_us=pl.col("output_us"),
                rank=pl.lit(DECODES),
                state=pl.lit("decode"),
            ),
            stalled_pieces,
        ]
    )


def _stalled_pieces(frames: EngineFrames, stalled: pl.DataFrame) -> pl.DataFrame:
    """Return one piece for each row of ``_stalls``."""
    if stalled.is_empty():
        return pl.DataFrame(schema=PIECE_SCHEMA)
    return piece_table(
        stalled,
        rank=pl.lit(WAITS),
        state=pl.when(_is_session(frames)).then(pl.lit("waiting")).otherwise(pl.lit("stalled")),
        **{name: pl.col(name) for name in ("cause", "begin_step", "end_step")},
    )


NO_PORTIONS = {"request_id": pl.String, "admission": pl.UInt32, "place": pl.Int64, "last_place": pl.Int64}
"""Columns of portions that are needed to find stalls."""


def _portions(frames: EngineFrames, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the scheduled portions of requests, cut at the first token after an admission.

    Columns: ``request_id``, ``admission`` (its number for this request), ``decodes``, ``state``, ``step`` and
    ``last_step`` with their places ``place`` and ``last_place``, and ``tokens``. For the admission's first
    token, ``output_us`` is its time and ``output_place`` the place of its step; null if there was no token.
    """
    stretches = frames.with_work(frames.measured_stretches.collect()).sort("request_id", "step")
    if stretches.is_empty():
        return pl.DataFrame(schema=NO_PORTIONS)
    stretches = place_of(stretches, steps, "step", "place").with_columns(
        admission=(pl.col("phase") != "running").cum_sum().over("request_id")
    )
    missing_tokens = _known_tokens() - pl.col("computed_tokens")
    tokens_a_step = pl.col("scheduled_tokens").clip(1)
    computing_steps = (-(-missing_tokens // tokens_a_step)).clip(0, pl.col("last_step") - pl.col("step") + 1)
    before = stretches.with_columns(missing_tokens=missing_tokens, computing_steps=computing_steps)
    computing = before.filter(pl.col("computing_steps") > 0).with_columns(
        last_step=pl.col("step") + pl.col("computing_steps") - 1,
        decodes=pl.lit(value=False),
        reached=pl.col("computing_steps") * pl.col("scheduled_tokens") >= pl.col("missing_tokens"),
    )
    decoding = before.filter(pl.col("step") + pl.col("computing_steps") <= pl.col("last_step")).with_columns(
        step=pl.col("step") + pl.col("computing_steps"),
        place=pl.col("place") + pl.col("computing_steps"),
        decodes=pl.lit(value=True),
        reached=pl.lit(value=False),
    )
    length = pl.col("last_step") - pl.col("step") + 1
    last_place = pl.col("place") + length - 1
    output_place = last_place.filter("reached").min().over(ADMISSION)
    computes = pl.when(pl.col("lost_tokens") > 0).then(pl.lit("recompute")).otherwise(pl.lit("prefill"))
    return (
        pl.concat([computing, decoding])
        .sort("request_id", "step")
        .with_columns(
            last_place=last_place,
            tokens=length * pl.col("scheduled_tokens").fill_null(0),
            output_place=output_place,
            output_us=pl.lit(steps["output_us"]).gather(output_place),
            state=pl.when("decodes").then(pl.lit("decode")).otherwise(computes),
        )
    )


def _known_tokens() -> pl.Expr:
    """Return how many tokens of an admitted request must be computed before its next token comes back.

    If output tokens are among them, the last one had been sampled but not computed before the preemption. A
    request that finds all its lost tokens in a cache decodes at once.
    """
    lost = pl.col("lost_tokens")
    recomputes = pl.col("computed_tokens").first().over(ADMISSION) < lost
    sampled = (lost >= pl.col("prompt_tokens")) & recomputes
    return pl.max_horizontal("prompt_tokens", lost) + sampled.fill_null(value=False).cast(pl.Int64)


STALL_SCHEMA = {
    "request_id": pl.String,
    "place": pl.Int64,
    "since_us": pl.Int64,
    "cause": pl.String,
    "begin_step": pl.Int64,
    "end_step": pl.Int64,
    "resume_place": pl.Int64,
}


def _stalls(
    frames: EngineFrames, steps: pl.DataFrame, portions: pl.DataFrame, ends: pl.DataFrame, lost: pl.DataFrame
) -> pl.DataFrame:
    """Return the series of steps that did not schedule a running request, with one row per cause.

    ``lost`` has the place of each preemption, and of each step that found a request set aside.
    Columns of the result: ``STALL_SCHEMA``; ``resume_place`` is the place of the step that scheduled the
    request again.
    """
    if portions.is_empty() and frames.there_first.is_empty():
        return pl.DataFrame(schema=STALL_SCHEMA)
    scheduled = portions[[*NO_PORTIONS]]
    if not frames.there_first.is_empty():
        origin = {"admission": 0, "place": BEFORE, "last_place": BEFORE}
        ran = frames.there_first.filter(pl.col("state") == "running").select(
            "request_id", *(pl.lit(at, portions.schema[name]).alias(name) for name, at in origin.items())
        )
        scheduled = pl.concat([ran, scheduled])
    gone_place = steps["start_us"].search_sorted(ends["end_us"], side="left")
    gone = ends.hstack([pl.Series("gone_place", gone_place, dtype=pl.Int64)])
    again = pl.coalesce("next_place", "gone_place")
    gaps = (
        scheduled.with_columns(next_place=pl.col("place").shift(-1).over(ADMISSION))
        .join(gone, on="request_id", how="left", maintain_order="left")
        .filter(again > pl.col("last_place") + 1)
    )
    if gaps.is_empty():
        return pl.DataFrame(schema=STALL_SCHEMA)
    gaps = (
        gaps.drop("place")
        .sort("last_place")
        .join_asof(
            lost[["request_id", "lost_place"]].sort("lost_place"),
            left_on="last_place",
            right_on="lost_place",
            by="request_id",
            strategy="forward",
            allow_exact_matches=False,
            check_sortedness=False,
            coalesce=False,
        )
        # The step that resumed it may be missing, in a gap of the trace: then no later admission tells.
        .with_columns(resume_place=pl.min_horizontal(again, "lost_place"))
        .filter(pl.col("resume_place") > pl.col("last_place") + 1)
    )
    if gaps.is_empty():
        return pl.DataFrame(schema=STALL_SCHEMA)
    last = max(0, steps.height - 1)
    over_us = steps["start_us"].gather(gaps["resume_place"].clip(0, last)) if steps.height else gaps["end_us"]
    over = pl.when(pl.col("resume_place") <= last).then(over_us).otherwise("end_us")
    gaps = gaps.with_columns(
        first=pl.col("last_place") + 1,
        end="resume_place",
        back_us=_at(steps["output_us"], gaps["last_place"]).fill_null(0),
        over_us=pl.min_horizontal(over, "end_us"),
    )
    usual, named = _causes(frames)
    # Between two parts a session is no longer running but in the queue, its blocks kept.
    if frames.sessions.is_empty():
        runs = cause_runs(gaps, usual, named, steps)
    else:
        in_queue = gaps.filter(_is_session(frames))
        runs = pl.concat(
            [
                cause_runs(gaps.filter(~_is_session(frames)), usual, named, steps),
                cause_runs(in_queue, loop_ends(frames), named, steps),
            ]
        )
    number, starts = steps["step"], steps["start_us"]
    next_us = pl.lit(starts.gather((runs["last"] + 1).clip(0, last)))
    ended = pl.when(pl.col("last") + 1 < pl.col("end")).then(next_us).otherwise("over_us")
    return (
        runs.with_columns(
            since_us=pl.max_horizontal(starts.gather(runs["place"]), "back_us"),
            ends_us=pl.min_horizontal(ended, "over_us"),
            begin_step=number.gather(runs["place"]),
            end_step=number.gather(runs["last"]),
        )
        .filter((pl.col("cause") != str(Cause.OUTPUT_IN_FLIGHT)) & (pl.col("since_us") < pl.col("ends_us")))
        .select(*STALL_SCHEMA)
    )


def _at(values: pl.Series, places: pl.Series) -> pl.Series:
    """Return the values at these places; null for ``BEFORE``."""
    return values.gather(pl.select(pl.when(places >= 0).then(places)).to_series())


def _is_session(frames: EngineFrames) -> pl.Expr:
    return pl.col("request_id").is_in(pl.lit(frames.sessions).implode())


def _causes(frames: EngineFrames) -> tuple[pl.Series, pl.DataFrame]:
    """Return each step's cause for leaving out running requests, and the requests its refusals name.

    A request that a step does not name was skipped together with too many requests to name, or was not
    reached; its cause is then the exit that ended the running loop.
    """
    exits = frames.exits.filter("refusal")
    in_loop = exits.filter(pl.col("loop") == "running")
    named = exits.filter(pl.col("request_id").is_not_null())[["step", "request_id", "cause"]]
    if in_loop.is_empty():
        return pl.Series("cause", [str(Cause.OTHER)]).new_from_index(0, frames.steps.height), named
    skips = (pl.col("kind") == "continue") & pl.col("request_id").is_null()
    unnamed = in_loop.filter(skips).unique("step", keep="last").select("step", skipped="cause")
    ended = (
        in_loop.filter(pl.col("kind") != "continue").unique("step", keep="last").select("step", ended="cause")
    )
    usual = (
        frames.steps[["step"]]
        .join(unnamed, on="step", how="left", maintain_order="left")
        .join(ended, on="step", how="left", maintain_order="left")
        .select(cause=pl.coalesce("skipped", "ended", OTHER))
    )
    return usual["cause"], named
