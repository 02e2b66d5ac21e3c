"""Groups of steps that share something, and whether it goes with a longer step than their work explains.

What a group's steps should take comes from a model of step times that is fitted to all other steps: a slow
group would spoil a model of its own.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import polars as pl

from schedtrace.timeline.engine_states import unstarved
from schedtrace.timeline.events import SLOWER
from schedtrace.timeline.step_time import FEATURES, FEWEST_STEPS, fit_step_time, median, nearly_predicted
from schedtrace.timeline.timeline import Timeline, made_once

FEWEST_OF_GROUP = 5
"""Fewest slow steps of a group: fewer may share something by chance."""
FEWEST_OF_REQUEST = 20
"""Fewest steps of a request, to compare its first and its last ones with those without it."""
SLOW_FACTOR = 1.5
"""A half more than expected; a jump between neighbouring batch sizes counts from there, too."""
QUANTILE = 0.9
"""Share of a group's steps that are slower than this share of the rest: a clear difference."""
MOST_OF_KIND = 3
"""Candidates of one kind that a model is fitted for."""
WINDOW = 20
"""Steps on either side of a batch size."""
FIRST_STEPS = (5, 10, 20, 50)
ROUGHLY_SLOW_FACTOR = 1.1
"""Factor that a rough model leaves: far below ``SLOW_FACTOR``, since an outlier may spoil such a model."""
NEAR_TIE = 0.9
"""Another group that explains so much of what the best one does is named, too."""

UNSURE = 0.02
"""Share of a slowdown's steps up to which its beginning and its end are known."""


class Trait(NamedTuple):
    """Feature of a request that makes a step more than a forward pass of its tokens."""

    words: str
    """The requests that ask for it."""
    asked: pl.Expr
    """Expression over columns of ``Arrival``."""


TRAITS = {
    "logprobs": Trait("requests that ask for log-probabilities", pl.col("logprobs").is_not_null()),
    "prompt_logprobs": Trait(
        "requests that ask for log-probabilities of their prompts", pl.col("prompt_logprobs").is_not_null()
    ),
    "structured": Trait("requests with structured output", pl.col("structured")),
    "logit_bias": Trait("requests with a logit bias", pl.col("logit_bias") > 0),
    "min_tokens": Trait("requests with a minimum of tokens", pl.col("min_tokens") > 0),
    "lora": Trait("requests that use a LoRA adapter", pl.col("lora").is_not_null()),
}


@dataclass(frozen=True)
class StepGroup:
    """Steps that share something."""

    kind: str
    """``batch_size``, ``trait``, ``request``, ``mixed``, ``first_steps`` or ``first_use``."""
    members: pl.Series = field(repr=False, compare=False)
    """Numbers of the steps."""
    size: int | None = None
    """``batch_size``: the largest batch below them; ``first_steps``: how many."""
    trait: str | None = None
    """A key of ``TRAITS``."""
    requests: tuple[str, ...] = ()
    """Requests that only these steps scheduled; of a trait, those that have it."""


@dataclass(frozen=True)
class SlowGroup:
    """A group whose steps take longer than their work explains."""

    group: StepGroup
    steps: pl.DataFrame
    """``step``, ``trial``, ``total_requests``, ``busy_us``, ``expected_us`` and ``factor`` of each."""
    factor: float
    """Median of ``busy_us / expected_us``."""
    explained: float
    """Share of the steps' spread about the model that goes away with this group."""
    error_frac: float
    """Median relative error of the model on the other steps."""


@made_once
def slow_groups(timeline: Timeline) -> list[SlowGroup]:
    """Return groups that are clearly slow for their size: the one that explains most, then those near it."""
    steps = judged_steps(timeline)
    model = fit_step_time(steps)
    if model is None:
        return []
    steps = steps.with_columns(log_factor=(pl.col("busy_us") / model.predicted()).log())
    spread = _spread(steps["log_factor"])
    groups = [
        slow
        for group in _candidates(timeline, steps)
        if (slow := _judged(group, steps, spread)) is not None and not _is_slowdown(timeline, slow)
    ]
    groups.sort(key=lambda slow: -slow.explained)
    return [slow for slow in groups if slow.explained >= NEAR_TIE * groups[0].explained]


def _is_slowdown(timeline: Timeline, slow: SlowGroup) -> bool:
    """Return whether these steps are slow since the device was for a time: that tells better which are."""
    slower = timeline.events.filter(pl.col("kind") == SLOWER)["step"]
    inside = slow.steps["step"].is_in(slower.implode())
    if 2 * inside.sum() <= slow.steps.height:
        return False
    alone = slow.steps.filter(~inside)
    as_slow = alone.filter(pl.col("factor") >= math.sqrt(slow.factor)).height
    wrong = slower.len() - inside.sum() + alone.height - as_slow
    return bool(wrong > as_slow + UNSURE * slower.len())


