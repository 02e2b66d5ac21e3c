"""Parts of every step, the work that they should take time for, and what a trace knows of the step.

What is here is data for a search (``diagnose/excess.py``): for each part of a step its time, a model's
columns of its work, and features that may go with an excess of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from schedtrace.timeline.engine_states import unstarved
from schedtrace.timeline.events import ASLEEP, CALLED, HUNG, PAUSED, STALLED
from schedtrace.timeline.spans import at_steps, level, merged, overlap_us, time_within
from schedtrace.timeline.timeline import Timeline

Array = Any
"""NumPy array: a number, or whether something holds, for each step."""

EXECUTION, SCHEDULE, UPDATE, BETWEEN = "execution", "schedule", "update", "between"
HOST_PARTS = (SCHEDULE, UPDATE, BETWEEN)
CAUSE, WORK, BESIDE = 0, 1, 2
"""What a feature is: it can be a cause, it is work, or it only goes with something else."""
TRAITS = {
    "logprobs": pl.col("logprobs").is_not_null(),
    "prompt_logprobs": pl.col("prompt_logprobs").is_not_null(),
    "structured": pl.col("structured"),
    "logit_bias": pl.col("logit_bias") > 0,
    "min_tokens": pl.col("min_tokens") > 0,
}
"""Features of a request that make a step more than a forward pass of its tokens."""
MOST_ADAPTERS = 20
"""Adapters that are looked at one by one, those with the most requests."""


MOST_BENDS, STEPS_OF_BEND = 10, 12
"""Bends in what the tokens of a prefill cost, and fewest steps for each."""


class Kind(NamedTuple):
    """A kind of feature: what it may explain, and which others say the same."""

    rank: int
    """``CAUSE``, ``WORK`` or ``BESIDE``."""
    family: str
    column: str = ""
    """Column of ``steps`` that has it; empty: it is computed."""


KINDS = {
    "batch": Kind(CAUSE, "batch", "total_requests"),
    "new": Kind(CAUSE, "prefill", "num_new"),
    "resumed": Kind(CAUSE, "resumed", "num_resumed"),
    "drafts": Kind(CAUSE, "drafts", "draft_tokens"),
    "cached": Kind(CAUSE, "cached", "cached_tokens"),
    "parked": Kind(CAUSE, "connector", "kv_loads_parked"),
    "sessions": Kind(CAUSE, "sessions", "sessions_paused"),
    "dummies": Kind(CAUSE, "dummies", "dummy_batches"),
    "throttled": Kind(CAUSE, "throttled", "throttle_prefills"),
    "recomputed": Kind(CAUSE, "recomputed", "recomputed_tokens"),
    "prefill_tokens": Kind(WORK, "prefill", "prefill_tokens"),
    "decode_tokens": Kind(WORK, "batch", "decode_tokens"),
    "context": Kind(WORK, "context", "context_tokens"),
    "running": Kind(WORK, "batch", "num_running_before"),
    "decode_only": Kind(CAUSE, "prefill"),
    "mixed": Kind(CAUSE, "mixed"),
    "exits": Kind(CAUSE, "exits"),
    "loads": Kind(CAUSE, "connector"),
    "preemptions": Kind(CAUSE, "preemptions"),
    "grammars": Kind(CAUSE, "grammars"),
    "arrivals": Kind(CAUSE, "arrivals"),
    "finishes": Kind(CAUSE, "finishes"),
    "capped": Kind(CAUSE, "capped"),
    "trait": Kind(CAUSE, "trait"),
    "lora": Kind(CAUSE, "lora"),
    "padding": Kind(CAUSE, "padding"),
    "request": Kind(CAUSE, "request"),
    "first_use": Kind(CAUSE, "first_use"),
    "kv_used": Kind(WORK, "kv"),
    "clock": Kind(BESIDE, "clock"),
    "waiting": Kind(BESIDE, "waiting", "num_waiting_before"),
    "not_ready": Kind(BESIDE, "not_ready", "num_not_ready_after"),
    "age": Kind(BESIDE, "age"),
}
"""Kinds of features. The first of a family that explain the same is named."""
NOTHING_HAPPENS = ("queue_empty",)
"""Causes of exits that say nothing beyond the queue's length."""


@dataclass(frozen=True, eq=False)
class Feature:
    """A fact about each step."""

    kind: str
    """A key of ``KINDS``."""
    values: Array
    detail: str = ""
    """Which exit, trait, adapter or request."""

    @property
    def key(self) -> tuple[str, str]:
        """Name of the feature among all."""
        return self.kind, self.detail

    @property
    def rank(self) -> int:
        """``CAUSE``, ``WORK`` or ``BESIDE``."""
        return KINDS[self.kind].rank

    @property
    def family(self) -> str:
        """Name shared by features that say the same."""
        return f"{KINDS[self.kind].family} {self.detail}".strip()


