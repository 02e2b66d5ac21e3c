"""``decode-starves-prefill``: decodes and their drafts took so much of the budget that prefills waited."""

import polars as pl

from schedtrace.diagnose.limits import refused_demand
from schedtrace.diagnose.rules.common import at_step, counted, in_trials, share, step_numbers, trial_numbers
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "decode-starves-prefill"
SUMMARY = "decodes took most of the token budget, so prefills were cut or had to wait"
NEEDS = (Fact.TIMES, Fact.QUEUE, Fact.EXITS, Fact.REQUESTS)

MOST_OF_IT = 0.5
"""From half of the budget on, decodes leave prefills less than they take."""

ADVICE = (
    "Decodes are scheduled first. Raise --max-num-batched-tokens (now {budget:,}) well above --max-num-seqs "
    "(now {seats:,}{drafts}), or lower --max-num-seqs."
)
_EXAMPLE = ("step", "trial", "decode_tokens", "prefill_tokens", "token_budget", "num_waiting_after")


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/decode-starves-prefill.md``."""
    starved = starved_steps(timeline)
    if starved.is_empty():
        return []
    waits = refused_demand(timeline).filter(
        (pl.col("cause") == str(Cause.TOKEN_BUDGET)) & pl.col("step").is_in(starved["step"].implode())
    )
    wait_us = int(waits["wait_us"].sum() or 0)
    period_us = int(starved.select((pl.col("output_us") - pl.col("start_us")).sum()).item() or 0)
    trials = trial_numbers(starved)
    taken = float((starved["decode_tokens"] / starved["token_budget"]).mean() or 0)  # type: ignore[arg-type]  # a column of floats
    worst = starved.sort("num_waiting_after", "step", descending=[True, False])
    first = worst.row(0, named=True)
    part = period_us / timeline.duration_us if timeline.duration_us else 0.0
    drafts = int(timeline.steps["draft_tokens"].sum() or 0)
    message = (
        f"{counted(starved.height, 'step')}{in_trials(trials, len(timeline.trials()))} spent {share(taken)} of "
        "the token budget on decodes on average and then had none left for prefills that wanted more: "
        f"{period_us / 1e3:,.0f} ms, {share(part)} of the run; requests waited {wait_us / 1e3:,.0f} ms in "
        "all meanwhile."
    )
    return [
        Finding(
            code=CODE,
            severity="warning" if part >= 0.10 else "info",  # noqa: PLR2004  # a tenth of the run is felt
            cause=Cause.TOKEN_BUDGET,
            via="recorded",
            engine_rank=timeline.rank,
            count=starved.height,
            trials=trials,
            steps=step_numbers(starved),
            tokens=int(starved["decode_tokens"].sum()),
            message=message,
            advice=ADVICE.format(
                budget=timeline.header.token_budget,
                seats=timeline.seats,
                drafts=" and drafts" if drafts else "",
            ),
            evidence={
                "decode_share_frac": taken,
                "spent_ms": period_us / 1e3,
                "wait_ms": wait_us / 1e3,
                "example": (
                    f"{at_step(first)} gave {first['decode_tokens']:,} of {first['token_budget']:,} tokens "
                    f"to decodes and {first['prefill_tokens']:,} to prefills; "
                    f"{first['num_waiting_after']:,} waited."
                ),
                "examples": worst.select(_EXAMPLE).head(3).to_dicts(),
            },
        )
    ]


def starved_steps(timeline: Timeline) -> pl.DataFrame:
    """Steps whose budget was spent, at least half of it on decodes, while a prefill wanted more."""
    cut = timeline.caps.filter(pl.col("cap") == str(Cap.TOKEN_BUDGET))["step"].unique()
    wanted = (pl.col("waiting_cause") == str(Cause.TOKEN_BUDGET)) & (pl.col("eligible_after") > 0)
    return timeline.steps.filter(
        (pl.col("remaining_budget") == 0)
        & (pl.col("decode_tokens") >= MOST_OF_IT * pl.col("token_budget"))
        & (wanted | pl.col("step").is_in(cut.implode()))
    )
