"""``decode-starves-prefill``: decodes and their drafts took so much of the budget that prefills waited."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import largest, step_finding
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.request_states import refused_states
from schedtrace.timeline.spans import until
from schedtrace.timeline.timeline import Timeline

MOST_OF_IT = 0.5
"""Share of the budget from which decodes leave less to prefills than they take."""

FELT = 0.10
"""Share of the run from which the finding is a warning."""


class StarvedPrefills(Evidence, kw_only=True):
    """Budget that decodes took, and the time that prefills waited for it."""

    decode_share_frac: float
    """Mean of ``decode_tokens / token_budget``."""
    spent_ms: float
    """Total time of these steps."""
    wait_ms: float
    """Total time that requests waited for token budget after these steps."""


def _find(timeline: Timeline) -> Findings:
    starved = decode_filled_steps(timeline)
    if starved.is_empty():
        return
    spent_us = int(starved.select((pl.col("output_us") - pl.col("start_us")).sum()).item() or 0)
    part = spent_us / timeline.busy_us if timeline.busy_us else 0.0
    yield step_finding(
        timeline,
        starved,
        StarvedPrefills(
            decode_share_frac=float((starved["decode_tokens"] / starved["token_budget"]).mean() or 0),  # type: ignore[arg-type]  # a column of floats
            spent_ms=spent_us / 1e3,
            wait_ms=_waited_us(timeline, starved) / 1e3,
        ),
        severity="warning" if part >= FELT else "info",
        cause=Cause.TOKEN_BUDGET,
        tokens=int(starved["decode_tokens"].sum()),
        message="{steps:n step}{trials} spent {decode_share_frac:%} of the token budget on decodes on "
        "average and had too little left for prefills. These steps took {spent_ms:ms}, {part:%} of the "
        "busy time; requests waited {wait_ms:ms} in total.",
        values={"part": part},
        example="{at} gave {decode_tokens:n} of {token_budget:n token} to decodes and {prefill_tokens:n} "
        "to prefills; {num_waiting_after:n request} waited.",
        cases=largest(starved, "num_waiting_after"),
    )


def _waited_us(timeline: Timeline, starved: pl.DataFrame) -> int:
    """Return the time that requests waited for the token budget between these steps and the next ones."""
    waits = refused_states(timeline.request_states).filter(pl.col("cause") == str(Cause.TOKEN_BUDGET))
    starts = timeline.steps.select("step", "start_us", next_us=pl.col("start_us").shift(-1))
    spans = starts.join(starved, on="step", how="semi").with_columns(
        pl.col("next_us").fill_null(timeline.end_us)
    )
    begin, end = until(waits, spans["start_us"].to_list()), until(waits, spans["next_us"].to_list())
    return round(sum(end) - sum(begin))


def decode_filled_steps(timeline: Timeline) -> pl.DataFrame:
    """Return steps whose budget was spent, at least half of it on decodes, while a prefill wanted more."""
    cut = timeline.caps.filter(pl.col("cap") == str(Cap.TOKEN_BUDGET))["step"].unique()
    wanted = (pl.col("waiting_cause") == str(Cause.TOKEN_BUDGET)) & (pl.col("eligible_after") > 0)
    return timeline.steps.filter(
        (pl.col("remaining_budget") == 0)
        & (pl.col("decode_tokens") >= MOST_OF_IT * pl.col("token_budget"))
        & (wanted | pl.col("step").is_in(pl.lit(cut).implode()))
    )


RULE = Rule(
    code="decode-starves-prefill",
    summary="decodes took most of the token budget, so prefills were cut or had to wait",
    needs=frozenset({Fact.TIMES, Fact.QUEUE, Fact.EXITS, Fact.REQUESTS}),
    find=_find,
    symptom_of=("token-budget-bound", "long-prompt", "max-num-seqs-bound"),
)
