"""Features of steps that may go with excess time: every recorded property of a step.

The excess itself suggests two more kinds of features: the presence of a single request whose steps are slow,
and the position in a period with which phases of slow steps return. A phase is a stretch of time in which
most steps are slow; it shows when steps are slow, not why.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from schedtrace.diagnose.excess_work import (
    EXECUTION,
    LEAST_ERROR,
    SLOW_ERRORS,
    Array,
    ExaminedPart,
    WorkFit,
    judged_steps,
    numbers,
    sampled_rows,
    typical_error,
)
from schedtrace.step_times.batch import graph_sizes, graph_use
from schedtrace.timeline.spans import at_steps, level
from schedtrace.timeline.timeline import Timeline, context_tokens

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
"""Maximum number of LoRA adapters with a feature of their own: the adapters with the most requests."""
ADAPTER_ROOM = {"adapter_slots": "max_loras", "adapter_reads": "max_cpu_loras"}
"""Settings with the number of LoRA adapters on the device and in the worker's memory, by kind of feature."""
MOST_LENGTHS, LONGER = 3, 3.0
"""Maximum number of requests whose length is a feature, and minimum number of steps of such a request, as a
multiple of the median: only a request that outlives the others can make times grow for long."""

SIZES = {"16": 16, "64": 64, "128": 128, "256": 256, "512": 512, "powers of two": 0}
"""Sizes to which a device may pad its batches, by name: multiples of a number of tokens."""

FEWEST_OPERATIONS = 2
"""Minimum number of operations of a kind for which the time since the last one is a feature."""
MOST_BETWEEN = 5
"""Maximum number of examined steps between two slow steps of a phase."""
FEWEST_OF_PHASE = 10
"""Minimum number of slow steps in a phase."""
LEAST_SLOW_FRAC = 0.5
"""Minimum share of slow steps in a phase."""
FEWEST_RETURNS = 4
"""Minimum number of phases that show a period."""
LATE_FRAC = 0.1
"""Maximum share of the period by which a phase may be early or late."""
MOST_SUSPECTS = 3
"""Maximum number of requests whose presence is a feature: the requests with the slowest steps."""
FEWEST_OF_REQUEST = 20
"""Minimum number of steps with a suspected request, and without it."""
FEWEST_BESIDE = 5
"""Minimum number of steps before a suspected request starts, and after it ends."""
WINDOW = 20
"""Number of steps compared on either side of a request's start and end."""


FEWEST_MARKED, FEWEST_MARKED_TIMES = 10, 5
"""Minimum number of slow steps among which a shared fact is sought, and of separate periods in which the fact
holds and a step is slow."""
LEAST_MARKED, MOST_MARKED, HALF = 0.95, 0.3, 0.5
"""Minimum share of the slow steps that have the fact, maximum share of all steps that have it, and minimum
share of slow periods among the periods in which it holds."""
ABOUT_AS_FEW = 1.1
"""Maximum ratio at which two facts count as marking equally few steps, so that the first of them is named."""


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
"""Kinds of features; among kinds of a family that explain equally much, the report names the first."""
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


@dataclass(frozen=True, eq=False)
class Term:
    """Condition on a feature."""

    feature: Feature
    cut: float
    above: bool = True

    @property
    def mask(self) -> Array:
        """1.0 for each step that meets the condition, else 0.0."""
        return ((self.feature.values > self.cut) == self.above).astype(float)


class StepPhase(NamedTuple):
    """Stretch of time in which most steps are slow."""

    first_step: int
    last_step: int
    begin_us: int
    end_us: int


def compared_features(timeline: Timeline, part: ExaminedPart) -> list[Feature]:
    """Return the features to compare with the excess of a part; empty if its work explains all its times."""
    steps, fit = part.steps, part.fit
    if np.abs(fit.relative_excess).max() <= SLOW_ERRORS * LEAST_ERROR:
        return []
    compared = features(timeline, steps, _suspects(timeline, steps, fit) if part.name == EXECUTION else [])
    is_slow = fit.relative_excess > SLOW_ERRORS * typical_error(fit.relative_excess)
    if (returning := returning_phases(steps, slow_phases(steps, is_slow))) is not None:
        compared.append(Feature("period", returning[1], f"{returning[0]:.3g}"))
    return compared


