"""Data on every step for the search for slow steps (``diagnose/excess.py``), and the model of their work.

For each part of a step: its time, the columns of a model of its work, and features that may go with an excess
of that time. The model is fitted by least absolute deviations: such a fit does not mistake a jump for work,
even if most steps lie beyond it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from schedtrace.diagnose.excess_words import ADAPTER_ROOM
from schedtrace.model.cuda_graphs import graph_sizes, graph_use
from schedtrace.timeline.events import ASLEEP, CALLED, HUNG, PAUSED, STALLED
from schedtrace.timeline.spans import at_steps, level, merged, overlap_us, time_within
from schedtrace.timeline.timeline import Timeline, context_tokens

Array = Any
"""NumPy array with a number or a flag for each step."""

EXECUTION, SCHEDULE, UPDATE, BETWEEN = "execution", "schedule", "update", "between"
"""Parts of a step: execution on the device, ``schedule()``, ``update_from_output()``, and the time before
the step.
"""
HOST_PARTS = (SCHEDULE, UPDATE, BETWEEN)
"""Parts that the engine process executes."""
CAUSE, WORK, CORRELATE = 0, 1, 2
"""Role of a feature: a possible cause, work, or a mere correlate."""
TRAITS = {
    "logprobs": pl.col("logprobs").is_not_null(),
    "prompt_logprobs": pl.col("prompt_logprobs").is_not_null(),
    "structured": pl.col("structured"),
    "logit_bias": pl.col("logit_bias") > 0,
    "min_tokens": pl.col("min_tokens") > 0,
}
"""Options of a request that add work to a step beyond the forward pass of its tokens."""
MOST_ADAPTERS = 20
"""Most LoRA adapters with a feature each: the adapters with the most requests."""
MOST_LENGTHS, LONGER = 3, 3.0
"""Most requests whose length is a feature, and the least multiple of the median number of steps that they
have: growth with the output of one of many like requests would not last."""

SIZES = {"16": 16, "64": 64, "128": 128, "256": 256, "512": 512, "powers of two": 0}
"""Sizes to which a device may pad its batches, by name: multiples of a number of tokens."""

FEWEST_OPERATIONS = 2
"""Fewest operations of a kind from which the time since the last one is a feature."""
MOST_BENDS, STEPS_OF_BEND = 10, 12
"""Most bends in the cost of prefill tokens, and fewest steps per bend."""


class FeatureKind(NamedTuple):
    """Kind of feature: its role, and the family of kinds that measure the same thing."""

    role: int
    """``CAUSE``, ``WORK`` or ``CORRELATE``."""
    family: str
    """Name of the family."""
    column: str = ""
    """Column of ``steps`` with the values; empty if they are computed."""


KINDS = {
    "batch": FeatureKind(CAUSE, "batch", "total_requests"),
    "new": FeatureKind(CAUSE, "prefill", "num_new"),
    "resumed": FeatureKind(CAUSE, "resumed", "num_resumed"),
    "drafts": FeatureKind(CAUSE, "drafts", "draft_tokens"),
    "external": FeatureKind(CAUSE, "cached"),
    "cached": FeatureKind(CAUSE, "cached", "cached_tokens"),
    "parked": FeatureKind(CAUSE, "connector", "kv_loads_parked"),
    "sessions": FeatureKind(CAUSE, "sessions", "sessions_paused"),
    "dummies": FeatureKind(CAUSE, "dummies", "dummy_batches"),
    "throttled": FeatureKind(CAUSE, "throttled", "throttle_prefills"),
    "recomputed": FeatureKind(CAUSE, "recomputed", "recomputed_tokens"),
    "prefill_tokens": FeatureKind(WORK, "prefill", "prefill_tokens"),
    "decode_tokens": FeatureKind(WORK, "batch", "decode_tokens"),
    "context": FeatureKind(WORK, "context", "context_tokens"),
    "running": FeatureKind(WORK, "batch", "num_running_before"),
    "decode_only": FeatureKind(CAUSE, "prefill"),
    "mixed": FeatureKind(CAUSE, "mixed"),
    "encoder": FeatureKind(CAUSE, "encoder"),
    "compiling": FeatureKind(CAUSE, "grammars"),
    "exits": FeatureKind(CAUSE, "exits"),
    "loads": FeatureKind(CAUSE, "connector"),
    "preemptions": FeatureKind(CAUSE, "preemptions"),
    "grammars": FeatureKind(CAUSE, "grammars"),
    "arrivals": FeatureKind(CAUSE, "arrivals"),
    "finishes": FeatureKind(CAUSE, "finishes"),
    "capped": FeatureKind(CAUSE, "capped"),
    "adapter_slots": FeatureKind(CAUSE, "adapters"),
    "adapter_reads": FeatureKind(CAUSE, "adapters"),
    "trait": FeatureKind(CAUSE, "trait"),
    "lora": FeatureKind(CAUSE, "lora"),
    "padding": FeatureKind(CAUSE, "padding"),
    "request": FeatureKind(CAUSE, "request"),
    "first_use": FeatureKind(CAUSE, "first_use"),
    "first_size": FeatureKind(CAUSE, "first_size"),
    "idle": FeatureKind(CAUSE, "idle"),
    "kv_used": FeatureKind(WORK, "kv"),
    "period": FeatureKind(CORRELATE, "period"),
    "since": FeatureKind(CORRELATE, "since"),
    "clock": FeatureKind(CORRELATE, "clock"),
    "waiting": FeatureKind(CORRELATE, "waiting", "num_waiting_before"),
    "not_ready": FeatureKind(CORRELATE, "not_ready", "num_not_ready_after"),
    "age": FeatureKind(CORRELATE, "age"),
    "length": FeatureKind(CORRELATE, "length"),
}
"""Kinds of features. The report names the first kind of a family that explains as much."""
NOTHING_HAPPENS = ("queue_empty",)
"""Causes of exits that only repeat the queue depth."""


@dataclass(frozen=True, eq=False)
class Feature:
    """Fact about each step."""

    kind: str
    """A key of ``KINDS``."""
    values: Array
    detail: str = ""
    """Name of the exit, trait, adapter, request or operation; for ``period`` its length in seconds; for
    ``first_size`` the counted tokens, and the sizes to which they are padded."""

    @property
    def identity(self) -> tuple[str, str]:
        """Kind and detail, which identify the feature."""
        return self.kind, self.detail

    @property
    def role(self) -> int:
        """``CAUSE``, ``WORK`` or ``CORRELATE``."""
        return KINDS[self.kind].role

    @property
    def family_name(self) -> str:
        """Name shared by the features that measure the same thing."""
        detail = "" if self.kind == "first_size" else self.detail
        return f"{KINDS[self.kind].family} {detail}".strip()


def judged_steps(timeline: Timeline) -> pl.DataFrame:
    """Return the steps to examine in order of time, without starved and interrupted steps.

    Starved processors, pauses, sleep, calls to the workers, stalls and hangs have a cause of their own. The
    columns ``gap_us`` and ``idle_us`` are the host's time and the idle time since the previous step's start.
    """
    steps = timeline.steps.filter(~pl.col("step").is_in(timeline.starved_steps.implode())).sort("start_us")
    events = timeline.events.filter(pl.col("kind").is_in([PAUSED, ASLEEP, CALLED, HUNG, STALLED]))
    spans = steps.select(
        begin_us=pl.coalesce(pl.col("start_us").shift(1), "start_us"),
        end_us=pl.max_horizontal("start_us", pl.coalesce("output_us", "end_us")),
    )
    follows = (pl.col("step").diff() == 1) & pl.col("trial").eq_missing(pl.col("trial").shift(1))
    before = spans.with_columns(end_us=steps["start_us"])
    states = {"gap_us": pl.col("state") == "host_gap", "idle_us": pl.col("state") == "idle"}
    between = time_within(before, timeline.engine_states, states)
    steps = steps.with_columns(between[*states], follows=follows.fill_null(value=False))
    return steps.filter(overlap_us(spans, merged(events)) == 0)


def part_times(timeline: Timeline, steps: pl.DataFrame) -> dict[str, Array]:
    """Return the time of each part of each step in microseconds; NaN if unknown or without that part."""
    nothing = pl.lit(None, pl.Int64)
    in_lockstep = "wave" in steps.columns and steps["wave"].count() > 0
    shared = (timeline.header.pipeline_parallel_size or 1) > 1
    execution = pl.when(pl.col("total_requests") > 0).then(pl.coalesce("execute_us", "busy_us"))
    columns = steps.select(
        (nothing if shared or in_lockstep else execution).alias(EXECUTION),
        pl.col("schedule_us").alias(SCHEDULE),
        pl.col("update_us").alias(UPDATE),
        pl.when("follows").then("gap_us").alias(BETWEEN),
    )
    return {column.name: column.cast(pl.Float64).to_numpy() for column in columns}


def _numbers(column: pl.Series) -> Array:
    """Return a column's numbers or flags; 0 where it is null."""
    return np.nan_to_num(column.cast(pl.Float64).to_numpy())


