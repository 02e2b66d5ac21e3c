"""``blocked-budget``: token budget was left although requests waited; one finding per cause."""

import polars as pl

from schedtrace.diagnose.rules.common import StepExample, in_trials, only, step_numbers, trial_numbers
from schedtrace.model.causes import ASKED_FOR, NOT_A_REFUSAL, Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Code, Count, Message, Number, Request, Share, message
from schedtrace.model.report import Evidence, Finding
from schedtrace.timeline.timeline import Timeline

CODE = "blocked-budget"
SUMMARY = "token budget was left although requests waited; one finding per cause"
NEEDS = (Fact.QUEUE, Fact.EXITS)

WHY: dict[str, str] = {
    Cause.MAX_NUM_SEQS: "as many requests ran as {limit} {seats} allows",
    Cause.KV_BLOCKS: "the KV cache had no room for the next request",
    "kv_blocks/free": "the KV cache had fewer free blocks than the next request's chunk needs",
    "kv_blocks/full_sequence": (
        "the next request's chunk would have fitted into the KV cache, but vLLM admits a request only if "
        "all of its prompt fits (scheduler_reserve_full_isl)"
    ),
    "kv_blocks/reserved": (
        "the next request would have fitted, but for blocks that are reserved for prefills under way"
    ),
    "kv_blocks/watermark": (
        "the next request would have fitted into the free KV blocks, but for the reserve of --watermark"
    ),
    Cause.PREEMPTED_THIS_STEP: "the step had preempted a request, which closes admission for that step",
    Cause.CHUNKED_PREFILL_OFF: (
        "chunked prefill is off and the next prompt is larger than the budget that was left"
    ),
    Cause.PAUSED: "the scheduler was paused",
    Cause.GRAMMAR_PENDING: "the next request's grammar was not compiled yet",
    Cause.REMOTE_KV_PENDING: "the next request's KV blocks had not arrived from elsewhere yet",
    Cause.STREAMING_INPUT_PENDING: "the next request waits for its own streaming input",
    Cause.INPUT_BUDGET: "the slots for drafted tokens were spent",
    Cause.PREFILL_THROTTLED: "the prefill cadence held new prefills back (prefill_schedule_interval)",
    Cause.LORA_CAP: "max_loras other adapters were already in the batch",
    Cause.ENCODER_BUDGET: "the encoder budget or the encoder cache was spent",
    Cause.ENCODER_TRANSFER_PENDING: "an encoder output was still being transferred",
    Cause.MAMBA_ALIGNMENT: "no block-aligned chunk fitted (hybrid model)",
    Cause.PREFILL_LOOKAHEAD: "no chunk fitted that keeps clear of the prefill lookahead",
    Cause.SPEC_DECODE_PADDING: "the next request's decode, padded for drafts, did not fit",
    "spec_decode_padding/max_model_len": (
        "the next request's decode, padded for drafts, would have gone beyond max_model_len"
    ),
    Cause.STALE_OUTPUT_PENDING: (
        "output of the next request from before its preemption was still on its way"
    ),
    Cause.CONNECTOR_UNDECIDED: "the KV connector could not tell yet what it has of the next request",
    Cause.NO_NEW_TOKENS: "no token could be scheduled for the next request",
    Cause.OTHER: "the reason is not known to this version (see the guard in the details)",
}

ADVICE: dict[str, str] = {
    Cause.MAX_NUM_SEQS: ("Raise --{limit} (now {seats:,}); watch the KV cache, which has to hold them all."),
    Cause.KV_BLOCKS: (
        "Give the KV cache more room (--gpu-memory-utilization, --kv-cache-memory-bytes, or a larger "
        "--num-gpu-blocks-override where one is set), or ask for less at once."
    ),
    "kv_blocks/full_sequence": (
        "--no-scheduler-reserve-full-isl admits such prompts chunk by chunk, at the risk of preemptions; "
        "or give the KV cache more room."
    ),
    "kv_blocks/watermark": (
        "A smaller --watermark admits earlier, at the risk of preemptions; or give the KV cache more room."
    ),
    "spec_decode_padding/max_model_len": (
        "Such a request is this close to its end: fewer --speculative-config num_speculative_tokens, or a "
        "larger --max-model-len, leave room for the padding."
    ),
    Cause.PREEMPTED_THIS_STEP: "See the preemption finding: the KV cache is too small for what runs.",
    Cause.CHUNKED_PREFILL_OFF: (
        "Switch it on (--enable-chunked-prefill), or raise --max-num-batched-tokens (now {token_budget:,})."
    ),
    Cause.PAUSED: "Somebody asked for it (sleep or pause); nothing to tune.",
    Cause.LORA_CAP: "Raise --max-loras.",
    Cause.OTHER: "The steps are listed; this way of recording cannot know more.",
}


class BlockedStep(StepExample, kw_only=True):
    """One step that left budget while requests waited."""

    request_id: str | None
    budget_left: int
    num_waiting_after: int
    num_running_after: int
    kv_blocks_free_after: int | None
    location: str | None


