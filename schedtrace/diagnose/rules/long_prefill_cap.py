"""``long-prefill-cap``: chunks were cut by ``long_prefill_token_threshold`` while token budget was left."""

import polars as pl

from schedtrace.diagnose.rules.common import (
    at_step,
    counted,
    in_trials,
    severity_of,
    share,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.causes import Cap
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "long-prefill-cap"
SUMMARY = "long_prefill_token_threshold cut prompts into small chunks while token budget was left"
NEEDS = (Fact.EXITS, Fact.REQUESTS)
ADVICE = (
    "Raise --long-prefill-token-threshold (now {threshold:,} of {budget:,}), or unset it: with chunked "
    "prefill decodes are scheduled first anyway. vLLM 0.31 and newer can adapt it to the number of requests "
    "(--long-prefill-token-threshold-adaptive)."
)

_EXAMPLE = ("step", "trial", "used_tokens", "remaining_budget", "withheld", "usable")


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/long-prefill-cap.md``."""
    capped = (
        timeline.caps.filter(pl.col("cap").is_in([Cap.LONG_PREFILL, Cap.LONG_PREFILL_ADAPTIVE]))
        .filter(pl.col("remaining_budget") > 0)
        .group_by("step", maintain_order=True)
        .agg(
            (pl.col("wanted_tokens") - pl.col("capped_tokens")).sum().alias("withheld"),
            pl.col("request_id").n_unique().alias("requests"),
        )
        .join(timeline.steps, on="step", maintain_order="left")
        .with_columns(usable=pl.min_horizontal("withheld", "remaining_budget"))
    )
    if capped.is_empty():
        return []
    budget = timeline.token_budget
    empty = float(capped["usable"].sum()) / capped.height
    of_trials = capped.group_by("trial").agg(pl.col("used_tokens").sum())["used_tokens"]
    fewest = sum(-(-used // budget) for used in of_trials)
    saved = capped.height - fewest
    model = timeline.step_time
    cost_us = None if model is None else saved * model.base_us
    cost_frac = cost_us / timeline.duration_us if cost_us is not None and timeline.duration_us else None
    trials = trial_numbers(capped)
    worst = capped.sort("usable", "step", descending=[True, False]).row(0, named=True)
    message = (
        f"{counted(capped.height, 'step')}{in_trials(trials, len(timeline.trials()))} left {empty:,.0f} of "
        f"{budget:,} tokens empty on average ({share(empty / budget)}) that the same prompts wanted: "
        f"long_prefill_token_threshold cut their chunks. Full steps would have done the same work in "
        f"{counted(fewest, 'step')}."
    )
    return [
        Finding(
            code=CODE,
            severity=severity_of(cost_frac, unknown="warning"),
            cause=None,
            via="source",
            engine_rank=timeline.rank,
            count=capped.height,
            trials=trials,
            steps=step_numbers(capped),
            tokens=int(capped["usable"].sum()),
            message=message,
            advice=ADVICE.format(
                threshold=timeline.header.scheduler_config.get("long_prefill_token_threshold") or 0,
                budget=budget,
            ),
            evidence={
                "mean_empty_tokens": empty,
                "steps_if_full": fewest,
                "examples": [{name: worst[name] for name in _EXAMPLE}],
                "example": (
                    f"{at_step(worst)} gave {worst['used_tokens']:,} tokens to "
                    f"{counted(worst['total_requests'], 'request')} and left "
                    f"{worst['remaining_budget']:,} empty; {counted(worst['requests'], 'request')} wanted "
                    f"{worst['withheld']:,} more."
                ),
            },
            cost_ms=None if cost_us is None else cost_us / 1e3,
            cost_frac=cost_frac,
            cost_error_frac=None if model is None else model.error_frac,
        )
    ]