def exposed_us(timeline: Timeline, steps: pl.DataFrame, part: str, times: Array) -> Array:
    """Return the part of each time that the engine loses, in microseconds.

    Host work costs nothing while the device is busy.
    """
    if part in (EXECUTION, BETWEEN):
        return times
    begin, length = ("start_us", "schedule_us") if part == SCHEDULE else ("output_us", "update_us")
    spans = steps.select(begin_us=pl.col(begin).fill_null(0)).with_columns(
        end_us=pl.col("begin_us") + steps[length].fill_null(0)
    )
    hidden = time_within(spans, timeline.engine_states, {"us": pl.col("state") == "device"})["us"]
    return np.clip(times - hidden.to_numpy(), 0, None)


def work_columns(part: str, steps: pl.DataFrame) -> Array:
    """Return the columns of a model of a part's work: constant, linear, and bends in the cost of a token."""

    def column(name: str) -> Array:
        return _numbers(steps[name]) if name in steps.columns else none

    none = np.zeros(steps.height)
    columns = [np.ones(steps.height)]
    if part == EXECUTION:
        prefill, decode, context = (column(f"{kind}_tokens") for kind in ("prefill", "decode", "context"))
        columns += [prefill, decode, context, prefill > 0, column("recomputed_tokens")]
        fills = prefill > 0
        columns += [*_bends(decode, 3), *_bends(context, 2)]
        columns += [*_bends_among(prefill, fills), *_bends_among(prefill + decode, fills)]
        columns += [prefill * context]
    else:
        columns += [column("total_requests"), column("num_new")]
        if part == BETWEEN:  # the wait for the next step is shorter after a longer step
            columns.append(np.concatenate([[0.0], (column("output_us") - column("start_us"))[:-1]]))
    matrix = np.column_stack(columns).astype(float)
    matrix /= np.maximum(np.abs(matrix).max(axis=0, initial=0.0), 1e-9)
    return independent(matrix)


