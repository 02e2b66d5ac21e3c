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
from schedtrace.model.report import Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.step_time import FEATURES, FEWEST_STEPS, fit_step_time, median
from schedtrace.timeline.timeline import Timeline, made_once

FOUND_FROM_FRAC = 0.10
"""Minimum share of the decoding requests' time in steps that prefill must have added."""

CRITICAL_FROM_FRAC = 0.25

WORTH_FRAC = 0.05
"""Minimum share of the requests' time that a smaller budget must save for large chunks to be a root cause."""
SIZES = ("size", "step_us", "larger_us")
"""Figures of a smaller budget that the verdict states."""

PAUSE_TIMES, PAUSE_US = 10, 1_000_000
"""Minimum ratio to the usual time at which users notice a step as a pause, and time in microseconds that they
notice at any ratio."""
MOST_FRAC = 0.5
AGAIN_FRAC = 0.25
"""Minimum share of prefill tokens that the cache had lost at which the prefill is an effect of these losses.
"""
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
"""Minimum share of the steps with prefill whose time must include at least half of the fitted fixed cost.
Otherwise, that cost is not attributed to every prefill."""
DECODES = pl.col("decode_tokens") - pl.col("draft_tokens")
"""Number of decodes in a step: drafts belong to the decode that they follow."""
WHOLE_LOG = 0.5
"""Minimum binary logarithm of the ratio of large to small prefills that separates a fixed cost from the cost
per token."""


class PrefillTime(NamedTuple):
    """Time that prefill adds to a step that also decodes."""

    fixed_us: float
    """Time that any prefill adds, however few tokens it has."""
    per_token_us: float
    """Time that each prefill token adds."""


class StretchedDecodes(Evidence, kw_only=True):
    """Time that prefill added to the time between tokens."""

    stretch_frac: float
    """Share of the decoding requests' time in steps that prefill added."""
    mean_stretch_us: float
    """Mean time that prefill added to a stretched step."""
    fixed_us: float
    """Part of the stretch that does not depend on the number of prefill tokens; 0 if the steps show no such
    part."""
    failed_loads: int
    """Number of requests whose KV load failed and whose prompts were computed in the stretched steps."""
    kv_loads: int
    """Number of all requests with a KV load."""
    failed_tokens: int
    """Number of prompt tokens that the stretched steps computed for requests whose KV load failed."""
    median_prefill_tokens: float
    """Median number of prefill tokens of a stretched step."""
    max_busy_us: int
    """Longest time of a stretched step."""
    median_decode_step_us: float | None
    """Median time of steps that only decode; None if there are no such steps."""


