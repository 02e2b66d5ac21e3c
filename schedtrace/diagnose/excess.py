"""What slow steps have in common, by part of a step, and what of their excess nothing explains."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from schedtrace.diagnose.excess_search import (
    FEWEST_ROWS,
    Explanation,
    sampled,
    search,
    split,
    work_errors,
)
from schedtrace.model.report import StepExcess
from schedtrace.timeline.excess import (
    EXECUTION,
    HOST_PARTS,
    Array,
    Feature,
    exposed_us,
    features,
    judged_steps,
    part_times,
    work_of,
)
from schedtrace.timeline.timeline import Timeline, made_once

LEAST_FRAC = 0.01
"""Least share of the busy time that a part takes, or an explanation costs."""
LEAST_FACTOR, LEAST_HOST_FACTOR = {EXECUTION: 1.03}, 1.2
"""Least factor of the part's time: what a host does takes far less evenly long than a device."""
SLOW_ERRORS = 4.0
"""Typical errors of the model beyond which a step is slow."""
MOST_SUSPECTS = 3
"""Requests whose presence is looked at one by one: those whose steps are slowest."""
FEWEST_OF_REQUEST = 20
"""Fewest steps with a request, and without it."""
FEWEST_BESIDE = 5
"""Fewest steps before it comes, and after it went."""
WINDOW = 20
"""Steps on either side of a request's beginning and end."""


@dataclass(frozen=True, eq=False)
class Effect:
    """An explanation with its figures on the steps that were looked at."""

    explanation: Explanation
    excess_us: Array
    """Time that it adds to each step."""
    inside: Array
    """Whether each step meets its conditions; of a slope: whether it adds time."""
    longer: Array
    """Whether each step is longer by half of the usual effect or more."""
    factor: float
    """Median of actual over expected time of the steps inside."""
    added_us: float
    """Time that it adds to all steps."""
    cost_us: float
    """Time that it cost the engine, of all steps: host work behind a device that works costs nothing."""
    felt_us: float
    """The same, added up over the requests that ran."""


@dataclass(frozen=True, eq=False)
class PartExcess:
    """Excess of one part of the steps of an engine."""

    part: str
    steps: pl.DataFrame = field(repr=False)
    """The steps that were looked at."""
    all_steps: int
    """Steps that have this part."""
    expected_us: Array
    """Time that the work takes."""
    times_us: Array
    effects: list[Effect]
    error_frac: float
    """Typical relative error of the model with all effects."""
    slow_steps: int
    """Steps that were looked at and are far longer than their work explains."""
    excess_us: float
    """Their excess, of all steps."""
    unexplained_us: float
    """Part of it that no effect explains."""

    @property
    def is_sample(self) -> bool:
        """Whether some steps were not looked at."""
        return self.steps.height < self.all_steps


@made_once
def part_excesses(timeline: Timeline) -> list[PartExcess]:
    """Return the excess of each part of the steps that takes time, with what explains it."""
    steps = judged_steps(timeline)
    if steps.height < FEWEST_ROWS or not timeline.busy_us:
        return []
    parts = []
    for part, times in part_times(timeline, steps).items():
        known = np.flatnonzero(np.isfinite(times) & (times > 0))
        if len(known) < FEWEST_ROWS:
            continue
        looked = known[sampled(len(known))]
        of_part, of_steps = times[looked], steps[looked]
        exposed = exposed_us(timeline, of_steps, part, of_part)
        scale = len(known) / len(looked)
        if part in HOST_PARTS and exposed.sum() * scale < LEAST_FRAC * timeline.busy_us:
            continue
        excess = part_excess(timeline, part, of_steps, of_part, exposed, len(known))
        least_us = LEAST_FRAC * timeline.busy_us
        least = LEAST_FACTOR.get(part, LEAST_HOST_FACTOR)
        effects = [one for one in excess.effects if one.cost_us >= least_us and one.factor >= least]
        parts.append(replace(excess, effects=effects))
    return parts


def step_excess(timeline: Timeline) -> list[StepExcess]:
    """Return the excess of slow steps by part, for a report."""
    return [
        StepExcess(
            engine_rank=timeline.rank,
            part=excess.part,
            steps=excess.steps.height,
            slow_steps=excess.slow_steps,
            excess_ms=excess.excess_us / 1e3,
            unexplained_frac=excess.unexplained_us / excess.excess_us,
            model_error_frac=excess.error_frac,
        )
        for excess in part_excesses(timeline)
        if excess.excess_us > LEAST_FRAC * timeline.busy_us
    ]


