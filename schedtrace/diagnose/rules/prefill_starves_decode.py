"""``prefill-starves-decode``: decoding requests waited longer because their steps prefilled, too."""

import polars as pl

from schedtrace.diagnose.rules.common import (
    at_step,
    counted,
    in_trials,
    share,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "prefill-starves-decode"
SUMMARY = "steps with prefill chunks stretched the time between the tokens of running requests"
NEEDS = (Fact.TIMES, Fact.REQUESTS)

FOUND_FROM_FRAC = 0.10
"""A tenth of all the time that decoding requests spent in steps."""

CRITICAL_FROM_FRAC = 0.25

ADVICE = (
    "Smaller chunks shorten such steps at the price of later first tokens: lower --max-num-batched-tokens "
    "(now {budget:,}) or set --long-prefill-token-threshold; or prefill elsewhere (disaggregated prefill)."
)
_EXAMPLE = ("step", "trial", "prefill_tokens", "decode_tokens", "busy_us", "stretch_us")


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/prefill-starves-decode.md``."""
    decoding = timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("busy_us") > 0))
    all_us = _waited_us(decoding)
    # No step is stretched by more than its time: below the threshold, the slow model need not be asked.
    if not all_us or _waited_us(decoding.filter(pl.col("prefill_tokens") > 0)) / all_us < FOUND_FROM_FRAC:
        return []
    mixed = stretched_steps(timeline)
    stretch_us = float((mixed["stretch_us"] * mixed["decode_tokens"]).sum() or 0)
    if stretch_us / all_us < FOUND_FROM_FRAC:
        return []
    part = stretch_us / all_us
    plain = decoding.filter(pl.col("prefill_tokens") == 0).select(pl.col("busy_us").median()).item()
    trials = trial_numbers(mixed)
    worst = mixed.sort("stretch_us", "step", descending=[True, False])
    first = worst.row(0, named=True)
    mean_ms = float(mixed["stretch_us"].sum()) / mixed.height / 1e3
    usual = "" if plain is None else f" (a step that only decodes: {plain / 1e3:,.1f} ms in the middle)"
    message = (
        f"{counted(mixed.height, 'step')}{in_trials(trials, len(timeline.trials()))} did prefill beside decodes "
        f"and kept the decoding requests waiting {mean_ms:,.1f} ms longer each{usual}: {share(part)} of all "
        "the time between their tokens, by the model of step times."
    )
    model = timeline.step_time
    return [
        Finding(
            code=CODE,
            severity="critical" if part >= CRITICAL_FROM_FRAC else "warning",
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=mixed.height,
            trials=trials,
            steps=step_numbers(mixed),
            tokens=int(mixed["prefill_tokens"].sum()),
            message=message,
            advice=ADVICE.format(budget=timeline.header.token_budget),
            evidence={
                "stretch_frac": part,
                "mean_stretch_us": mixed["stretch_us"].mean(),
                "max_busy_us": mixed["busy_us"].max(),
                "median_decode_step_us": plain,
                "example": (
                    f"{at_step(first)} took {first['busy_us'] / 1e3:,.1f} ms for {first['prefill_tokens']:,} "
                    f"prefill and {first['decode_tokens']:,} decode tokens, about "
                    f"{first['stretch_us'] / 1e3:,.1f} ms of it for the prefill."
                ),
                "examples": worst.select(_EXAMPLE).head(3).to_dicts(),
            },
            cost_error_frac=None if model is None else model.error_frac,
        )
    ]


def _waited_us(steps: pl.DataFrame) -> int:
    """Time that decoding requests spent in these steps, added up."""
    return int((steps["busy_us"] * steps["decode_tokens"]).sum() or 0)


def stretched_steps(timeline: Timeline) -> pl.DataFrame:
    """Steps with both kinds of work, with ``stretch_us``: what the model ascribes to the prefill."""
    model = timeline.step_time
    mixed = timeline.steps.filter(
        (pl.col("decode_tokens") > 0) & (pl.col("prefill_tokens") > 0) & (pl.col("busy_us") > 0)
    )
    per_token = 0.0 if model is None else model.per_prefill_token_us
    return mixed.with_columns(stretch_us=pl.min_horizontal(pl.col("prefill_tokens") * per_token, "busy_us"))