def independent(matrix: Array) -> Array:
    """Return the columns that are linearly independent of the earlier ones."""
    places: list[int] = []
    basis = np.empty((len(matrix), 0))
    for at in range(matrix.shape[1]):
        rest = matrix[:, at] - basis @ (basis.T @ matrix[:, at])
        rest = rest - basis @ (basis.T @ rest)
        norm = float(np.linalg.norm(rest))
        if norm > 1e-3 * float(np.linalg.norm(matrix[:, at])) and norm > 0:
            places.append(at)
            basis = np.column_stack([basis, rest / norm])
    return matrix[:, places]


def _bends(values: Array, pieces: int) -> list[Array]:
    """Return columns that let a line bend at equally spaced values."""
    most = float(values.max(initial=0.0))
    return [np.clip(values - most * at / pieces, 0, None) for at in range(1, pieces)]


def _bends_among(values: Array, among: Array) -> list[Array]:
    """Return columns that let a line bend between equally many of the selected steps.

    They are 0 in the remaining steps.
    """
    if not among.any():
        return []
    count = int(min(MOST_BENDS, among.sum() // STEPS_OF_BEND))
    knots = np.unique(np.quantile(values[among], (np.arange(count) + 0.5) / max(count, 1)))
    return [np.where(among, np.clip(values - knot, 0, None), 0.0) for knot in knots]


def features(timeline: Timeline, steps: pl.DataFrame, requests: list[str]) -> list[Feature]:
    """Return every recorded feature that varies between the steps, in the order of ``KINDS``.

    Args:
        timeline: Timeline of the engine.
        steps: ``judged_steps``, or a part of them.
        requests: Requests whose presence is a feature.
    """
    candidates = [
        *(
            Feature(kind, _numbers(steps[name]))
            for kind, (_, _, name) in KINDS.items()
            if name and name in steps.columns and steps[name].null_count() < steps.height
        ),
        *_computed(timeline, steps),
        *_listed(timeline, steps),
        *_members(timeline, steps, requests),
        *_lengths(timeline, steps),
    ]
    order = {kind: place for place, kind in enumerate(KINDS)}
    varying = [feature for feature in candidates if np.ptp(feature.values) > 0]
    return sorted(varying, key=lambda feature: (order[feature.kind], feature.detail))


def _computed(timeline: Timeline, steps: pl.DataFrame) -> Iterator[Feature]:
    start, decodes, prefills = steps["start_us"], steps["decode_tokens"] > 0, steps["prefill_tokens"] > 0
    yield Feature("decode_only", _numbers(decodes & ~prefills))
    yield Feature("mixed", _numbers(decodes & prefills))
    if timeline.begins:
        yield from _first_uses(timeline.steps, steps)
    yield Feature("idle", (steps["idle_us"] / 1e6).to_numpy())
    yield Feature("clock", ((start - timeline.begin_us) / 1e6).to_numpy())
    yield from _since_operations(timeline, start.to_numpy())
    if steps["kv_blocks_free_before"].count():
        yield Feature("kv_used", _numbers(steps["kv_blocks_total"] - steps["kv_blocks_free_before"]))
    if "encoder_slots_freeable" in timeline.steps.columns:
        yield Feature("encoder", _encoded(timeline.steps, steps))
    if sizes := graph_sizes(timeline.header):
        padding = [graph_use(tokens, sizes)[0] or 0 for tokens in steps["used_tokens"].to_list()]
        yield Feature("padding", np.array(padding, float))
    yield Feature("age", _oldest_steps(timeline, start.to_numpy()))


def _since_operations(timeline: Timeline, at_us: Array) -> Iterator[Feature]:
    """Yield for each kind of operation that was repeated the time since the last one, or since the start."""
    done = timeline.controls.filter(~pl.col("failed")).sort("at_us")
    for (control,), rows in done.group_by("control", maintain_order=True):
        times_us = np.unique(np.concatenate([[timeline.begin_us], rows["at_us"].to_numpy()]))
        if rows.height >= FEWEST_OPERATIONS:
            last_us = times_us[np.maximum(np.searchsorted(times_us, at_us, side="right") - 1, 0)]
            yield Feature("since", (at_us - last_us) / 1e6, str(control))


def _encoded(every: pl.DataFrame, steps: pl.DataFrame) -> Array:
    """Return the embeddings for which each step took room in the encoder cache, as far as it shows.

    Room that was given back since the step before hides as much of it.
    """
    taken = every.select("step", taken=-pl.col("encoder_slots_freeable").diff().over("trial"))
    return np.clip(_numbers(taken["taken"])[_places(every, steps)], 0, None)


def _places(every: pl.DataFrame, steps: pl.DataFrame) -> Array:
    """Return the place of each of some steps among all steps."""
    return np.searchsorted(every["step"].to_numpy(), steps["step"].to_numpy())


def _first_uses(every: pl.DataFrame, steps: pl.DataFrame) -> Iterator[Feature]:
    """Yield whether each step is the first with its number of requests, and the first of its size.

    The size is of prefills or of all tokens, for each way to pad them.
    """
    places = _places(every, steps)

    def is_first(sizes: Array) -> Array:
        values, firsts = np.unique(sizes, return_index=True)
        flags = np.zeros(len(sizes))
        flags[firsts[values > 0]] = 1.0
        return flags[places]

    yield Feature("first_use", is_first(every["total_requests"].to_numpy()))
    for column in ("prefill_tokens", "used_tokens"):
        tokens = _numbers(every[column]).astype(int)
        for name, width in SIZES.items():
            doublings = np.ceil(np.log2(np.maximum(tokens, 1))).astype(int) + (tokens > 0)
            sizes = -(-tokens // width) if width else doublings
            yield Feature("first_size", is_first(sizes), f"{column.removesuffix('_tokens')} {name}")


def _oldest_steps(timeline: Timeline, at_us: Array) -> Array:
    """Return how many steps ago the oldest request in the scheduler arrived; 0 without requests.

    A time would depend on what it is meant to explain, because slow steps make requests older.
    """
    states = timeline.request_states.filter(pl.col("state") != "front_end")
    lives = states.group_by("request_id").agg(pl.col("begin_us").min(), pl.col("end_us").max())
    lives = lives.sort("begin_us", "request_id")
    if lives.is_empty():
        return np.zeros(len(at_us))
    begin, end = lives["begin_us"].to_numpy(), np.maximum.accumulate(lives["end_us"].to_numpy())
    place = np.minimum(np.searchsorted(end, at_us, side="right"), len(begin) - 1)
    starts = timeline.steps["start_us"].drop_nulls().sort().to_numpy()
    steps = np.searchsorted(starts, at_us) - np.searchsorted(starts, begin[place])
    return np.where(end[place] > at_us, np.clip(steps, 0, None), 0).astype(float)


def _listed(timeline: Timeline, steps: pl.DataFrame) -> Iterator[Feature]:
    """Yield the number of exits, preemptions, arrivals and further listed events of each step."""
    exits = timeline.exits.filter(~pl.col("cause").is_in(NOTHING_HAPPENS))
    for (loop, cause), rows in exits.group_by("loop", "cause", maintain_order=True):
        yield Feature("exits", _counts(steps, rows, "count"), f"{cause} {loop}")
    lists = {
        "preemptions": timeline.preemptions,
        "arrivals": timeline.arrivals,
        "finishes": timeline.finishes,
        "capped": timeline.caps,
    }
    for kind, name in (("loads", "kv_loads"), ("grammars", "grammars")):
        if name in timeline.lists:
            lists[kind] = timeline.lists[name].select("step").collect()
    for kind, rows in lists.items():
        if "step" in rows.columns and rows.height:
            yield Feature(kind, _counts(steps, rows))
    if "grammars" in timeline.lists:
        yield Feature("compiling", _compiling(timeline, steps))
    if "admitted" in timeline.lists:
        admitted = timeline.lists["admitted"].select("step", "external_tokens").collect()
        yield Feature("external", _counts(steps, admitted, "external_tokens"))


def _compiling(timeline: Timeline, steps: pl.DataFrame) -> Array:
    """Return the number of grammars that other threads compiled during each step."""
    times = timeline.lists["grammars"].select("started_us", "compiled_us").collect()
    begin, end = (np.sort(times[name].to_numpy()) for name in times.columns)
    until_us = steps.select(pl.coalesce("output_us", "end_us")).to_series().to_numpy()
    started = np.searchsorted(begin, until_us, side="left")
    return (started - np.searchsorted(end, steps["start_us"].to_numpy(), side="right")).astype(float)


def _lengths(timeline: Timeline, steps: pl.DataFrame) -> Iterator[Feature]:
    """Yield the output tokens so far of each request that outlives the others; 0 in steps without it.

    The cost of one request may grow with its length: a model of the work knows the sum over the batch only.
    """
    number = (pl.col("last_step") - pl.col("step") + 1).sum().alias("number")
    by_steps = timeline.stretches.group_by("request_id").agg(number)
    by_steps = by_steps.filter(pl.col("number") >= LONGER * pl.col("number").median())
    by_steps = by_steps.sort("number", "request_id", descending=[True, False]).head(MOST_LENGTHS)
    ordered = steps[["step"]].with_row_index("place").sort("step")
    prompts = timeline.known_requests[["request_id", "prompt_tokens"]].drop_nulls()
    longest = by_steps.collect().join(prompts, on="request_id", maintain_order="left")
    for name, prompt_tokens in longest[["request_id", "prompt_tokens"]].iter_rows():
        tokens = context_tokens(timeline.stretches.filter(request_id=name), ordered)
        outputs = (tokens["context_tokens"] - prompt_tokens).clip(0)
        yield Feature("length", outputs[ordered["place"].arg_sort()].cast(pl.Float64).to_numpy(), name)


def _counts(steps: pl.DataFrame, rows: pl.DataFrame, column: str | None = None) -> Array:
    """Return the number of rows with each step, or the sum of their ``column``."""
    numbers, of_rows = steps["step"].to_numpy(), rows["step"].to_numpy()
    order = np.argsort(numbers)
    ordered = numbers[order]
    places = np.minimum(np.searchsorted(ordered, of_rows), len(order) - 1)
    weights = np.ones(rows.height) if column is None else _numbers(rows[column])
    return np.bincount(order[places], weights * (ordered[places] == of_rows), len(order))


def _members(timeline: Timeline, steps: pl.DataFrame, requests: list[str]) -> Iterator[Feature]:
    """Yield the number of requests with each trait, adapter or name that each step scheduled."""
    asked = timeline.known_requests
    has, ids = asked.select(**TRAITS, lora=pl.col("lora").is_not_null()), asked["request_id"]
    groups = [("trait", trait, ids.filter(has[trait])) for trait in TRAITS]
    if has["lora"].any():
        adapters = asked.filter(has["lora"])
        groups.append(("trait", "lora", adapters["request_id"]))
        names = adapters["lora"].value_counts(sort=True).head(MOST_ADAPTERS)["lora"].to_list()
        if len(names) > 1:
            groups += [("lora", name, adapters.filter(lora=name)["request_id"]) for name in names]
            yield from _placed_adapters(timeline, steps, adapters)
    for kind, detail, members in groups:
        yield from _scheduled(steps, timeline, members, kind, detail)
    yield from presence(timeline, steps, requests)


def _placed_adapters(timeline: Timeline, steps: pl.DataFrame, asked: pl.DataFrame) -> Iterator[Feature]:
    """Yield the number of adapters that each step had to bring to the device, or to read.

    The worker keeps as many as there is room for, and replaces the one that was used longest ago.

    Args:
        timeline: Timeline of the engine.
        steps: Steps to examine.
        asked: Requests with the adapter that they use.
    """
    uses = timeline.stretches.join(asked[["request_id", "lora"]].lazy(), on="request_id")
    rows = uses.select("step", "last_step", "lora").sort("step", "last_step", "lora").collect().rows()
    for kind, name in ADAPTER_ROOM.items():
        if isinstance(room := timeline.header.settings.get(f"lora_config.{name}"), int):
            last_use: dict[str, int] = {}
            taken = []
            for step, last_step, adapter in rows:
                if adapter not in last_use:
                    taken.append(step)
                    if len(last_use) >= room:
                        del last_use[min(last_use, key=last_use.__getitem__)]
                last_use[adapter] = max(last_step, last_use.get(adapter, 0))
            yield Feature(kind, _counts(steps, pl.DataFrame({"step": taken})))


def presence(timeline: Timeline, steps: pl.DataFrame, requests: list[str]) -> Iterator[Feature]:
    """Yield for each request whether each step scheduled it, 1 or 0."""
    for name in requests:
        yield from _scheduled(steps, timeline, pl.Series("request_id", [name]), "request", name)


def _scheduled(
    steps: pl.DataFrame, timeline: Timeline, members: pl.Series, kind: str, detail: str
) -> Iterator[Feature]:
    """Yield the number of members that each step scheduled, if there are members."""
    if members.is_empty():
        return
    stretches = timeline.stretches.filter(pl.col("request_id").is_in(pl.lit(members).implode()))
    sums = level(stretches, "step", pl.col("last_step") + 1, count=1)
    ordered = steps[["step"]].with_row_index("place").sort("step")
    counts = at_steps(sums, ordered).sort("place")
    yield Feature(kind, _numbers(counts["count"]), detail)


CONVERGED = 1e-6
"""Relative change of the sum of errors at which a fit ends."""
BLOCK = 25
"""Steps in a block, fewer in a short trace; a model fitted to half of the blocks predicts the other half."""
FEWEST_BLOCKS = 24
"""Fewest blocks into which a search divides its steps."""
LEAST_ERROR = 0.002
"""Least typical error: smaller relative errors are within what a model of the work can resolve."""
BOUND = 3.0
"""Largest error that counts, in typical errors; larger errors are clipped to it."""


@dataclass(frozen=True, eq=False)
class WorkFit:
    """Model of the work on the steps of a search, relative to their usual times."""

    times_us: Array
    """Time of the part of each step, in step order, in microseconds and above 0."""
    columns: Array
    """Columns of the part's work (``work_columns``)."""
    times: Array
    """``times_us`` relative to ``usual``."""
    work: Array
    """Columns of the work relative to ``usual``, scaled to at most 1."""
    usual: Array
    """Time in microseconds that a first fit predicts for each step's work."""
    basis: Array
    """Orthonormal columns that span the work."""
    relative_excess: Array
    """Excess over the work, relative to ``usual``."""
    errors: Array
    """Excess over the work in typical errors, clipped to ``BOUND``, with the work projected out."""
    blocks: Array
    """Number of each step's block."""


def fit_lad(matrix: Array, target: Array, rounds: int = 12) -> Array:
    """Fit by least absolute deviations, with iteratively reweighted least squares.

    It stops after ``rounds``, or as soon as a round changes the sum of errors by less than ``CONVERGED``.
    """
    weight = np.ones(len(target))
    costs = np.zeros(matrix.shape[1])
    total = math.inf
    for _ in range(rounds):
        weighted = matrix * weight[:, None]
        square = weighted.T @ matrix
        square += np.diag(1e-9 * np.diag(square) + 1e-300)
        costs = np.linalg.solve(square, weighted.T @ target)
        error = np.abs(target - matrix @ costs)
        before, total = total, float(error.sum())
        if abs(before - total) <= CONVERGED * total:
            break
        weight = 1 / np.maximum(error, 0.05 * float(np.median(error)) + 1e-6)
        weight /= weight.mean()
    return costs


def typical_error(errors: Array) -> float:
    """Return the typical size of relative errors: the standard deviation that their median suggests."""
    return max(1.4826 * float(np.median(np.abs(errors))), LEAST_ERROR)


def fit_work(times_us: Array, work: Array) -> WorkFit:
    """Fit the model of the work.

    Args:
        times_us: Time of one part of each step, in step order, in microseconds and above 0.
        work: Columns of the part's work (``work_columns``).
    """
    size = float(np.median(times_us))
    usual = np.maximum(work @ fit_lad(work, times_us / size) * size, 0.1 * size)
    relative, columns = times_us / usual, work / usual[:, None]
    columns = columns / np.maximum(np.abs(columns).max(axis=0), 1e-12)
    errors = relative - columns @ fit_lad(columns, relative)
    basis, _ = np.linalg.qr(columns)
    bounded = np.clip(errors / typical_error(errors), -BOUND, BOUND)
    bounded = bounded - basis @ (basis.T @ bounded)
    block = min(BLOCK, max(2, len(times_us) // FEWEST_BLOCKS))
    blocks = np.arange(len(times_us)) // block
    return WorkFit(times_us, work, relative, columns, usual, basis, errors, bounded, blocks)