def part_excess(
    timeline: Timeline, part: str, steps: pl.DataFrame, times: Array, exposed: Array, count: int
) -> PartExcess:
    """Return the excess of one part, with what explains it.

    Args:
        timeline: The engine's trace.
        part: The part's name.
        steps: The steps that are looked at.
        times: Time of the part of each.
        exposed: How much of it the device did not work.
        count: Number of steps that have this part.
    """
    work = work_of(part, steps)
    errors = work_errors(times, work)
    suspects = _suspects(timeline, steps, errors) if part == EXECUTION else []
    of_steps = features(timeline, steps, suspects)
    explanations = search(times, work, of_steps)
    measures = [_measure(explanation) for explanation in explanations]
    expected, added, error = split(times, work, measures, [one.additive for one in explanations])
    scale = count / len(times)
    effects = [
        _effect(steps, times, explanation, measure, added[:, at], times - expected, exposed, scale)
        for at, (explanation, measure) in enumerate(zip(explanations, measures, strict=True))
    ]
    excess = times - expected
    slow = (excess > SLOW_ERRORS * error * np.maximum(expected, 0)) & (excess > 0)
    explained = np.minimum(excess, np.clip(added, 0, None).sum(axis=1))
    return PartExcess(
        part=part,
        steps=steps,
        all_steps=count,
        expected_us=expected,
        times_us=times,
        effects=effects,
        error_frac=error,
        slow_steps=int(slow.sum()),
        excess_us=float(excess[slow].sum()) * scale,
        unexplained_us=float((excess - explained)[slow].sum()) * scale,
    )


def _measure(explanation: Explanation) -> Array:
    return explanation.measure([term.feature.values for term in explanation.terms])


def _effect(
    steps: pl.DataFrame,
    times: Array,
    explanation: Explanation,
    measure: Array,
    added: Array,
    excess: Array,
    exposed: Array,
    scale: float,
) -> Effect:
    inside = measure > 0
    half = float(np.median(added[inside])) / 2 if inside.any() else 0.0
    cost = np.minimum(np.clip(added, 0, None), exposed)
    running = steps.select(pl.max_horizontal("total_requests", "num_running_before").fill_null(0))
    return Effect(
        explanation=explanation,
        excess_us=added,
        inside=inside,
        longer=excess > half,
        factor=float(np.median((times / np.maximum(times - added, 1.0))[inside])) if inside.any() else 1.0,
        added_us=float(np.clip(added, 0, None).sum()) * scale,
        cost_us=float(cost.sum()) * scale,
        felt_us=float((cost * running.to_series().to_numpy()).sum()) * scale,
    )


def _suspects(timeline: Timeline, steps: pl.DataFrame, errors: Array) -> list[str]:
    """Return the requests that a split at their presence would explain most with.

    That is n of the steps with it * n of the others * distance of their mean errors squared.
    """
    order = np.argsort(steps["step"].to_numpy(), kind="stable")
    numbers, sums = steps["step"].to_numpy()[order], np.concatenate([[0.0], np.cumsum(errors[order])])
    many, total = len(numbers), float(sums[-1])
    upto = pl.LazyFrame({"at": numbers, "sum": sums[1:], "number": np.arange(1, many + 1)}).set_sorted("at")
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
        feature.detail: feature for feature in features(timeline, steps, ranked) if feature.kind == "request"
    }
    return [name for name in ranked if name in present and _comes_and_goes(present[name], errors)]


def _comes_and_goes(feature: Feature, errors: Array) -> bool:
    """Return whether steps get slow where the request comes and fast where it goes.

    A machine that is slow for a while does not wait for a request to come and go.
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


def explained_steps(timeline: Timeline) -> pl.Series:
    """Return the numbers of the steps that are slow for something that they have in common."""
    steps = [
        excess.steps["step"].filter(pl.Series(effect.inside)) for excess, effect in every_effect(timeline)
    ]
    return pl.concat(steps).unique() if steps else pl.Series("step", [], pl.Int64)


def every_effect(timeline: Timeline) -> Sequence[tuple[PartExcess, Effect]]:
    """Return all effects with their part, the one that costs most first."""
    effects = [(excess, effect) for excess in part_excesses(timeline) for effect in excess.effects]
    return sorted(effects, key=lambda one: -one[1].felt_us)