def features(timeline: Timeline, steps: pl.DataFrame, requests: list[str]) -> list[Feature]:
    """Return every recorded feature that varies between the steps, in the order of ``KINDS``.

    Args:
        timeline: Timeline of the engine.
        steps: ``judged_steps``, or a part of them.
        requests: Requests whose presence is a feature.
    """
    candidates = [
        *(
            Feature(kind, numbers(steps[name]))
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
    every, start = timeline.steps, steps["start_us"]
    at_us, places = start.to_numpy(), np.searchsorted(every["step"].to_numpy(), steps["step"].to_numpy())
    decodes, prefills = steps["decode_tokens"] > 0, steps["prefill_tokens"] > 0
    yield Feature("decode_only", numbers(decodes & ~prefills))
    yield Feature("mixed", numbers(decodes & prefills))
    if timeline.begins:
        yield from _first_uses(every, places)
    yield Feature("idle", (steps["idle_us"] / 1e6).to_numpy())
    yield Feature("clock", ((start - timeline.begin_us) / 1e6).to_numpy())
    done = timeline.controls.filter(~pl.col("failed")).sort("at_us")
    for (control,), rows in done.group_by("control", maintain_order=True):
        times_us = np.unique(np.concatenate([[timeline.begin_us], rows["at_us"].to_numpy()]))
        if rows.height >= FEWEST_OPERATIONS:  # since the last one, or since the start
            last_us = times_us[np.maximum(np.searchsorted(times_us, at_us, side="right") - 1, 0)]
            yield Feature("since", (at_us - last_us) / 1e6, str(control))
    if steps["kv_blocks_free_before"].count():
        yield Feature("kv_used", numbers(steps["kv_blocks_total"] - steps["kv_blocks_free_before"]))
    if "encoder_slots_freeable" in every.columns:
        # Embeddings for which a step took room in the encoder cache. Room that was freed since the step
        # before hides the same amount.
        taken = every.select("step", taken=-pl.col("encoder_slots_freeable").diff().over("trial"))
        yield Feature("encoder", np.clip(numbers(taken["taken"])[places], 0, None))
    if sizes := graph_sizes(timeline.header):
        padding = [graph_use(tokens, sizes)[0] or 0 for tokens in steps["used_tokens"].to_list()]
        yield Feature("padding", np.array(padding, float))
    yield Feature("age", _oldest_steps(timeline, at_us))


def _first_uses(every: pl.DataFrame, places: Array) -> Iterator[Feature]:
    """Yield whether each step is the first with its number of requests, or the first of its size.

    The size is that of prefills or of all tokens, for each kind of padding.

    Args:
        every: All steps.
        places: Place of each examined step among them.
    """

    def is_first(sizes: Array) -> Array:
        values, firsts = np.unique(sizes, return_index=True)
        flags = np.zeros(len(sizes))
        flags[firsts[values > 0]] = 1.0
        return flags[places]

    yield Feature("first_use", is_first(every["total_requests"].to_numpy()))
    for column in ("prefill_tokens", "used_tokens"):
        tokens = numbers(every[column]).astype(int)
        for name, width in SIZES.items():
            doublings = np.ceil(np.log2(np.maximum(tokens, 1))).astype(int) + (tokens > 0)
            sizes = -(-tokens // width) if width else doublings
            yield Feature("first_size", is_first(sizes), f"{column.removesuffix('_tokens')} {name}")


def _oldest_steps(timeline: Timeline, at_us: Array) -> Array:
    """Return how many steps ago the oldest request in the scheduler arrived; 0 without requests.

    The age is in steps, because an age in seconds would itself grow when steps are slow.
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
        times = timeline.lists["grammars"].select("started_us", "compiled_us").collect()
        begin, end = (np.sort(times[name].to_numpy()) for name in times.columns)
        until_us = steps.select(pl.coalesce("output_us", "end_us")).to_series().to_numpy()
        started = np.searchsorted(begin, until_us, side="left")
        compiled = np.searchsorted(end, steps["start_us"].to_numpy(), side="right")
        yield Feature("compiling", (started - compiled).astype(float))  # by other threads during the step
    if "admitted" in timeline.lists:
        admitted = timeline.lists["admitted"].select("step", "external_tokens").collect()
        yield Feature("external", _counts(steps, admitted, "external_tokens"))


def _lengths(timeline: Timeline, steps: pl.DataFrame) -> Iterator[Feature]:
    """Yield, for each request that outlives the others, its output tokens so far; 0 in steps without it.

    The cost of one request may grow with its length, but a model of the work only knows the sum over the
    batch.
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
    """Return the number of rows that belong to each step, or the sum of ``column`` over these rows."""
    of_steps, of_rows = steps["step"].to_numpy(), rows["step"].to_numpy()
    order = np.argsort(of_steps)
    ordered = of_steps[order]
    places = np.minimum(np.searchsorted(ordered, of_rows), len(order) - 1)
    weights = np.ones(rows.height) if column is None else numbers(rows[column])
    return np.bincount(order[places], weights * (ordered[places] == of_rows), len(order))


def _members(timeline: Timeline, steps: pl.DataFrame, requests: list[str]) -> Iterator[Feature]:
    """Yield, for each trait, adapter and request id, the number of such requests in each step."""
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
    groups += [("request", name, pl.Series("request_id", [name])) for name in requests]
    for kind, detail, members in groups:
        yield from _scheduled(steps, timeline, members, kind, detail)


def _placed_adapters(timeline: Timeline, steps: pl.DataFrame, asked: pl.DataFrame) -> Iterator[Feature]:
    """Yield the number of adapters that each step had to load onto the device, or to read into memory.

    The worker keeps as many adapters as it has room for, and replaces the least recently used one.

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
    yield Feature(kind, numbers(counts["count"]), detail)


def slow_phases(steps: pl.DataFrame, slow: Array) -> list[StepPhase]:
    """Return the phases of slow steps in order of time."""
    places = np.flatnonzero(slow)
    runs = np.split(places, np.flatnonzero(np.diff(places) > MOST_BETWEEN) + 1)
    dense = [
        run
        for run in runs
        if len(run) >= FEWEST_OF_PHASE and len(run) >= LEAST_SLOW_FRAC * (run[-1] - run[0] + 1)
    ]
    of_steps, begins = steps["step"], steps["start_us"]
    ends = steps.select(pl.max_horizontal("start_us", "end_us", "output_us")).to_series()
    return [
        StepPhase(int(of_steps[at]), int(of_steps[to]), int(begins[at]), int(ends[to]))
        for at, to in ((int(run[0]), int(run[-1])) for run in dense)
    ]


def returning_phases(steps: pl.DataFrame, phases: list[StepPhase]) -> tuple[float, Array] | None:
    """Return the phases' period and each step's position in it, in seconds; None without a period.

    The distances between phases in the first half must predict the phases of the second half. A phase during
    which the trace begins is left out, because its beginning is not visible. Steps before the first phase and
    after the last one get the last position of a period, so that they do not stand out.
    """
    begins = np.array([phase.begin_us for phase in phases if phase.begin_us > steps["start_us"][0]], float)
    if len(begins) < FEWEST_RETURNS:
        return None
    distances = np.diff(begins)
    usual = float(np.median(distances[: (len(distances) + 1) // 2]))
    if np.abs(distances - usual).max() > LATE_FRAC * usual:
        return None
    period = float(begins[-1] - begins[0]) / (len(begins) - 1)
    starts = steps["start_us"].to_numpy()
    position = np.mod(starts - (begins - period * np.arange(len(begins))).min(), period)
    outside = (starts < phases[0].begin_us) | (starts > phases[-1].end_us)
    return period / 1e6, np.where(outside, period, position) / 1e6


def _suspects(timeline: Timeline, steps: pl.DataFrame, fit: WorkFit) -> list[str]:
    """Return the requests whose presence best explains the errors, and at whose start steps turn slow.

    The score of a request is the number of steps with it, times the number of steps without it, times the
    squared difference of the mean errors.
    """
    order = np.argsort(steps["step"].to_numpy(), kind="stable")
    ordered, sums = steps["step"].to_numpy()[order], np.concatenate([[0.0], np.cumsum(fit.errors[order])])
    many, total = len(ordered), float(sums[-1])
    upto = pl.LazyFrame({"at": ordered, "sum": sums[1:], "number": np.arange(1, many + 1)}).set_sorted("at")
    parts = (
        timeline.stretches.select("request_id", "step", "last_step")
        .with_columns(before=pl.col("step") - 1)
        .sort("before")
        .join_asof(upto, left_on="before", right_on="at", coalesce=False)
        .select("request_id", "last_step", sum_before="sum", number_before="number")
        .sort("last_step")
        .join_asof(upto, left_on="last_step", right_on="at")
        .select(
            "request_id",
            *(
                pl.col(name).fill_null(0) - pl.col(f"{name}_before").fill_null(0)
                for name in ("sum", "number")
            ),
        )
        .group_by("request_id")
        .agg(pl.col("sum").sum(), pl.col("number").sum())
    )
    inside, outside = pl.col("sum") / pl.col("number"), (total - pl.col("sum")) / (many - pl.col("number"))
    ranked = (
        parts.filter(pl.col("number").is_between(FEWEST_OF_REQUEST, many - FEWEST_OF_REQUEST))
        .filter(inside > outside)
        .with_columns(score=pl.col("number") * (many - pl.col("number")) * (inside - outside) ** 2)
        .sort("score", "request_id", descending=[True, False])
        .head(MOST_SUSPECTS)
        .collect()["request_id"]
        .to_list()
    )
    present = {
        name: feature
        for name in ranked
        for feature in _scheduled(steps, timeline, pl.Series("request_id", [name]), "request", name)
    }
    # A model of the work that took much of the excess for work hides in the errors what the times show.
    return [
        name
        for name in ranked
        if any(_comes_and_goes(present[name], values) for values in (fit.errors, fit.times_us))
    ]


def _comes_and_goes(feature: Feature, errors: Array) -> bool:
    """Return whether steps turn slow when the request starts and fast when it ends.

    A machine that is slow for a while does not follow the start and end of a request.

    Args:
        feature: Presence of the request in each step.
        errors: Error of the model of the work for each step, or the step's time.
    """
    inside = feature.values > 0
    places = np.flatnonzero(inside)
    first, last = int(places[0]), int(places[-1])
    sides = (
        (errors[max(0, first - WINDOW) : first], errors[inside][:WINDOW]),
        (errors[last + 1 : last + 1 + WINDOW], errors[inside][-WINDOW:]),
    )
    distance = float(np.median(errors[inside]) - np.median(errors[~inside]))
    return distance > 0 and all(
        len(outside) >= FEWEST_BESIDE and np.median(within) - np.median(outside) >= distance / 2
        for outside, within in sides
    )


@dataclass(frozen=True, eq=False)
class SharedMark:
    """Recorded fact that slow steps share, and that few other steps have."""

    term: Term
    inside: int
    """Number of slow steps that have the fact."""
    all_frac: float
    """Share of all steps that have the fact."""


def shared_mark(timeline: Timeline, numbers: pl.Series) -> SharedMark | None:
    """Return the fact that nearly all of these slow steps have, if it is no coincidence; None otherwise.

    Other steps may have the fact and not be slow, because it makes steps slow only at times. The search for
    effects (``excess.py``), in contrast, looks for facts that make nearly every step slow.

    Args:
        timeline: Timeline of the engine.
        numbers: Numbers of the slow steps.
    """
    steps = judged_steps(timeline)
    slow = steps["step"].is_in(numbers.implode())
    if slow.sum() < FEWEST_MARKED:
        return None
    places = np.union1d(sampled_rows(steps.height), np.flatnonzero(slow))
    sample, is_slow = steps[places], slow.to_numpy()[places]
    weights = np.where(is_slow, 1.0, (~slow).sum() / max((~is_slow).sum(), 1))
    marks = []
    for feature in features(timeline, sample, []):
        has = feature.values > 0
        inside, share = int(has[is_slow].sum()), float(weights[has].sum() / weights.sum())
        begins = np.flatnonzero(np.diff(has, prepend=False) & has)
        slow_in = np.add.reduceat(has & is_slow, begins) > 0 if len(begins) else np.zeros(0, bool)
        if (
            feature.role == CAUSE
            and inside >= LEAST_MARKED * is_slow.sum()
            and share <= MOST_MARKED
            and slow_in.sum() >= FEWEST_MARKED_TIMES
            and slow_in.mean() >= HALF
        ):
            marks.append(SharedMark(Term(feature, 0.0), inside, share))
    least = min((mark.all_frac for mark in marks), default=0.0)
    return next((mark for mark in marks if mark.all_frac <= ABOUT_AS_FEW * least), None)