def judged_steps(timeline: Timeline) -> pl.DataFrame:
    """Return the steps that are looked at, in order: with processors, and outside of what was asked for.

    Pauses, calls of the workers and hangs have a cause of their own.
    """
    steps = unstarved(timeline, timeline.starved_steps, timeline.steps).sort("start_us")
    events = timeline.events.filter(pl.col("kind").is_in([PAUSED, ASLEEP, CALLED, HUNG, STALLED]))
    spans = steps.select(
        begin_us=pl.coalesce(pl.col("start_us").shift(1), "start_us"),
        end_us=pl.max_horizontal("start_us", pl.coalesce("output_us", "end_us")),
    )
    follows = (pl.col("step").diff() == 1) & pl.col("trial").eq_missing(pl.col("trial").shift(1))
    steps = steps.with_columns(follows=follows.fill_null(value=False))
    return steps.filter(overlap_us(spans, merged(events)) == 0)


def part_times(timeline: Timeline, steps: pl.DataFrame) -> dict[str, Array]:
    """Return the time of each part of each step, in microseconds; NaN: it is not known, or there is none."""
    nothing = pl.lit(None, pl.Int64)
    in_lockstep = "wave" in steps.columns and steps["wave"].count() > 0
    shared = (timeline.header.pipeline_parallel_size or 1) > 1
    execution = pl.when(pl.col("total_requests") > 0).then(pl.coalesce("execute_us", "busy_us"))
    before = steps.select(begin_us=pl.coalesce(pl.col("start_us").shift(1), "start_us"), end_us="start_us")
    gap = time_within(before, timeline.engine_states, {"us": pl.col("state") == "host_gap"})["us"]
    columns = steps.with_columns(gap_us=gap).select(
        (nothing if shared or in_lockstep else execution).alias(EXECUTION),
        pl.col("schedule_us").alias(SCHEDULE),
        pl.col("update_us").alias(UPDATE),
        pl.when("follows").then("gap_us").alias(BETWEEN),
    )
    return {
        name: columns[name].cast(pl.Float64).fill_null(float("nan")).to_numpy() for name in columns.columns
    }


def exposed_us(timeline: Timeline, steps: pl.DataFrame, part: str, times: Array) -> Array:
    """Return how much of the part's time the device did not work, which is what it costs."""
    if part in (EXECUTION, BETWEEN):
        return times
    begin, length = ("start_us", "schedule_us") if part == SCHEDULE else ("output_us", "update_us")
    spans = steps.select(begin_us=pl.col(begin).fill_null(0)).with_columns(
        end_us=pl.col("begin_us") + steps[length].fill_null(0)
    )
    hidden = time_within(spans, timeline.engine_states, {"us": pl.col("state") == "device"})["us"]
    return np.clip(times - hidden.to_numpy(), 0, None)


def work_of(part: str, steps: pl.DataFrame) -> Array:
    """Return the columns of a model of the part's work: constant, linear, and bends in what a token costs."""

    def column(name: str) -> Array:
        return steps[name].cast(pl.Float64).fill_null(0).to_numpy() if name in steps.columns else none

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
        if part == BETWEEN:  # whoever paces the steps waits less after a longer one
            columns.append(np.concatenate([[0.0], (column("output_us") - column("start_us"))[:-1]]))
    matrix = np.column_stack(columns).astype(float)
    matrix /= np.maximum(np.abs(matrix).max(axis=0, initial=0.0), 1e-9)
    return independent(matrix)


def independent(matrix: Array) -> Array:
    """Return the columns that are no combination of earlier ones."""
    kept: list[int] = []
    basis = np.empty((len(matrix), 0))
    for at in range(matrix.shape[1]):
        rest = matrix[:, at] - basis @ (basis.T @ matrix[:, at])
        rest = rest - basis @ (basis.T @ rest)
        norm = float(np.linalg.norm(rest))
        if norm > 1e-3 * float(np.linalg.norm(matrix[:, at])) and norm > 0:
            kept.append(at)
            basis = np.column_stack([basis, rest / norm])
    return matrix[:, kept]


def _bends(values: Array, pieces: int) -> list[Array]:
    """Return columns with which a line may bend at equal distances."""
    most = float(values.max(initial=0.0))
    return [np.clip(values - most * at / pieces, 0, None) for at in range(1, pieces)]


