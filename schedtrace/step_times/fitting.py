"""Rows of recorded steps, and fits of every part of a step's time to these rows, with their errors.

``observed`` lists the steps of a trace, with the work and the time of each part. A time is a sum of costs, or
the larger of two sums (``cost_sums``): the time of computing and the time of reading memory. For ranks in
lock-step, the fits also determine which rank a pass waited for, and how long an all-reduce takes.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import polars as pl

from schedtrace.errors import InputError
from schedtrace.model.trace import Header
from schedtrace.read.trace import Trace
from schedtrace.step_times.batch import graph_sizes, graph_use
from schedtrace.step_times.cost_sums import (
    FEWEST_OF_A_SUM,
    Larger,
    Linear,
    fit_larger,
    fit_linear,
    is_clearly_less,
    mean_log_error,
)
from schedtrace.timeline.spans import at_steps, level, overlap_us
from schedtrace.timeline.step_time import FEWEST_STEPS
from schedtrace.timeline.timeline import Timeline

RECORDED = (
    "step",
    "trial",
    "total_requests",
    "used_tokens",
    "start_us",
    "busy_us",
    "schedule_us",
    "update_us",
    "execute_after_us",
    "execute_us",
    "execution_us",
    "wave",
    "step_counter",
)
"""Columns of the timeline's steps that fits use."""
OF_BATCH = (
    "prefill_tokens",
    "prefill_requests",
    "prefill_attention",
    "decode_tokens",
    "decode_requests",
    "decode_context_tokens",
)
"""Columns with the names and meanings of the fields of ``Batch``."""
WORKER_CLOCK_FRAC = 0.9
"""Minimum share of the steps with tokens that must have a time by the worker's clock for that clock to be
used."""
DEVICE = ("prefill_tokens", "decode_requests", "decode_context_tokens", "prefill_attention")
"""Columns to which the device's time is fitted. The number of prefill requests is not among them: if prompts
are not cut into chunks, requests and tokens grow together, and their costs cannot be separated."""
ALIKE = ("prefill_tokens", "decode_requests")
"""Columns that share one cost if the steps show no separate cost of a decode: to a device, both are tokens.
"""
MEMORY = ("decode_requests", "decode_context_tokens")
BATCH = "batch_tokens"
COMPUTE = (BATCH, "prefill_attention")
"""Columns of the time of computing and, in ``MEMORY``, of the time of reading. A device reads weights and KV
cache while it computes, and the slower activity sets the time (the roofline model: Williams et al., CACM
52(4), 2009). Tokens therefore cost nothing until computing takes longer than reading."""
PADDING = "padding_tokens"
GRAPHS = (PADDING, "eager_steps")
"""Columns of an engine with captured graphs: the tokens that pad a batch to the next captured size, and 1 for
a batch beyond the largest size, whose kernels are launched one by one."""
PREFILL_STEPS = ("prefill_steps",)
"""Column that is 1 for a step with prefill. Its cost is the time that a device spends on any prefill, however
few its tokens, for example because the batch has no full CUDA graph. It is used only if the steps then fit
clearly better."""
DRAFTS = ("draft_tokens",)
"""Columns of an engine with speculative decoding; without a cost if every step drafts the same number of
tokens."""
SCHEDULE = ("requests", "prefill_tokens")
UPDATE = ("requests",)
GAP = ("arrivals",)
RANK_ROUNDS = 4
"""Maximum number of rounds; each determines the slowest rank of every pass from the latest fit, and fits to
these ranks again."""
PASS = ("trial", "wave", "step_counter")
"""Columns that identify a forward pass of ranks in lock-step."""
NO_TIME = Linear(0.0, {}, [], {}, 0)
HELD_OUT_FROM = (1 / 2, 1 / 4)
"""Shares of a column's largest value above which steps are held out."""
FEWEST_LEFT_FRAC = 0.1
"""Minimum share of the steps that must remain for a fit, because a fit to too few steps has another error."""
USUAL_PER_DOUBLING = math.log(2) / math.sqrt(12)
"""Default error per doubling: the standard deviation if doubled work takes between one and two times as long,
with equal probability on a log scale."""
USUAL_DOUBLINGS = 1.0
"""Doublings of held-out steps at which their evidence weighs as much as ``USUAL_PER_DOUBLING``."""
MOST_HELD_OUT = 500
"""Maximum number of held-out steps whose distance is computed."""


