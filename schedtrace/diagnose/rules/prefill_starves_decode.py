"""``prefill-starves-decode``: decoding requests waited longer because their steps also prefilled."""

from typing import NamedTuple

import numpy as np
import polars as pl

from schedtrace.diagnose.excess_work import fit_lad
from schedtrace.diagnose.kv_cache import cache_use
from schedtrace.diagnose.rule import Findings, Rule, Threshold
from schedtrace.diagnose.rules.arrival_limited import late_requests
from schedtrace.diagnose.rules.common import (
    Fields,
    Values,
    advise,
    first_step,
    largest,
    share_of_requests,
    step_finding,
)
from schedtrace.diagnose.rules.token_budget_bound import smaller_budget, smaller_chunks
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Advice, Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.step_time import FEATURES, FEWEST_STEPS, fit_step_time, median
from schedtrace.timeline.timeline import Timeline, made_once

FOUND_FROM_FRAC = 0.10
"""Minimum share of the time that decoding requests spent in steps."""

CRITICAL_FROM_FRAC = 0.25

WORTH_FRAC = 0.05
"""Minimum share of the requests' time that a smaller budget saves for large chunks to be a root cause."""
SIZES = ("size", "step_us", "larger_us")
"""Figures of a smaller budget that the verdict states."""

PAUSE_TIMES, PAUSE_US = 10, 1_000_000
"""Minimum ratio to the usual time at which users notice a step as a pause, and time above which they notice
it at any ratio."""
MOST_FRAC = 0.5
AGAIN_FRAC = 0.25
"""Minimum share of the prefill that the cache has lost for the prefill to be an effect of the losses."""
FAILED_LOADS = (
    'look at the KV connector and its other side: why loads fail. kv_load_failure_policy "fail" in '
    "--kv-transfer-config ends such requests instead of computing their prompts here."
)
FEWER_STEPS = (
    "Fewer steps with prefill: prompts that are sent together share a step, or prefill on another engine. A "
    "profile of {step} shows what the device spends the fixed time on (such as a batch without a full CUDA "
    "graph). Smaller chunks or a smaller budget make it worse."
)
ELSEWHERE = (
    "Prefill on another engine ({connector:setting}): these chunks have about the same number of tokens, so "
    "this trace does not show whether smaller ones take less time. Measure one value of {option:setting}, "
    "such as {half:n token}, before you rely on it."
)
SHARED_FRAC = 0.95
"""Least share of the steps with prefill that take at least half of a cost of any prefill."""
WHOLE_LOG = 0.5
"""Minimum number of doublings between small and large prefills that separates a fixed cost from the cost of a
token."""


class PrefillTime(NamedTuple):
    """Time that prefill adds to a step that also decodes."""

    fixed_us: float
    """Time that any prefill adds, however few tokens it has."""
    per_token_us: float
    """Time that each prefill token adds."""


class StretchedDecodes(Evidence, kw_only=True):
    """Time that prefill added to the time between tokens."""

    stretch_frac: float
    """Share of all time between tokens, as above."""
    mean_stretch_us: float
    """Mean of ``stretch_us``."""
    fixed_us: float
    """Part of the stretch that does not depend on the number of prefill tokens; 0 if the steps show no such
    part."""
    failed_loads: int
    """Number of requests with a failed KV load whose prompts were computed in the stretched steps."""
    kv_loads: int
    """Number of all requests with a KV load."""
    failed_tokens: int
    """Number of prompt tokens of the failed loads that the stretched steps computed."""
    median_prefill_tokens: float
    """Median number of prefill tokens of a stretched step."""
    max_busy_us: int
    """Longest time of a stretched step."""
    median_decode_step_us: float | None
    """Median time of steps that only decode; None if there are no such steps."""


