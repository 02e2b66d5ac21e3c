"""``prefill-starves-decode``: decoding requests waited longer because their steps prefilled, too."""

import polars as pl

from schedtrace.diagnose.rules.allowed import (
    BATCHED_TOKENS,
    batched_tokens,
    can_lower_batched_tokens,
    now,
    smallest_batched_tokens,
    threshold,
)
from schedtrace.diagnose.rules.common import StepExample, in_trials, step_numbers, trial_numbers
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Count, Duration, Message, Number, Setting, Share, message
from schedtrace.model.report import Evidence, Finding
from schedtrace.timeline.timeline import Timeline

CODE = "prefill-starves-decode"
SUMMARY = "steps with prefill chunks stretched the time between the tokens of running requests"
NEEDS = (Fact.TIMES, Fact.REQUESTS)

FOUND_FROM_FRAC = 0.10
"""A tenth of all the time that decoding requests spent in steps."""

CRITICAL_FROM_FRAC = 0.25

THRESHOLD = Setting("--long-prefill-token-threshold")


class StretchedStep(StepExample, kw_only=True):
    """One step and what its prefill added."""

    prefill_tokens: int
    decode_tokens: int
    busy_us: int
    stretch_us: float


class Stretch(Evidence, kw_only=True):
    """What prefill added to the time between tokens."""

    stretch_frac: float
    mean_stretch_us: float
    max_busy_us: int
    median_decode_step_us: float | None
    examples: list[StretchedStep]


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
    trials = trial_numbers(mixed)
    worst = mixed.sort("stretch_us", "step", descending=[True, False])
    evidence = Stretch(
        stretch_frac=stretch_us / all_us,
        mean_stretch_us=float(mixed["stretch_us"].sum()) / mixed.height,
        max_busy_us=int(mixed["busy_us"].max()),  # type: ignore[arg-type]  # an integer column with rows
        median_decode_step_us=decoding.filter(pl.col("prefill_tokens") == 0)["busy_us"].median(),  # type: ignore[arg-type]  # of integers
        examples=StretchedStep.first(worst),
    )
    model = timeline.step_time
    return [
        Finding(
            code=CODE,
            severity="critical" if evidence.stretch_frac >= CRITICAL_FROM_FRAC else "warning",
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=mixed.height,
            trials=trials,
            steps=step_numbers(mixed),
            tokens=int(mixed["prefill_tokens"].sum()),
            message=_sentence(timeline, evidence, mixed.height, trials),
            advice=_advice(timeline),
            evidence=evidence,
            example=_described(evidence.examples[0]),
            cost_error_frac=None if model is None else model.error_frac,
        )
    ]


def _sentence(timeline: Timeline, evidence: Stretch, steps: int, trials: list[int]) -> Message:
    usual_us = evidence.median_decode_step_us
    usual = message(" A step with decodes only took {time} at the median.", time=Duration(usual_us or 0))
    return message(
        "{steps}{trials} computed prefill chunks beside decodes, which delayed the decoding requests by "
        "{mean} a step on average: {share} of all time between their tokens, by the step-time model.{usual}",
        steps=Count(steps, "step"),
        trials=in_trials(timeline, trials),
        mean=Duration(evidence.mean_stretch_us),
        share=Share(evidence.stretch_frac),
        usual=NOTHING if usual_us is None else usual,
    )


def _advice(timeline: Timeline) -> Message:
    """Smaller chunks, by the settings that are not used for it yet and that vLLM accepts."""
    if timeline.header.scheduler_config.get("enable_chunked_prefill") is False:
        return message(
            "Enable chunked prefill ({setting}): without it a step computes whole prompts.",
            setting=Setting("--enable-chunked-prefill"),
        )
    lower = message(
        "{setting} (now {now}; vLLM accepts {smallest} and more here)",
        setting=BATCHED_TOKENS,
        now=Number(batched_tokens(timeline)),
        smallest=Number(smallest_batched_tokens(timeline)),
    )
    elsewhere = message("prefill on other engines (disaggregated prefill)")
    in_force = 0 < threshold(timeline) < timeline.token_budget
    if in_force:
        return message(
            "{threshold}{now} already limits the chunk of each prompt. {lower}{elsewhere}.",
            threshold=THRESHOLD,
            now=now(timeline, "long_prefill_token_threshold"),
            lower=message("Lower {lower} for shorter steps and later first tokens, or ", lower=lower)
            if can_lower_batched_tokens(timeline)
            else NOTHING,
            elsewhere=elsewhere,
        )
    return message(
        "Set {threshold}{now}{lower}: smaller chunks shorten such steps and delay first tokens. Or "
        "{elsewhere}.",
        threshold=THRESHOLD,
        now=now(timeline, "long_prefill_token_threshold"),
        lower=message(" below the budget, or lower {lower}", lower=lower)
        if can_lower_batched_tokens(timeline)
        else message(" below the budget"),
        elsewhere=elsewhere,
    )


def _described(example: StretchedStep) -> Message:
    return message(
        "{step} took {busy} for {prefill} and {decode}, about {stretch} of it for the prefill.",
        step=example.at,
        busy=Duration(example.busy_us),
        prefill=Count(example.prefill_tokens, "prefill token"),
        decode=Count(example.decode_tokens, "decode token"),
        stretch=Duration(example.stretch_us),
    )


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