def judged_steps(timeline: Timeline) -> pl.DataFrame:
    """Return the steps whose length and work are known.

    Without those that recompute, whose work the model lacks, and those for which processors were short.
    """
    return (
        unstarved(timeline, timeline.starved_steps, timeline.steps)
        .filter(
            (pl.col("busy_us") > 0)
            & (pl.col("total_requests") > 0)
            & (pl.col("recomputed_tokens").fill_null(0) == 0)
        )
        .select("step", "trial", "total_requests", "used_tokens", "busy_us", *FEATURES)
        .drop_nulls(["total_requests", *FEATURES])
    )


def _judged(group: StepGroup, steps: pl.DataFrame, spread: float) -> SlowGroup | None:
    """Return the group with what its steps should take; None unless it is clearly slow."""
    inside = pl.col("step").is_in(group.members.implode())
    prefills = steps.group_by(inside.alias("inside")).agg((pl.col("prefill_tokens") > 0).sum() > 0)
    if prefills["prefill_tokens"].sum() == 1:  # the model cannot know what prefill tokens of one side take
        steps = steps.filter(pl.col("prefill_tokens") == 0)
    rest, members = steps.filter(~inside), steps.filter(inside)
    if members.height < FEWEST_OF_GROUP or rest.height < FEWEST_STEPS:
        return None
    rough = nearly_predicted(rest, members)
    if rough is not None and median(members["busy_us"] / rough) < ROUGHLY_SLOW_FACTOR:
        return None  # nine tenths of the groups need no fit that outliers do not rule
    model = fit_step_time(rest)
    if model is None:
        return None
    expected = model.predicted().alias("expected_us")
    members = members.with_columns(expected).with_columns(factor=pl.col("busy_us") / pl.col("expected_us"))
    rest = rest.with_columns(factor=pl.col("busy_us") / expected)
    of_others = rest["factor"]
    factor, high = median(members["factor"]), of_others.quantile(QUANTILE)
    low = members["factor"].quantile(1 - QUANTILE)
    if factor < SLOW_FACTOR or low is None or high is None or low <= high:
        return None
    if group.kind == "request" and not _begins_and_ends_with(members, rest):
        return None
    left = _spread(members["factor"].log()) * members.height + _spread(of_others.log()) * rest.height
    return SlowGroup(group, members, factor, 1 - left / steps.height / spread, model.error_frac)


def _begins_and_ends_with(members: pl.DataFrame, rest: pl.DataFrame) -> bool:
    """Return whether steps get slow when the request comes and fast when it goes, within its trial.

    A machine that is slow for a while does not wait for a request to come and go.
    """
    trial = rest.filter(pl.col("trial").eq_missing(pl.lit(members["trial"][0])))
    before = trial.filter(pl.col("step") < members["step"].min()).tail(WINDOW)["factor"]
    after = trial.filter(pl.col("step") > members["step"].max()).head(WINDOW)["factor"]
    sides = ((before, members["factor"].head(WINDOW)), (after, members["factor"].tail(WINDOW)))
    return all(
        outside.len() >= FEWEST_OF_GROUP and median(inside) >= SLOW_FACTOR * median(outside)
        for outside, inside in sides
    )


def _spread(log_factors: pl.Series) -> float:
    """Return the mean absolute distance from the median."""
    return float((log_factors - log_factors.median()).abs().mean() or 0.0)  # type: ignore[arg-type]  # floats


def _candidates(timeline: Timeline, steps: pl.DataFrame) -> list[StepGroup]:
    return [
        *_traits(timeline, steps),
        *_batch_sizes(steps),
        *_mixed(steps),
        *(_first(steps) if timeline.begins else []),
        *_requests(timeline, steps),
    ]