def _bends_among(values: Array, among: Array) -> list[Array]:
    """Return columns with which a line may bend between equally many of some steps; 0 in the others."""
    if not among.any():
        return []
    count = int(min(MOST_BENDS, among.sum() // STEPS_OF_BEND))
    knots = np.unique(np.quantile(values[among], (np.arange(count) + 0.5) / max(count, 1)))
    return [np.where(among, np.clip(values - knot, 0, None), 0.0) for knot in knots]


def features(timeline: Timeline, steps: pl.DataFrame, requests: list[str]) -> list[Feature]:
    """Return everything that the trace knows of each step and that is not the same for all.

    Args:
        timeline: The engine's trace.
        steps: ``judged_steps``, or some of them.
        requests: Requests whose presence is a feature.
    """
    made = [*_columns(steps), *_computed(timeline, steps), *_listed(timeline, steps)]
    made += [*_members(timeline, steps, requests)]
    order = {kind: place for place, kind in enumerate(KINDS)}
    made = [feature for feature in made if np.ptp(feature.values) > 0]
    return sorted(made, key=lambda feature: (order[feature.kind], feature.detail))


def _columns(steps: pl.DataFrame) -> Iterator[Feature]:
    for kind, (_, _, name) in KINDS.items():
        if name and name in steps.columns and steps[name].null_count() < steps.height:
            yield Feature(kind, steps[name].cast(pl.Float64).fill_null(0).to_numpy())


def _computed(timeline: Timeline, steps: pl.DataFrame) -> Iterator[Feature]:
    start, decodes, prefills = steps["start_us"], pl.col("decode_tokens") > 0, pl.col("prefill_tokens") > 0
    first = pl.col("step") == pl.col("step").min().over("total_requests")
    flags = {"decode_only": decodes & ~prefills, "mixed": decodes & prefills}
    for kind, flag in flags.items():
        yield Feature(kind, steps.select(flag.cast(pl.Float64).fill_null(0)).to_series().to_numpy())
    if timeline.begins:
        uses = timeline.steps.filter(first & (pl.col("total_requests") > 0))["step"]
        yield Feature("first_use", steps["step"].is_in(uses.implode()).cast(pl.Float64).to_numpy())
    yield Feature("clock", ((start - timeline.begin_us) / 1e6).to_numpy())
    if steps["kv_blocks_free_before"].count():
        used = pl.col("kv_blocks_total") - pl.col("kv_blocks_free_before")
        yield Feature("kv_used", steps.select(used.cast(pl.Float64).fill_null(0)).to_series().to_numpy())
    sizes = timeline.header.settings.get("compilation_config.cudagraph_capture_sizes") or []
    if sizes:
        tokens = steps["used_tokens"].cast(pl.Float64).fill_null(0).to_numpy()
        captured = np.array(sorted(sizes), float)
        place = np.searchsorted(captured, tokens)
        size = np.where(place < len(captured), captured[np.minimum(place, len(captured) - 1)], tokens)
        yield Feature("padding", size - tokens)
    yield Feature("age", _oldest_s(timeline, start.to_numpy()))


def _oldest_s(timeline: Timeline, at_us: Array) -> Array:
    """Return the age of the oldest request in the scheduler at each moment, in seconds; 0: there is none."""
    states = timeline.request_states.filter(pl.col("state") != "front_end")
    lives = states.group_by("request_id").agg(pl.col("begin_us").min(), pl.col("end_us").max())
    lives = lives.sort("begin_us", "request_id")
    if lives.is_empty():
        return np.zeros(len(at_us))
    begin, end = lives["begin_us"].to_numpy(), np.maximum.accumulate(lives["end_us"].to_numpy())
    place = np.minimum(np.searchsorted(end, at_us, side="right"), len(begin) - 1)
    return np.where(end[place] > at_us, np.clip(at_us - begin[place], 0, None), 0) / 1e6


def _listed(timeline: Timeline, steps: pl.DataFrame) -> Iterator[Feature]:
    """Yield how often each thing that steps list happened in them."""
    wanted = steps.select("step")
    exits = timeline.exits.filter(~pl.col("cause").is_in(NOTHING_HAPPENS)).join(wanted, on="step", how="semi")
    for (loop, cause), rows in exits.group_by("loop", "cause", maintain_order=True):
        yield Feature("exits", _counts(steps, rows, pl.col("count").sum()), f"{cause} {loop}")
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
            yield Feature(kind, _counts(steps, rows, pl.len()))


def _counts(steps: pl.DataFrame, rows: pl.DataFrame, count: pl.Expr) -> Array:
    counts = rows.group_by("step").agg(count.cast(pl.Float64).alias("count"))
    joined = steps.select("step").join(counts, on="step", how="left", maintain_order="left")
    return joined["count"].fill_null(0).to_numpy()


def _members(timeline: Timeline, steps: pl.DataFrame, requests: list[str]) -> Iterator[Feature]:
    """Yield how many requests of a kind each step scheduled."""
    asked = timeline.known_requests
    groups = [("trait", trait, asked.filter(has)["request_id"]) for trait, has in TRAITS.items()]
    adapters = asked.drop_nulls("lora")
    names = adapters["lora"].value_counts(sort=True).head(MOST_ADAPTERS)["lora"].to_list()
    if names:
        groups.append(("trait", "lora", adapters["request_id"]))
    if len(names) > 1:
        groups += [("lora", name, adapters.filter(lora=name)["request_id"]) for name in names]
    groups += [("request", name, pl.Series("request_id", [name])) for name in requests]
    for kind, detail, members in groups:
        if members.is_empty():
            continue
        stretches = timeline.stretches.filter(pl.col("request_id").is_in(members.implode()))
        sums = level(stretches, "step", pl.col("last_step") + 1, count=1)
        ordered = steps.select("step").with_row_index("place").sort("step")
        counts = at_steps(sums, ordered).sort("place")
        yield Feature(kind, counts["count"].cast(pl.Float64).to_numpy(), detail)