class BlockedBudget(Evidence, kw_only=True):
    """Budget left, requests waiting, and the exits taken."""

    mean_budget_left_frac: float
    mean_waiting: float
    details: list[str]
    guards: list[str]
    examples: list[BlockedStep]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/blocked-budget.md``."""
    blocked = timeline.steps.filter(
        (pl.col("remaining_budget") > 0)
        & (pl.col("num_waiting_after") > 0)
        & ~pl.col("waiting_cause").is_in([*NOT_A_REFUSAL, Cause.TOKEN_BUDGET])
    ).with_columns(
        unused=pl.min_horizontal(
            "remaining_budget", pl.col("waiting_tokens_after").fill_null(pl.col("remaining_budget"))
        )
    )
    found = [
        _finding(timeline, str(cause), steps)
        for (cause,), steps in blocked.group_by(_cause_with_limit(), maintain_order=True)
    ]
    return sorted(found, key=lambda finding: -finding.tokens)


def _cause_with_limit() -> pl.Expr:
    """``kv_blocks/watermark``: where several limits share a cause the limit decides what helps."""
    cause, limit = pl.col("waiting_cause"), pl.col("waiting_detail")
    limited = cause.is_in([str(Cause.KV_BLOCKS), str(Cause.SPEC_DECODE_PADDING)]) & limit.is_not_null()
    return pl.when(limited).then(cause + "/" + limit).otherwise(cause)


def _finding(timeline: Timeline, cause_with_limit: str, steps: pl.DataFrame) -> Finding:
    header = timeline.header
    cause = cause_with_limit.partition("/")[0]
    words = {
        "limit": "max-num-active-seqs" if timeline.active_limit else "max-num-seqs",
        "seats": timeline.seats,
        "token_budget": header.token_budget,
    }
    working = timeline.steps.filter((pl.col("total_requests") > 0) | (pl.col("num_waiting_after") > 0)).height
    trials = trial_numbers(steps)
    known = WHY.get(cause_with_limit) or WHY.get(cause)
    why = f"cause {cause}" if known is None else known.format(**words)
    advice = ADVICE.get(cause_with_limit) or ADVICE.get(cause) or "See docs/causes.md."
    left = 1 - float(steps["use_frac"].mean() or 0)  # type: ignore[arg-type]  # a column of floats
    tokens = int(steps["unused"].sum())
    waiting = int(steps["num_waiting_after"].sum()) / steps.height
    examples = _examples(steps)
    severity = "info" if cause in ASKED_FOR else "warning"
    return Finding(
        code=CODE,
        severity=severity,
        cause=cause,
        via=str(steps["waiting_via"].unique().sort()[0]),
        engine_rank=timeline.rank,
        count=steps.height,
        trials=trials,
        steps=step_numbers(steps),
        tokens=tokens,
        message=message(
            "{steps} of {working}{trials} left {left} of the token budget unused on average although "
            "{waiting} requests waited: {why}. {unused}",
            steps=Count(steps.height, "step"),
            working=Number(working),
            trials=in_trials(timeline, trials),
            left=Share(left),
            waiting=Number(waiting),
            why=why,
            unused=_could_have_used(steps),
        ),
        advice=message("{advice}", advice=advice.format(**words)),
        location=only(steps["waiting_location"]),
        evidence=BlockedBudget(
            mean_budget_left_frac=left,
            mean_waiting=waiting,
            details=steps["waiting_detail"].drop_nulls().unique().sort().head(5).to_list(),
            guards=steps["waiting_guard"].drop_nulls().unique().sort().head(5).to_list(),
            examples=examples,
        ),
        example=_described(examples[0], several_places=only(steps["waiting_location"]) is None),
    )


def _examples(steps: pl.DataFrame) -> list[BlockedStep]:
    """The three steps in which most waiting work would have fitted."""
    rows = steps.sort("unused", "step", descending=[True, False]).select(
        "step",
        "trial",
        pl.col("waiting_request").alias("request_id"),
        pl.col("remaining_budget").alias("budget_left"),
        "num_waiting_after",
        "num_running_after",
        "kv_blocks_free_after",
        pl.col("waiting_location").alias("location"),
    )
    return BlockedStep.first(rows)


def _could_have_used(steps: pl.DataFrame) -> Message:
    """How much budget the waiting requests could have used, had the cause not stood in the way."""
    known = steps.filter(pl.col("waiting_tokens_after").is_not_null())
    if known.is_empty():
        return message("The trace does not record how many tokens they wanted.")
    mean = known["unused"].sum() / known.height
    return message(
        "Otherwise each step could have scheduled {tokens} more on average.",
        tokens=Count(round(mean), "token"),
    )


def _described(example: BlockedStep, *, several_places: bool) -> Message:
    refused = free = where = NOTHING
    if example.request_id:
        refused = message(", {request} next in line", request=Request(example.request_id))
    if example.kv_blocks_free_after is not None:
        free = message(", {blocks} free", blocks=Count(example.kv_blocks_free_after, "KV block"))
    if several_places and example.location:
        where = message(" (left at {place})", place=Code(example.location))
    return message(
        "{step}: {waiting} waiting{refused}, {running} running, {left} of budget left{free}{where}.",
        step=example.at,
        waiting=Count(example.num_waiting_after, "request"),
        refused=refused,
        running=Number(example.num_running_after),
        left=Count(example.budget_left, "token"),
        free=free,
        where=where,
    )