def _find(timeline: Timeline) -> Findings:
    decoding = timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("busy_us") > 0))
    all_us = _waited_us(decoding)
    # No step is stretched by more than its time: below the threshold, the slow model need not be asked.
    if not all_us or _waited_us(decoding.filter(pl.col("prefill_tokens") > 0)) / all_us < FOUND_FROM_FRAC:
        return
    mixed = stretched_steps(timeline)
    stretch_us = float((mixed["stretch_us"] * _decodes(mixed)).sum() or 0)
    if stretch_us / all_us < FOUND_FROM_FRAC:
        return
    failed = _failed_loads(timeline, mixed)
    evidence = StretchedDecodes(
        stretch_frac=stretch_us / all_us,
        mean_stretch_us=float(mixed["stretch_us"].sum()) / mixed.height,
        fixed_us=prefill_time(timeline).fixed_us,
        failed_loads=failed.height,
        kv_loads=0 if "kv_loads" not in timeline.lists else _loaded(timeline).height,
        failed_tokens=int(failed["tokens"].sum()),
        median_prefill_tokens=median(mixed["prefill_tokens"]),
        max_busy_us=int(mixed["busy_us"].max()),  # type: ignore[arg-type]  # an integer column with rows
        median_decode_step_us=decoding.filter(pl.col("prefill_tokens") == 0)["busy_us"].median(),  # type: ignore[arg-type]  # of integers
    )
    worst = largest(mixed, "stretch_us")
    model = timeline.step_time
    severity = "critical" if evidence.stretch_frac >= CRITICAL_FROM_FRAC else "warning"
    fields: Fields = {
        "tokens": int(mixed["prefill_tokens"].sum()),
        "message": "{steps:n step}{trials} computed prefill chunks beside decodes, which delayed the "
        "decoding requests by {mean_stretch_us:us} a step on average: {stretch_frac:%} of all time "
        "between their tokens, by the step-time model.[ A step with decodes only took "
        "{median_decode_step_us:us} at the median.]",
        "example": "{at} took {busy_us:us} for {prefill_tokens:n prefill token} and "
        "{decode_tokens:n decode token}, about {stretch_us:us} of it for the prefill.",
        "cases": worst,
        "cost_error_frac": None if model is None else model.error_frac,
    }
    again_frac = _computed_again_frac(timeline, mixed)
    smaller, usual_us = smaller_budget(timeline), evidence.median_decode_step_us
    if evidence.failed_tokens >= MOST_FRAC * fields["tokens"]:
        fields |= {
            "title": "KV loads failed, and their prompts are computed here",
            "verdict": "{failed_loads:n} of {kv_loads:n KV load} failed, and {failed_tokens:n prompt token} "
            "were computed here instead: steps with prefill took up to {max_busy_us:us}, where a step with "
            "decodes only takes {median_decode_step_us:us}; that is {stretch_frac:%} of the time between "
            "tokens.",
            "holder": _holder(_prefills(timeline, mixed).join(failed, on="request_id", how="semi")),
            "share_frac": share_of_requests(timeline, stretch_us),
            "advice": [advise(FAILED_LOADS, costs="With that policy, these requests fail.")],
        }
    elif (  # the fixed part of a prefill's time is most of it, and at least doubles a step
        evidence.stretch_frac >= CRITICAL_FROM_FRAC
        and usual_us is not None
        and evidence.fixed_us >= max(usual_us, MOST_FRAC * evidence.mean_stretch_us)
    ):
        fields |= {
            "title": "Any prefill in a step costs a fixed time",
            "verdict": "A prefill adds {fixed_us:us} to a step, however few its tokens "
            "({median_prefill_tokens:n token} at the median): {steps:n step} with one took "
            "{stretch_frac:%} of the time between tokens.",
            "share_frac": share_of_requests(timeline, stretch_us),
            "advice": [advise(FEWER_STEPS, step=first_step(worst))],
        }
    elif smaller is not None and smaller.saved_frac >= WORTH_FRAC:
        fields |= {
            "title": "Prefill chunks are too large for the decodes beside them",
            "verdict": "Steps with prefill delay the decodes in them: steps of about {size:n token} took "
            "{step_us:us}, larger ones {larger_us:us} on average; smaller chunks would save at least "
            "{share:%} of the requests' time.",
            "holder": _holder(_prefills(timeline, mixed)),
            "share_frac": smaller.saved_frac,
            "cause": Cause.TOKEN_BUDGET,
            "advice": [smaller.advice(timeline)],
        }
    elif (  # users notice such a step as a pause, and not only as a slightly slower stream
        usual_us is not None
        and evidence.mean_stretch_us >= min(PAUSE_TIMES * usual_us, max(PAUSE_US, usual_us))
        and not _came_too_late(timeline, mixed)
        and again_frac < AGAIN_FRAC
    ):
        fields |= {
            "title": "Large prefill chunks interrupt the decodes",
            "verdict": "Prefill chunks interrupt the decodes: {steps:n step} with up to "
            "{most:n prefill token} took up to {max_busy_us:us}, where a step with decodes only takes "
            "{median_decode_step_us:us}; that is {stretch_frac:%} of the time between tokens.",
            "holder": _holder(_prefills(timeline, mixed)),
            "share_frac": share_of_requests(timeline, stretch_us * (1 - again_frac)),
            "advice": [_chunks_advice(timeline, mixed)],
        }
    else:
        fields["severity"] = severity
    most = largest(mixed, "busy_us")["prefill_tokens"][0]
    sizes: Values = {} if smaller is None else {name: getattr(smaller, name) for name in SIZES}
    yield step_finding(timeline, mixed, evidence, values={"most": most, **sizes}, **fields)