def _batch_sizes(steps: pl.DataFrame) -> list[StepGroup]:
    """Return all steps above a batch size at which decode steps get longer with a jump."""
    decodes = steps.filter(pl.col("prefill_tokens") == 0).sort("total_requests", "step")
    sizes, busy = decodes["total_requests"], decodes["busy_us"]
    jumps = []
    for _, above in pairwise(sizes.unique().sort().to_list()):
        at = int(sizes.search_sorted(above, side="left"))
        first = max(0, at - WINDOW)
        if min(at, decodes.height - at) < FEWEST_OF_GROUP:
            continue
        sides = (busy[first:at], busy[at : at + WINDOW])
        medians = [median(part) for part in sides]
        means = [float(part.mean()) for part in (sizes[first:at], sizes[at : at + WINDOW])]  # type: ignore[arg-type]  # integers
        # Sizes beside a cliff have nearly its medians: at the cliff itself no step is on the wrong side.
        middle = (medians[0] * medians[1]) ** 0.5
        wrong = int((sides[0] > middle).sum()) + int((sides[1] < middle).sum())
        jumps.append((medians[1] / medians[0] / (means[1] / means[0]), wrong, above))
    clear = [jump for jump in jumps if jump[0] >= SLOW_FACTOR]
    fewest = min((wrong for _, wrong, _ in clear), default=0)
    largest = sorted((jump for jump in clear if jump[1] == fewest), reverse=True)[:MOST_OF_KIND]
    seen = steps["total_requests"].unique()  # those of steps with a prefill, too
    below = [int(seen.filter(seen < above).max() or 0) for _, _, above in largest]  # type: ignore[arg-type]  # integers
    return [
        StepGroup("batch_size", steps.filter(pl.col("total_requests") > size)["step"], size=size)
        for size in below
    ]


def _mixed(steps: pl.DataFrame) -> list[StepGroup]:
    """Return steps that prefill and decode, where others only prefill: else the model cannot price both."""
    decodes, prefills = pl.col("decode_tokens") > 0, pl.col("prefill_tokens") > 0
    if steps.filter(prefills & ~decodes).height < FEWEST_OF_GROUP:
        return []
    return [StepGroup("mixed", steps.filter(prefills & decodes)["step"])]


def _first(steps: pl.DataFrame) -> list[StepGroup]:
    """Return the first steps of all, and the first of every batch size."""
    uses = pl.col("step") == pl.col("step").min().over("total_requests")
    return [
        *(StepGroup("first_steps", steps["step"].head(many), size=many) for many in FIRST_STEPS),
        StepGroup("first_use", steps.filter(uses)["step"]),
    ]


def _traits(timeline: Timeline, steps: pl.DataFrame) -> list[StepGroup]:
    groups = []
    for trait, (_, has_it) in TRAITS.items():
        asked = timeline.known_requests.filter(has_it)["request_id"]
        if asked.is_empty():
            continue
        members = _steps_with(timeline, steps, asked)
        groups.append(StepGroup("trait", members, trait=trait, requests=tuple(asked)))
    return groups


def _requests(timeline: Timeline, steps: pl.DataFrame) -> list[StepGroup]:
    """Return the requests whose steps are the slowest of all by the common model."""
    slowest = _slowest_requests(timeline, steps)
    return [
        StepGroup("request", _steps_with(timeline, steps, pl.Series([name])), requests=(name,))
        for name in slowest
    ]


def _slowest_requests(timeline: Timeline, steps: pl.DataFrame) -> list[str]:
    """Rank requests by what a split at their presence explains: n of group * n of rest * distance^2."""
    sums = steps.select("step", sum=pl.col("log_factor").cum_sum(), number=pl.int_range(1, pl.len() + 1))
    upto = sums.lazy().with_columns(pl.col("step").set_sorted())
    total, many = sums["sum"].last(), sums.height
    parts = (
        timeline.stretches.select("request_id", "step", "last_step")
        .with_columns(before=pl.col("step") - 1)
        .sort("before")
        .join_asof(upto, left_on="before", right_on="step", coalesce=False)
        .select("request_id", "last_step", sum_before="sum", number_before="number")
        .sort("last_step")
        .join_asof(upto, left_on="last_step", right_on="step")
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
    return (
        parts.filter(pl.col("number").is_between(FEWEST_OF_REQUEST, many - FEWEST_STEPS))
        .filter(inside > outside)
        .with_columns(score=pl.col("number") * (many - pl.col("number")) * (inside - outside) ** 2)
        .sort("score", "request_id", descending=[True, False])
        .head(MOST_OF_KIND + 1)
        .collect()["request_id"]
        .to_list()
    )


def _steps_with(timeline: Timeline, steps: pl.DataFrame, requests: pl.Series) -> pl.Series:
    """Return the numbers of the steps that scheduled one of these requests."""
    numbers = (
        timeline.stretches.filter(pl.col("request_id").is_in(requests.implode()))
        .select(step=pl.int_ranges("step", pl.col("last_step") + 1))
        .explode("step")
        .unique()
        .collect()["step"]
    )
    return steps.filter(pl.col("step").is_in(numbers.implode()))["step"]
