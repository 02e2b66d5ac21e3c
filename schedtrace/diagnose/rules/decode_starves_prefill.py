"""``decode-starves-prefill``: decodes and their drafts took so much of the budget that prefills waited."""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import StepExample, in_trials, step_numbers, trial_numbers
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import Message
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.request_states import refused
from schedtrace.timeline.spans import until
from schedtrace.timeline.timeline import Timeline

CODE = "decode-starves-prefill"

MOST_OF_IT = 0.5
"""From half of the budget on, decodes leave prefills less than they take."""

FELT = 0.10
"""A tenth of the run is felt."""


class StarvedStep(StepExample, kw_only=True):
    """One step and its two kinds of work."""

    decode_tokens: int
    prefill_tokens: int
    token_budget: int
    num_waiting_after: int


class StarvedPrefills(Evidence, kw_only=True):
    """What decodes took, and what it took the others."""

    decode_share_frac: float
    spent_ms: float
    wait_ms: float
    examples: list[StarvedStep]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/decode-starves-prefill.md``."""
    starved = starved_steps(timeline)
    if starved.is_empty():
        return []
    wait_us = _waited_us(timeline, starved)
    spent_us = int(starved.select((pl.col("output_us") - pl.col("start_us")).sum()).item() or 0)
    trials = trial_numbers(starved)
    part = spent_us / timeline.busy_us if timeline.busy_us else 0.0
    worst = starved.sort("num_waiting_after", "step", descending=[True, False])
    evidence = StarvedPrefills(
        decode_share_frac=float((starved["decode_tokens"] / starved["token_budget"]).mean() or 0),  # type: ignore[arg-type]  # a column of floats
        spent_ms=spent_us / 1e3,
        wait_ms=wait_us / 1e3,
        examples=StarvedStep.first(worst),
    )
    return [
        Finding(
            code=CODE,
            severity="warning" if part >= FELT else "info",
            cause=Cause.TOKEN_BUDGET,
            via="recorded",
            engine_rank=timeline.rank,
            count=starved.height,
            trials=trials,
            steps=step_numbers(starved),
            tokens=int(starved["decode_tokens"].sum()),
            message=say(
                "{steps:n step}{trials} spent {taken:%} of the token budget on decodes on average "
                "and had too little left for prefills. These steps took {spent:us}, {part:%} of the "
                "busy time; requests waited {wait:us} in total.",
                steps=starved.height,
                trials=in_trials(timeline, trials),
                taken=evidence.decode_share_frac,
                spent=spent_us,
                part=part,
                wait=wait_us,
            ),
            evidence=evidence,
            example=_described(evidence.examples[0]),
        )
    ]


def _waited_us(timeline: Timeline, starved: pl.DataFrame) -> int:
    """What requests waited for the token budget from the starts of these steps to the next ones."""
    waits = refused(timeline).filter(pl.col("cause") == str(Cause.TOKEN_BUDGET))
    starts = timeline.steps.select("step", "start_us", next_us=pl.col("start_us").shift(-1))
    spans = starts.join(starved, on="step", how="semi").with_columns(
        pl.col("next_us").fill_null(timeline.end_us)
    )
    begin, end = until(waits, spans["start_us"].to_list()), until(waits, spans["next_us"].to_list())
    return round(sum(end) - sum(begin))


def starved_steps(timeline: Timeline) -> pl.DataFrame:
    """Steps whose budget was spent, at least half of it on decodes, while a prefill wanted more."""
    cut = timeline.caps.filter(pl.col("cap") == str(Cap.TOKEN_BUDGET))["step"].unique()
    wanted = (pl.col("waiting_cause") == str(Cause.TOKEN_BUDGET)) & (pl.col("eligible_after") > 0)
    return timeline.steps.filter(
        (pl.col("remaining_budget") == 0)
        & (pl.col("decode_tokens") >= MOST_OF_IT * pl.col("token_budget"))
        & (wanted | pl.col("step").is_in(cut.implode()))
    )


def _described(example: StarvedStep) -> Message:
    return say(
        "{step} gave {decode:n} of {budget:n token} to decodes and {prefill:n} to prefills; "
        "{waiting:n request} waited.",
        step=example.at,
        decode=example.decode_tokens,
        budget=example.token_budget,
        prefill=example.prefill_tokens,
        waiting=example.num_waiting_after,
    )


RULE = Rule(
    code=CODE,
    summary="decodes took most of the token budget, so prefills were cut or had to wait",
    needs=frozenset({Fact.TIMES, Fact.QUEUE, Fact.EXITS, Fact.REQUESTS}),
    find=find,
    symptom_of=("token-budget-bound", "long-prompt", "max-num-seqs-bound"),
)