def _find(timeline: Timeline) -> Findings:
    decoding = timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("busy_us") > 0))
    mixed = _mixed(timeline)
    all_us, mixed_us = (
        int(steps.select((pl.col("busy_us") * DECODES).sum()).item() or 0) for steps in (decoding, mixed)
    )
    # No step is stretched by more than its time: below the threshold, the slow model need not be asked.
    if not all_us or mixed_us / all_us < FOUND_FROM_FRAC:
        return
    fixed_us, per_token_us = prefill_time(timeline)
    added_us = fixed_us + pl.col("prefill_tokens") * per_token_us
    mixed = mixed.with_columns(stretch_us=pl.min_horizontal(added_us, "busy_us"))
    stretch_us = float(mixed.select((pl.col("stretch_us") * DECODES).sum()).item() or 0)
    if stretch_us / all_us < FOUND_FROM_FRAC:
        return
    prefills = timeline.prefills.join(mixed.select(pl.col("step").cast(pl.Int64)), on="step", how="semi")
    failed, loads = prefills.clear(), 0
    if "kv_loads" in timeline.lists:
        events = timeline.lists["kv_loads"].select("request_id", failed=pl.col("event") == "failed").collect()
        loaded = events.group_by("request_id").agg(pl.col("failed").any())
        failed, loads = prefills.join(loaded.filter("failed"), on="request_id", how="semi"), loaded.height
    evidence = StretchedDecodes(
        stretch_frac=stretch_us / all_us,
        mean_stretch_us=float(mixed["stretch_us"].sum()) / mixed.height,
        fixed_us=fixed_us,
        failed_loads=failed["request_id"].n_unique(),
        kv_loads=loads,
        failed_tokens=int(failed["scheduled_tokens"].sum()),
        median_prefill_tokens=median(mixed["prefill_tokens"]),
        max_busy_us=int(mixed["busy_us"].max()),  # type: ignore[arg-type]  # an integer column with rows
        median_decode_step_us=decoding.filter(pl.col("prefill_tokens") == 0)["busy_us"].median(),  # type: ignore[arg-type]  # of integers
    )
    model, smaller = timeline.step_time, smaller_budget(timeline)
    sizes: Values = {} if smaller is None else {name: getattr(smaller, name) for name in SIZES}
    fields: Fields = {
        "tokens": int(mixed["prefill_tokens"].sum()),
        "message": "{steps:n step}{trials} computed prefill chunks beside decodes, which delayed the "
        "decoding requests by {mean_stretch_us:us} a step on average: {stretch_frac:%} of all time "
        "between their tokens, by the step-time model.[ A step with decodes only took "
        "{median_decode_step_us:us} at the median.]",
        "example": "{at} took {busy_us:us} for {prefill_tokens:n prefill token} and "
        "{decode_tokens:n decode token}, about {stretch_us:us} of it for the prefill.",
        "cases": largest(mixed, "stretch_us"),
        "cost_error_frac": None if model is None else model.error_frac,
    }
    fields |= _root_cause(timeline, mixed, prefills, failed, evidence)
    yield step_finding(
        timeline,
        mixed,
        evidence,
        values={"most": largest(mixed, "busy_us")["prefill_tokens"][0], **sizes},
        **fields,
    )


def _root_cause(
    timeline: Timeline,
    mixed: pl.DataFrame,
    prefills: pl.DataFrame,
    failed: pl.DataFrame,
    evidence: StretchedDecodes,
) -> Fields:
    """Return the fields of a root cause if the trace shows what helps, or else the severity of a symptom.

    Args:
        timeline: The engine's trace.
        mixed: Stretched steps.
        prefills: Chunks of prompts in these steps.
        failed: Chunks of requests whose KV loads failed.
        evidence: Evidence about these steps.
    """
    prefill_tokens = int(mixed["prefill_tokens"].sum())
    stretch_us = float(mixed.select((pl.col("stretch_us") * DECODES).sum()).item() or 0)
    is_critical = evidence.stretch_frac >= CRITICAL_FROM_FRAC
    symptom: Fields = {"severity": "critical" if is_critical else "warning"}
    smaller, usual_us = smaller_budget(timeline), evidence.median_decode_step_us
    if evidence.failed_tokens >= MOST_FRAC * prefill_tokens:
        return {
            "title": "KV loads failed, and their prompts are computed here",
            "verdict": "{failed_loads:n} of {kv_loads:n KV load} failed, and {failed_tokens:n prompt token} "
            "were computed here instead: steps with prefill took up to {max_busy_us:us}, where a step with "
            "decodes only takes {median_decode_step_us:us}; that is {stretch_frac:%} of the time between "
            "tokens.",
            "holder": _holder(failed),
            "share_frac": share_of_requests(timeline, stretch_us),
            "advice": [advise(FAILED_LOADS, costs="With that policy, these requests fail.")],
        }
    # The fixed part of a prefill's time is most of it, and at least doubles a step.
    least_us = max(usual_us or 0.0, MOST_FRAC * evidence.mean_stretch_us)
    if is_critical and usual_us is not None and evidence.fixed_us >= least_us:
        return {
            "title": "Any prefill in a step costs a fixed time",
            "verdict": "A prefill adds {fixed_us:us} to a step, however few its tokens "
            "({median_prefill_tokens:n token} at the median): {steps:n step} with one took "
            "{stretch_frac:%} of the time between tokens.",
            "share_frac": share_of_requests(timeline, stretch_us),
            "advice": [advise(FEWER_STEPS, step=first_step(largest(mixed, "stretch_us")))],
        }
    if smaller is not None and smaller.saved_frac >= WORTH_FRAC:
        return {
            "title": "Prefill chunks are too large for the decodes beside them",
            "verdict": "Steps with prefill delay the decodes in them: steps of about {size:n token} took "
            "{step_us:us}, larger ones {larger_us:us} on average; smaller chunks would save at least "
            "{share:%} of the requests' time.",
            "holder": _holder(prefills),
            "share_frac": smaller.saved_frac,
            "cause": Cause.TOKEN_BUDGET,
            "advice": [smaller.advice(timeline)],
        }
    # Users notice such a step as a pause, and not only as a slightly slower stream.
    if usual_us is None or evidence.mean_stretch_us < min(PAUSE_TIMES * usual_us, max(PAUSE_US, usual_us)):
        return symptom
    return _interrupted(timeline, mixed, prefills, stretch_us) or symptom


