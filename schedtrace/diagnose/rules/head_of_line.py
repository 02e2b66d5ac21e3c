"""``head-of-line``: a request refused for its own size held up others behind it that would have fitted."""

import polars as pl

from schedtrace.diagnose.queue.behind_head import behind_head
from schedtrace.diagnose.rules.allowed import MORE_KV_SPACE
from schedtrace.diagnose.rules.common import StepExample, in_trials, only, step_numbers, trial_numbers
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Count, Duration, Message, Number, Request, Setting, message
from schedtrace.model.report import Evidence, Finding
from schedtrace.timeline.admission import refused_heads
from schedtrace.timeline.timeline import Timeline

CODE = "head-of-line"
SUMMARY = "a refused request held up others behind it that would have fitted; one finding per cause"
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.LIVES, Fact.BLOCKS, Fact.REQUESTS, Fact.TIMES, Fact.CONFIG)


class HeldUp(StepExample, kw_only=True):
    """One request that would have fitted behind a refused one."""

    head: str
    head_tokens: int
    budget_left: int
    kv_blocks_free: int
    seats_left: int
    request_id: str
    tokens: int
    blocks: int
    waited_us: int


class HeadOfLine(Evidence, kw_only=True):
    """Refused requests, and those behind them."""

    refused_steps: int
    heads: int
    requests_held_up: int
    held_up_ms: float
    longest_ms: float
    examples: list[HeldUp]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/head-of-line.md``."""
    heads = refused_heads(timeline)
    passed = _with_wait(timeline, behind_head(timeline, heads))
    found = [
        _finding(timeline, str(cause), rows, heads.filter(pl.col("cause") == cause))
        for (cause,), rows in passed.group_by("cause", maintain_order=True)
    ]
    return sorted(found, key=lambda finding: -finding.count)


def _finding(timeline: Timeline, cause: str, passed: pl.DataFrame, heads: pl.DataFrame) -> Finding:
    held_up = _held_up(heads, passed)
    trials = trial_numbers(held_up)
    tokens, waited_us = int(passed["tokens"].sum()), int(passed["waited_us"].sum())
    longest_us = int(passed["waited_us"].max() or 0)  # type: ignore[arg-type]  # an integer column
    worst = passed.sort("waited_us", "step", descending=[True, False])
    examples = HeldUp.first(worst)
    return Finding(
        code=CODE,
        severity="warning" if any(passed["left_step"] > passed["step"] + 1) else "info",
        cause=cause,
        via=str(heads["via"].unique().sort()[0]),
        location=only(heads["location"]),
        engine_rank=timeline.rank,
        count=held_up.height,
        trials=trials,
        steps=step_numbers(held_up),
        tokens=tokens,
        message=message(
            "{held_up} of {refused}{trials} that refused the next request for its own size held up requests "
            "behind it that would have fitted. {requests} ({tokens}) left the queue {mean} later on average, "
            "{longest} at most.",
            held_up=Number(held_up.height),
            refused=Count(heads.height, "step"),
            trials=in_trials(timeline, trials),
            requests=Count(passed.height, "request"),
            tokens=Count(tokens, "token"),
            mean=Duration(waited_us / passed.height),
            longest=Duration(longest_us),
        ),
        advice=_advice(timeline, cause),
        evidence=HeadOfLine(
            refused_steps=heads.height,
            heads=heads["head"].n_unique(),
            requests_held_up=passed.height,
            held_up_ms=waited_us / 1e3,
            longest_ms=longest_us / 1e3,
            examples=examples,
        ),
        example=_described(examples[0]),
    )


def _advice(timeline: Timeline, cause: str) -> Message:
    config = timeline.header.scheduler_config
    if cause == Cause.KV_BLOCKS:
        piecewise = config.get("scheduler_reserve_full_isl") and config.get("enable_chunked_prefill")
        first_chunk = message(
            " {setting} admits it with its first chunk, at the risk of preemptions.",
            setting=Setting("--no-scheduler-reserve-full-isl"),
        )
        return message(
            "vLLM admits requests in queue order. Give the KV cache more space for the large request "
            "({more}), or send long prompts to an engine of their own.{first_chunk}",
            more=MORE_KV_SPACE,
            first_chunk=first_chunk if piecewise else NOTHING,
        )
    if cause == Cause.CHUNKED_PREFILL_OFF:
        return message(
            "Enable chunked prefill ({setting}): the large prompt then takes the budget that is left.",
            setting=Setting("--enable-chunked-prefill"),
        )
    return message("vLLM admits requests in queue order: send such requests to an engine of their own.")


def _held_up(heads: pl.DataFrame, passed: pl.DataFrame) -> pl.DataFrame:
    """Those of ``heads`` after which a request waited that would have passed then or before."""
    could, left = passed["step"].to_numpy(), passed["left_step"].to_numpy()
    return heads.filter([bool(((could <= step) & (step < left)).any()) for step in heads["step"]])


def _with_wait(timeline: Timeline, passed: pl.DataFrame) -> pl.DataFrame:
    """With ``waited_us``: from the step that could have taken a request to the one that did, or the end."""
    start = timeline.steps.select("step", "start_us")
    last = timeline.steps.select(pl.max_horizontal("start_us", "output_us").max()).item()
    return (
        passed.join(start, on="step", how="left", maintain_order="left")
        .join(start.rename({"step": "left_step", "start_us": "left_us"}), on="left_step", how="left")
        .with_columns(waited_us=pl.col("left_us").fill_null(pl.lit(last)) - pl.col("start_us"))
        .drop("start_us", "left_us")
    )


def _described(example: HeldUp) -> Message:
    return message(
        "{step} refused {head} ({head_tokens}) and left {budget}, {free} and {seats}; {request} behind it "
        "needed {tokens} and {blocks}, and waited {waited} more.",
        step=example.at,
        head=Request(example.head),
        head_tokens=Count(example.head_tokens, "token"),
        budget=Count(example.budget_left, "token"),
        free=Count(example.kv_blocks_free, "KV block"),
        seats=Count(example.seats_left, "seat"),
        request=Request(example.request_id),
        tokens=Count(example.tokens, "token"),
        blocks=Count(example.blocks, "block"),
        waited=Duration(example.waited_us),
    )