def observed(timeline: Timeline) -> pl.DataFrame:
    """Return one row per step, in order.

    Columns: those of ``RECORDED``; ``first``, whether it is the trial's first step with tokens; those of
    ``OF_BATCH``, and ``requests``, null if not recorded; ``device_us`` (see ``with_device_us``); ``gap_us``,
    the time from the last update to this ``schedule()``, and ``arrivals``, the number of requests that
    arrived in that time, both null if the engine was idle in between or did not wait for an output;
    ``wake_us``, for a step that ended an idle time: the time that its first request spent in the input queue,
    null if not recorded.
    """
    works = pl.col("total_requests") > 0
    rows = (
        timeline.steps.select(*RECORDED)
        .join(_batches(timeline), on="step", how="left", maintain_order="left")
        .join(_gaps(timeline), on="step", how="left", maintain_order="left")
        .join(_wakes(timeline), on="step", how="left", maintain_order="left")
        .with_columns(
            first=works & (works.cast(pl.Int64).cum_sum().over("trial") == 1),
            requests=pl.col("prefill_requests") + pl.col("decode_requests"),
        )
    )
    # Where the trace does not know a request's prompt, or records no requests, the sums would be too small.
    tokens = pl.col("prefill_tokens") + pl.col("decode_tokens")
    complete = (tokens == pl.col("used_tokens")) & (pl.col("requests") == pl.col("total_requests"))
    columns = (pl.when(complete).then(name).alias(name) for name in (*OF_BATCH, "requests"))
    header = timeline.header
    overlapped = (header.batches_in_flight or 1) > 1 or bool(header.async_scheduling)
    return with_device_us(rows.with_columns(columns), overlapped=overlapped)


def with_device_us(rows: pl.DataFrame, *, overlapped: bool) -> pl.DataFrame:
    """Add ``device_us``: how long a batch kept the device, from when it could begin; null without tokens.

    A synchronous engine waits for all of ``busy_us``. With several batches in flight, an output may be ready
    before the host takes it. In that case, if the worker's clock is recorded, ``device_us`` is
    ``execution_us`` plus the time from dispatch to execution in which the worker had nothing to execute.
    """
    works = rows.filter(pl.col("total_requests") > 0)
    recorded = works["execute_us"].is_not_null().sum() >= WORKER_CLOCK_FRAC * works.height
    began = pl.col("start_us") + pl.col("execute_after_us")
    free = (began + pl.col("execute_us")).cum_max().forward_fill().shift(1).fill_null(0)
    dispatch_us = (began - pl.max_horizontal(pl.col("start_us") + pl.col("schedule_us"), free)).clip(0)
    took = pl.col("execution_us") + dispatch_us if overlapped and recorded else pl.col("busy_us")
    return rows.with_columns(device_us=pl.when(pl.col("total_requests") > 0).then(took))