def _chunks_advice(timeline: Timeline, mixed: pl.DataFrame) -> Advice:
    """Return the advice on the size of chunks, unless all recorded chunks have one size."""
    if _sizes_vary(mixed["prefill_tokens"].to_numpy()):
        return smaller_chunks(timeline, mixed)
    return advise(
        ELSEWHERE,
        connector="--kv-transfer-config",
        option="--long-prefill-token-threshold",
        half=round(median(mixed["prefill_tokens"]) / 2),
    )


def _sizes_vary(tokens: np.ndarray) -> bool:
    """Return whether prefills vary enough in size to separate a fixed cost from the cost of a token."""
    small, large = np.quantile(tokens, [0.1, 0.9])
    return bool(np.log2(large / small) >= WHOLE_LOG)


def _came_too_late(timeline: Timeline, mixed: pl.DataFrame) -> bool:
    """Return whether most prefill is for requests sent together with the decoding ones but arriving late."""
    if not timeline.closed_workload:
        return False
    late = late_requests(timeline)[["request_id"]]
    of_late = _prefills(timeline, mixed).join(late, on="request_id", how="semi")["scheduled_tokens"].sum()
    return int(of_late) >= MOST_FRAC * int(mixed["prefill_tokens"].sum())


def _computed_again_frac(timeline: Timeline, mixed: pl.DataFrame) -> float:
    """Return the share of the prefill that earlier prompts had computed and the cache has lost.

    The time of these tokens is an effect, and ``prefix-cache`` states it.
    """
    each = _prefills(timeline, mixed)
    missed = cache_use(timeline).join(each, on="request_id", how="semi")["missed_tokens"].sum() or 0
    prefill = int(mixed["prefill_tokens"].sum())
    return min(1.0, int(missed) / prefill) if prefill else 0.0


def _loaded(timeline: Timeline) -> pl.DataFrame:
    """Return the requests with a KV load, and whether it ``failed``."""
    loads = timeline.lists["kv_loads"].select("request_id", failed=pl.col("event") == "failed").collect()
    return loads.group_by("request_id").agg(pl.col("failed").any())


def _failed_loads(timeline: Timeline, mixed: pl.DataFrame) -> pl.DataFrame:
    """Return the requests with a failed KV load, and the ``tokens`` of their prompts in these steps."""
    each = _prefills(timeline, mixed).group_by("request_id").agg(tokens=pl.col("scheduled_tokens").sum())
    if "kv_loads" not in timeline.lists:
        return each.clear()
    return each.join(_loaded(timeline).filter("failed"), on="request_id", how="semi")