def _interrupted(
    timeline: Timeline, mixed: pl.DataFrame, prefills: pl.DataFrame, stretch_us: float
) -> Fields | None:
    """Return the fields about large chunks that interrupt decodes; None if something else is the cause."""
    prefill_tokens = int(mixed["prefill_tokens"].sum())
    if timeline.closed_workload:  # most prefill may be for requests sent with the decoding ones, but late
        late = late_requests(timeline)[["request_id"]]
        of_late = prefills.join(late, on="request_id", how="semi")["scheduled_tokens"].sum()
        if int(of_late) >= MOST_FRAC * prefill_tokens:
            return None
    # The time of tokens that the cache has lost is an effect, and ``prefix-cache`` states it.
    again = cache_use(timeline).join(prefills, on="request_id", how="semi")["missed_tokens"].sum() or 0
    again_frac = min(1.0, int(again) / prefill_tokens)
    if again_frac >= AGAIN_FRAC:
        return None
    advice = smaller_chunks(timeline, mixed)
    if not _sizes_vary(mixed["prefill_tokens"].to_numpy()):
        advice = advise(
            ELSEWHERE,
            connector="--kv-transfer-config",
            option="--long-prefill-token-threshold",
            half=round(median(mixed["prefill_tokens"]) / 2),
        )
    return {
        "title": "Large prefill chunks interrupt the decodes",
        "verdict": "Prefill chunks interrupt the decodes: {steps:n step} with up to "
        "{most:n prefill token} took up to {max_busy_us:us}, where a step with decodes only takes "
        "{median_decode_step_us:us}; that is {stretch_frac:%} of the time between tokens.",
        "holder": _holder(prefills),
        "share_frac": share_of_requests(timeline, stretch_us * (1 - again_frac)),
        "advice": [advice],
    }


def _holder(prefills: pl.DataFrame) -> Message:
    """Describe the prompts that these chunks prefilled: their number, and the largest."""
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


def _sizes_vary(tokens: np.ndarray) -> bool:
    """Return whether prefills vary enough in size to separate a fixed cost from the cost of a token."""
    small, large = np.quantile(tokens, [0.1, 0.9])
    return bool(np.log2(large / small) >= WHOLE_LOG)


def _mixed(timeline: Timeline) -> pl.DataFrame:
    return timeline.steps.filter(
        (pl.col("decode_tokens") > 0) & (pl.col("prefill_tokens") > 0) & (pl.col("busy_us") > 0)
    )


@made_once
def prefill_time(timeline: Timeline) -> PrefillTime:
    """Return the time that prefill adds to a step that also decodes.

    The fixed part is 0 unless steps with few and with many prefill tokens show one, and steps that only
    decode show the time of decodes.
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