def _batches(timeline: Timeline) -> pl.DataFrame:
    """Return ``OF_BATCH`` of each step; a stretch is cut where its request begins to decode."""
    got, computed = pl.col("scheduled_tokens"), pl.col("computed_tokens")
    length = pl.col("last_step") - pl.col("step") + 1
    missing = pl.max_horizontal("prompt_tokens", "lost_tokens") - computed
    stretches = (
        timeline.with_work(timeline.stretches.filter(got > 0).collect())
        .filter(pl.col("prompt_tokens").is_not_null())
        .with_columns(prefill_steps=((missing + got - 1) // got).clip(0, length))
    )
    decodes_from = pl.col("step") + pl.col("prefill_steps")
    prefill = stretches.filter(pl.col("prefill_steps") > 0).with_columns(last_step=decodes_from - 1)
    decode = stretches.filter(pl.col("prefill_steps") < length).with_columns(
        step=decodes_from, computed_tokens=computed + pl.col("prefill_steps") * got
    )
    parts = pl.concat(
        [
            _parts(prefill, "prefill", got, 2 * got * computed + got * got, 2 * got * got),
            _parts(decode, "decode", got, computed, got),
        ],
        how="diagonal",
    ).fill_null(0)
    summed = {name: name for name in parts.columns if name not in {"step", "last_step"}}
    sums = at_steps(level(parts, "step", pl.col("last_step") + 1, **summed), timeline.steps.select("step"))
    attention, context = (
        pl.col(f"{kind}_at_zero") + pl.col("step") * pl.col(f"{kind}_slope") for kind in ("prefill", "decode")
    )
    return sums.with_columns(prefill_attention=attention / 2, decode_context_tokens=context).select(
        "step", *OF_BATCH
    )


def _parts(
    stretches: pl.DataFrame, kind: str, tokens: pl.Expr, value: pl.Expr, slope: pl.Expr
) -> pl.DataFrame:
    """Return what each stretch adds to its steps: ``value`` in the first, then ``slope`` more each time."""
    return stretches.select(
        "step",
        "last_step",
        tokens.alias(f"{kind}_tokens"),
        pl.lit(1, pl.Int64).alias(f"{kind}_requests"),
        slope.alias(f"{kind}_slope"),
        (value - pl.col("step") * slope).alias(f"{kind}_at_zero"),
    )


def _gaps(timeline: Timeline) -> pl.DataFrame:
    """Return ``step``, ``gap_us`` (the host's time since the update before each step) and ``arrivals``."""
    updated = (
        timeline.steps.filter((pl.col("total_requests") > 0) & pl.col("update_us").is_not_null())
        .select(begin_us=pl.col("output_us") + pl.col("update_us"))
        .sort("begin_us")
    )
    steps = timeline.steps.select("step", end_us="start_us").sort("end_us")
    gaps = (
        steps.with_columns(before_us=pl.col("end_us").shift(1))
        .join_asof(updated, left_on="end_us", right_on="begin_us", coalesce=False)
        .filter(pl.col("before_us") < pl.col("begin_us"))
    )
    idle = timeline.engine_states.filter(pl.col("state") == "idle")
    queued = timeline.arrivals.select(pl.col("queued_us").cast(pl.Int64)).sort("queued_us")
    queued = queued.with_row_index("arrived", 1).with_columns(pl.col("arrived").cast(pl.Int64))

    def arrived_before(moment: str) -> pl.Series:
        moments = gaps.select(pl.col(moment).cast(pl.Int64))
        return moments.join_asof(queued, left_on=moment, right_on="queued_us")["arrived"].fill_null(0)

    return (
        gaps.with_columns(
            arrivals=arrived_before("end_us") - arrived_before("begin_us"), idle_us=overlap_us(gaps, idle)
        )
        .filter(pl.col("idle_us") == 0)
        .select("step", "arrivals", gap_us=pl.col("end_us") - pl.col("begin_us"))
    )


def _wakes(timeline: Timeline) -> pl.DataFrame:
    """Return ``step`` and ``wake_us``: the time until an idle engine took in the request that woke it."""
    work = pl.col("num_running_after") + pl.col("num_waiting_after")
    idle = timeline.steps.sort("step").filter(
        (pl.col("total_requests").shift(1).fill_null(0) == 0) & (work.shift(1).fill_null(0) == 0)
    )
    arrivals = (
        timeline.arrivals.filter(pl.col("input_queue_us").is_not_null())
        .group_by("step")
        .agg(wake_us=(pl.col("queued_us").min() - pl.col("input_queue_us").min()).cast(pl.Float64))
    )
    return idle.select("step").join(arrivals, on="step").filter(pl.col("wake_us") >= 0)


def with_engine_columns(rows: pl.DataFrame, header: Header) -> pl.DataFrame:
    """Add columns for features of this engine: captured graphs, and drafts."""
    if sizes := graph_sizes(header):
        tokens = rows.select(pl.col("prefill_tokens") + pl.col("decode_tokens")).to_series()
        use = [graph_use(count, sizes) for count in tokens.to_list()]
        columns = dict(zip(GRAPHS, zip(*use, strict=True), strict=True)) if use else {}
        rows = rows.with_columns(pl.Series(name, values, pl.Int64) for name, values in columns.items())
    if header.settings.get("num_speculative_tokens"):
        rows = rows.with_columns(draft_tokens=pl.col("decode_tokens") - pl.col("decode_requests"))
    return rows


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Source of a fit."""

    runs: list[str]
    vllm_version: str
    model: str
    device: str
    host: str
    recorded_at: str
    """ISO 8601, UTC: when the first trace began."""
    schedtrace_version: str
    """Version of schedtrace that made the fit."""


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """Distance of the device's times from the fit, as logarithms of measured / fitted."""

    median_abs_log: float
    p90_abs_log: float
    lag1: float | None
    """Correlation of neighbouring steps' residuals; null if residuals do not vary."""
    total_frac: float
    """Total measured time divided by total fitted time, minus 1: the effect of outliers."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Fit as it is saved in a file."""

    source: Source
    device: Larger
    schedule: Linear
    update: Linear
    gap: Linear
    wake_us: float = 0.0
    """Median time until an idle engine took a request in, in microseconds; 0 if it is not recorded."""
    graph_sizes: list[int] = []
    """Sizes of the captured graphs in tokens, in order; empty if there are none, or they are not recorded."""
    gathering_us: float | None = None
    """Microseconds that gathering a number from all ranks adds to ``gap``; null if not recorded."""
    missing: list[str]
    """Names of the parts (``schedule``, ``update``, ``gap``) that were not recorded and are taken as 0."""
    first_step_us: float | None
    """Microseconds by which the first step of a trial took longer than its batch explains, median over
    trials; not part of ``device``. Null if no first step has an output."""
    error: Error
    residuals: list[list[float]]
    """Residuals by trial, in order: log of measured / fitted."""
    trial_levels: list[float]
    """Logarithm of total measured / fitted time, by trial. The spread of these values is the drift between
    trials."""


def fit_rows(rows: pl.DataFrame, source: Source, like: Fit | None = None) -> Fit:
    """Fit the rows of ``observed``; their column ``part`` numbers the trials of all traces.

    Args:
        rows: Rows of one model on one device, with ``GRAPHS`` and ``DRAFTS`` if the engine has these columns.
        source: Source of the rows.
        like: Fit whose form to use instead of searching for the best form; values that the rows do not show
            are taken from it.

    Raises:
        InputError: If too few steps have an output and known requests.
    """
    rows = with_sums(rows)
    later = rows.filter(~pl.col("first"))
    device = fit_device(later, like.device if like else None)
    if device is None:
        msg = f"{', '.join(source.runs)}: too few steps with known requests and times to fit step times to"
        raise InputError(msg)
    host = {
        "schedule": fit_linear(later, "schedule_us", SCHEDULE),
        "update": fit_linear(later, "update_us", UPDATE),
        "gap": fit_linear(later, "gap_us", GAP),
    }
    priced = rows.drop_nulls(("device_us", *DEVICE)).filter(pl.col("device_us") > 0)
    priced = priced.with_columns(fitted_us=device.expr()).with_columns(
        log=(pl.col("device_us") / pl.col("fitted_us")).log()
    )
    first = priced.filter("first").select((pl.col("device_us") - pl.col("fitted_us")).clip(0).median()).item()
    priced = priced.filter(~pl.col("first"))
    totals = priced.group_by("part", maintain_order=True).agg(
        "log", level=(pl.col("device_us").sum() / pl.col("fitted_us").sum()).log()
    )
    return Fit(
        source=source,
        device=device,
        **{name: part or NO_TIME for name, part in host.items()},
        wake_us=rows["wake_us"].median() or 0.0,  # type: ignore[arg-type]  # a column of numbers
        gathering_us=like.gathering_us if like else None,
        graph_sizes=like.graph_sizes if like else [],
        missing=[name for name, part in host.items() if part is None],
        first_step_us=first,
        error=_error(priced),
        residuals=[[round(residual, 4) for residual in trial] for trial in totals["log"].to_list()],
        trial_levels=totals["level"].to_list(),
    )


def fit_device(rows: pl.DataFrame, like: Larger | None) -> Larger | None:
    """Fit the device's time to the columns of these rows; ``like`` is the same as in ``fit_rows``."""
    rows = with_sums(rows)
    own = [name for name in (*GRAPHS, *DRAFTS) if name in rows.columns]

    def fitted(*more: str) -> Larger | None:
        columns = (*own, *more)
        two = ((*MEMORY, *columns), (*COMPUTE, *columns))
        return fit_larger(rows, "device_us", (*DEVICE, *columns), two, like, ALIKE)

    if like is not None:
        own = [name for name in own if name in like.columns]
        return fitted(*(name for name in PREFILL_STEPS if name in like.columns))
    plain = fitted()
    if plain is not None and any(
        part.factors.get(PADDING, 0.0) > 2 * max(part.factors.get(name, 0.0) for name in (*ALIKE, BATCH))
        for part in plain.parts
    ):  # padding cannot cost more than twice as much as tokens: another reason made the padded steps slow
        own.remove(PADDING)
        plain = fitted()
    of_steps = fitted(*PREFILL_STEPS)
    if plain is None or of_steps is None:
        return plain
    used = rows.drop_nulls(("device_us", *DEVICE)).filter(pl.col("device_us") > 0)
    error, error_of_steps = (mean_log_error(used, "device_us", fit) for fit in (plain, of_steps))
    return of_steps if is_clearly_less(error_of_steps, error) else plain


def with_sums(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the columns that are derived from others: all tokens, and whether there is prefill."""
    return rows.with_columns(
        batch_tokens=pl.col("prefill_tokens") + pl.col("decode_tokens"),
        prefill_steps=(pl.col("prefill_tokens") > 0).cast(pl.Int64),
    )


def _error(priced: pl.DataFrame) -> Error:
    off = pl.col("log").abs()
    neighbour = pl.col("log").shift(1).over("part")
    figures: dict[str, Any] = priced.select(
        median=off.median(),
        p90=off.quantile(0.9, "linear"),
        lag1=pl.corr("log", neighbour),
        total=pl.col("device_us").sum() / pl.col("fitted_us").sum() - 1,
    ).row(0, named=True)
    lag1 = figures["lag1"]
    return Error(
        median_abs_log=figures["median"],
        p90_abs_log=figures["p90"],
        lag1=None if lag1 is None or lag1 != lag1 else lag1,  # noqa: PLR0124  # not a number
        total_frac=figures["total"],
    )


class Extrapolation(NamedTuple):
    """Standard error of the log time of steps outside a column's recorded range, by distance in doublings."""

    per_doubling: float
    """Error per doubling, up to the distance of the held-out steps."""
    reach: float
    """Doublings to the farthest held-out steps; 0 if no step could be held out."""

    def log_error(self, doublings: float) -> float:
        """Return the error at a distance; beyond ``reach``, it grows at least by the default per doubling.

        The recording cannot show whether the slope changes outside its range.
        """
        near = min(doublings, self.reach) * self.per_doubling
        beyond = max(0.0, doublings - self.reach) * max(self.per_doubling, USUAL_PER_DOUBLING)
        return near + beyond


UNMEASURED = Extrapolation(USUAL_PER_DOUBLING, 0.0)
"""Error outside the range of a column for which no steps were held out."""


def extrapolation_errors(rows: pl.DataFrame, device: Larger) -> dict[str, Extrapolation]:
    """Return the error of the log time of steps outside each column's range, measured on recorded steps.

    The largest steps are held out: a fit to the smaller steps predicts those above a half and above a quarter
    of the column's largest value. The ratio of measured to predicted total time, together with the distance
    from that fit's range, is one observation of the error. If too few steps with work in the column would be
    left to fit, nothing is held out. Each column is measured separately, because how well the cost
    of prefill tokens extrapolates says nothing about the cost of more requests.
    """
    rows = with_sums(rows)
    rows = rows.filter(~pl.col("first")).drop_nulls(("device_us", *DEVICE)).filter(pl.col("device_us") > 0)
    errors: dict[str, Extrapolation] = {}
    for column in DEVICE:
        squares, doublings, reach = (USUAL_PER_DOUBLING * USUAL_DOUBLINGS) ** 2, USUAL_DOUBLINGS**2, 0.0
        most = rows.select(pl.col(column).max()).item() or 0
        for share in HELD_OUT_FROM:
            within = pl.col(column) <= share * most
            off, distance = _held_out(rows.filter(within), rows.filter(~within), column, device)
            squares, doublings = squares + off**2, doublings + distance**2
            reach = max(reach, distance)
        errors[column] = Extrapolation(math.sqrt(squares / doublings), reach)
    return errors


def _held_out(left: pl.DataFrame, held: pl.DataFrame, column: str, device: Larger) -> tuple[float, float]:
    """Fit the steps ``left``; return the log error on the steps ``held`` and their distance in doublings.

    Both are 0 if there are too few steps.
    """
    of_kind = left.filter(pl.col(column) > 0).height
    fewest = max(FEWEST_STEPS, FEWEST_LEFT_FRAC * (left.height + held.height))
    if left.height < fewest or min(of_kind, held.height) < FEWEST_OF_A_SUM:
        return 0.0, 0.0
    fitted = fit_device(left, device)
    if fitted is None:
        return 0.0, 0.0
    predicted = held.with_columns(fitted_us=fitted.expr())
    took_us, fitted_us = predicted.select(pl.col("device_us").sum(), pl.col("fitted_us").sum()).row(0)
    some = predicted.gather_every(-(-held.height // MOST_HELD_OUT))
    distance_us = sum(
        step["fitted_us"] * fitted.doublings_outside(step) for step in some.iter_rows(named=True)
    )
    return math.log(took_us / fitted_us), distance_us / some["fitted_us"].sum()


def with_slowest_rank(rows: pl.DataFrame, source: Source) -> pl.DataFrame:
    """Return the rows of all ranks; only the row of each pass's slowest rank keeps its ``device_us``.

    A pass takes as long as its slowest rank, so the time in the other ranks' rows belongs to another rank's
    batch. The slowest rank follows from the fit, and the fit from the slowest rank, so the two are computed
    alternately, beginning with the rank that has most tokens. All ranks of a trial become one part, so that
    a sample of neighbouring steps contains whole passes.

    Args:
        rows: Rows of ``observed``, of all ranks of one run.
        source: Source of the rows.

    Raises:
        InputError: If too few steps have an output and known requests.
    """
    rows = rows.sort(PASS, maintain_order=True).with_columns(
        part=pl.col("trial").rank("dense").fill_null(1) - 1
    )
    took = pl.col("device_us")
    work = pl.col("prefill_tokens") + pl.col("decode_tokens")
    slowest = _slowest(rows, work)
    chosen = rows.with_columns(device_us=pl.when(slowest).then(took))
    for _ in range(RANK_ROUNDS):
        fitted = fit_rows(chosen, source).device.expr()
        again = _slowest(with_sums(rows), fitted)
        following = rows.with_columns(device_us=pl.when(again).then(took))
        if following.equals(chosen):
            break
        chosen = following
    return chosen


def gathering_us(traces: Sequence[Trace]) -> float | None:
    """Return the time that gathering a number from all ranks (``schedtrace.balance``) would add to a loop.

    vLLM's recorded all-reduces are of the same kind, on the same threads and hosts. In each, the last rank to
    join waited for no other, so its time is the cost; the result is the median over all-reduces.

    Returns:
        Microseconds; 0.0 if the recorded ranks did gather, so that the gaps between their steps contain it;
        None if no all-reduce of several ranks is recorded.
    """
    if traces[0].header.scheduler_class.startswith("schedtrace.balance."):
        return 0.0
    met = pl.concat(trace.syncs for trace in traces).group_by("wave", "step_counter").agg(
        pl.len(), pl.col("took_us").min()
    )  # fmt: skip
    whole = met.filter((pl.col("len") == len(traces)) & (pl.col("len") > 1))
    return None if whole.is_empty() else float(whole.select(pl.col("took_us").median()).item())


def _slowest(rows: pl.DataFrame, cost: pl.Expr) -> pl.Series:
    """Mark the rows whose cost is the largest in their pass; among equal rows, the first."""
    costs = rows.with_columns(cost=cost.fill_null(-1.0)).with_row_index("row")
    best = (
        costs.filter(pl.col("total_requests") > 0)
        .sort("cost", descending=True, maintain_order=True)
        .group_by(PASS, maintain_order=True)
        .first()
    )
    return costs["row"].is_in(best["row"].implode())