def _prefills(timeline: Timeline, mixed: pl.DataFrame) -> pl.DataFrame:
    """Return the prompts' chunks in these steps."""
    return timeline.prefills.join(mixed.select(pl.col("step").cast(pl.Int64)), on="step", how="semi")


def _holder(prefills: pl.DataFrame) -> Message:
    """Return the names of the requests whose prompts these chunks prefilled."""
    each = prefills.group_by("request_id").agg(
        pl.col("scheduled_tokens").sum(), pl.col("prompt_tokens").first()
    )
    largest = each.sort("scheduled_tokens", "request_id", descending=[True, False])
    if largest.is_empty():
        return NOTHING
    return say(
        "The chunks are of {prompts:n prompt}; the largest is {request:id} ({tokens:n token}).",
        prompts=largest.height,
        request=str(largest["request_id"][0]),
        tokens=int(largest["prompt_tokens"][0]),
    )


def _waited_us(steps: pl.DataFrame) -> int:
    """Return the busy time of these steps, counted once per decode."""
    return int((steps["busy_us"] * _decodes(steps)).sum() or 0)


def _decodes(steps: pl.DataFrame) -> pl.Series:
    """Return the number of decodes in each step: drafts belong to the decode that they follow."""
    return steps["decode_tokens"] - steps["draft_tokens"]


def stretched_steps(timeline: Timeline) -> pl.DataFrame:
    """Return the steps with both kinds of work, and ``stretch_us``, the time that prefill added to each."""
    fixed_us, per_token_us = prefill_time(timeline)
    added_us = fixed_us + pl.col("prefill_tokens") * per_token_us
    return _mixed(timeline).with_columns(stretch_us=pl.min_horizontal(added_us, "busy_us"))


def _mixed(timeline: Timeline) -> pl.DataFrame:
    return timeline.steps.filter(
        (pl.col("decode_tokens") > 0) & (pl.col("prefill_tokens") > 0) & (pl.col("busy_us") > 0)
    )


@made_once
def prefill_time(timeline: Timeline) -> PrefillTime:
    """Return the time that prefill adds to steps that decode, beyond the time of their decodes alone.

    This time has a fixed part only if steps with few and with many prefill tokens show one, and steps that
    only decode show the time of decodes.
    """
    model = timeline.step_time
    plain = PrefillTime(0.0, 0.0 if model is None else model.per_prefill_token_us)
    mixed = _mixed(timeline).drop_nulls(FEATURES)
    alone = fit_step_time(
        timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("prefill_tokens") == 0))
    )
    if model is None or alone is None or mixed.height < FEWEST_STEPS:
        return plain
    tokens = mixed["prefill_tokens"].to_numpy().astype(float)
    if not _sizes_vary(tokens):
        return plain
    without_us = mixed.select(alone.predicted() - alone.per_prefill_token_us * pl.col("prefill_tokens"))
    added_us = mixed["busy_us"].to_numpy() - without_us.to_series().to_numpy()
    fixed_us, per_token_us = (
        float(cost) for cost in fit_lad(np.column_stack([np.ones(len(tokens)), tokens]), added_us)
    )
    is_shared = np.mean(added_us - per_token_us * tokens >= fixed_us / 2) >= SHARED_FRAC
    return PrefillTime(fixed_us, max(per_token_us, 0.0)) if fixed_us > 0 and is_shared else plain


RULE = Rule(
    code="prefill-starves-decode",
    summary="steps with prefill chunks stretched the time between the tokens of running requests",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS}),
    find=_find,
    symptom_of=("prefix-cache", "token-budget-bound", "long-prompt", "arrival-limited"),
    threshold=Threshold(FOUND_FROM_FRAC, lambda finding: getattr(finding.evidence, "stretch_frac", None)),
)
