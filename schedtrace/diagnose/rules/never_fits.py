"""``never-fits``: requests that can never run, since they need more than there is."""

from typing import Any

import msgspec
import polars as pl

from schedtrace.diagnose.kv_blocks import blocks_needed, longest_sequence, usable_blocks
from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.allowed import BATCHED_TOKENS, batched_tokens, kv_space
from schedtrace.diagnose.rules.common import only, trial_numbers
from schedtrace.diagnose.stuck_requests import never_fitting
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message, Request, Steps, joined
from schedtrace.model.report import MAX_STEPS, Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.vocabulary import advice, reason
from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.request_states import NEXT_STEP, QUEUED
from schedtrace.timeline.timeline import Timeline

CODE = "never-fits"
MOST_EXAMPLES = 3


class NeverFits(msgspec.Struct, kw_only=True):
    """One request that can never run to its end."""

    request_id: str
    trial: int | None
    step: int
    last_step: int
    refusals: int
    self_preemptions: int
    tokens: int
    blocks_needed: list[int]
    waited_ms: float
    waiting_behind: int


class NeverFitting(Evidence, kw_only=True):
    """The requests of one cause."""

    requests: int
    blocks_usable: int | None
    longest_sequence_tokens: int | None
    delayed_requests: int
    examples: list[NeverFits]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/never-fits.md``."""
    never = never_fitting(timeline)
    found = [
        _finding(timeline, str(cause), rows)
        for (cause,), rows in never.group_by("cause", maintain_order=True)
    ]
    return sorted(found, key=lambda finding: -(finding.share_frac or 0))


def _finding(timeline: Timeline, cause: str, rows: pl.DataFrame) -> Finding:
    lost = _lost(timeline, rows).group_by("request_id").agg(LENGTH_US.sum().alias("us"))
    total_us = timeline.requests_us
    examples = [_example(timeline, cause, row) for row in rows.head(MOST_EXAMPLES).to_dicts()]
    worst = examples[0]
    behind = lost.filter(~pl.col("request_id").is_in(rows["request_id"].implode())).height
    between = pl.col("step").is_between(rows["first_step"].min(), rows["last_step"].max())
    return Finding(
        code=CODE,
        severity="critical",
        title=say("A request can never run"),
        verdict=say(
            "{request:id} can never run: {why}.",
            request=worst.request_id,
            why=_why(timeline, cause, worst),
        ),
        share_frac=int(lost["us"].sum()) / total_us if total_us else None,
        holder=_blocked(worst, behind),
        leads=True,
        cause=cause,
        via=only(rows["via"]) or "inferred",
        location=only(rows["location"]),
        engine_rank=timeline.rank,
        count=int(rows["refusals"].sum()),
        trials=trial_numbers(rows),
        steps=timeline.steps.filter(between)["step"].head(MAX_STEPS).to_list(),
        tokens=int(rows["tokens"].sum()),
        message=_evidence(timeline, cause, worst, rows.height - 1),
        advice=_advice(timeline, cause, rows),
        evidence=NeverFitting(
            requests=rows.height,
            blocks_usable=usable_blocks(timeline.header),
            longest_sequence_tokens=longest_sequence(timeline.header),
            delayed_requests=behind,
            examples=examples,
        ),
        example=_described(worst),
    )


def _lost(timeline: Timeline, rows: pl.DataFrame) -> pl.DataFrame:
    """The time of these requests in the engine, and what others waited from the first refusal to the last."""
    first, last = rows["first_step"].min(), rows["last_step"].max()
    steps = timeline.steps
    begins = min(steps.filter(pl.col("step") >= first)["start_us"].to_list())
    after = steps.filter(pl.col("step") > last)["start_us"].to_list()
    ends = min(after, default=timeline.end_us)
    states = timeline.request_states
    own = pl.col("request_id").is_in(rows["request_id"].implode())
    waits = pl.col("state").is_in(QUEUED) & (pl.col("cause") != NEXT_STEP)
    behind = states.filter(~own & waits).with_columns(pl.col("begin_us", "end_us").clip(begins, ends))
    mine = states.filter(own & (pl.col("state") != "front_end"))
    return pl.concat([mine, behind]).filter(LENGTH_US > 0)


def _example(timeline: Timeline, cause: str, row: dict[str, Any]) -> NeverFits:
    computed = blocks_needed(timeline.header, row["tokens"]) if cause == Cause.KV_BLOCKS else None
    queued = timeline.request_states.filter(
        (pl.col("request_id") == row["request_id"]) & pl.col("state").is_in(QUEUED)
    )
    return NeverFits(
        request_id=row["request_id"],
        trial=row["trial"],
        step=row["first_step"],
        last_step=row["last_step"],
        refusals=row["refusals"],
        self_preemptions=row["self_preemptions"],
        tokens=row["tokens"],
        blocks_needed=computed or ([row["blocks_needed"]] if row["blocks_needed"] else []),
        waited_ms=int(queued.select(LENGTH_US.sum()).item()) / 1e3,
        waiting_behind=max(0, row["waiting"] - 1),
    )


def _why(timeline: Timeline, cause: str, worst: NeverFits) -> Message:
    """What it needs and what there is; what the record does not tell is left out."""
    header, total = timeline.header, usable_blocks(timeline.header)
    if cause == Cause.KV_BLOCKS and total is not None and sum(worst.blocks_needed) > total:
        return say(
            "its {tokens:n token} need {needed:n KV block}{groups}, and requests can hold {total:n} in all",
            tokens=worst.tokens,
            needed=sum(worst.blocks_needed),
            groups=_by_group(worst.blocks_needed),
            total=total,
        )
    if cause == Cause.CHUNKED_PREFILL_OFF and worst.tokens > timeline.token_budget:
        return say(
            "its prompt of {tokens:n token} is above the token budget of {budget:n}, and chunked "
            "prefill is off",
            tokens=worst.tokens,
            budget=timeline.token_budget,
        )
    block = _mamba_block(timeline)
    if cause == Cause.MAMBA_ALIGNMENT and block > timeline.token_budget:
        return say(
            "a chunk has to end at a block of {block:n token}, and the token budget of a step is {budget:n}",
            block=block,
            budget=timeline.token_budget,
        )
    return say(
        "in {steps:n step} {reason}, although no other request held anything",
        steps=worst.refusals,
        reason=reason(header, loop="waiting", cause=cause, detail=None),
    )


def _by_group(needed: list[int]) -> Message:
    """`` (13 + 13 by cache group)``; nothing for a single group."""
    if len(needed) < 2:  # noqa: PLR2004  # one group
        return NOTHING
    groups = joined([say("{blocks:n}", blocks=blocks) for blocks in needed], " + ")
    return say(" ({groups} by cache group)", groups=groups)


def _evidence(timeline: Timeline, cause: str, worst: NeverFits, others: int) -> Message:
    longest = longest_sequence(timeline.header) if cause == Cause.KV_BLOCKS else None
    return say(
        "vLLM refused {request:id} in {steps:n step} while no other request held "
        "anything{itself}; it waited {waited:us}.{longest}{others}",
        request=worst.request_id,
        steps=worst.refusals,
        itself=say(" and preempted it {times:n time} for itself", times=worst.self_preemptions)
        if worst.self_preemptions
        else NOTHING,
        waited=1e3 * worst.waited_ms,
        longest=say(" The longest prompt that fits, output included, has {longest:n token}.", longest=longest)
        if longest
        else NOTHING,
        others=say(" {others:n other request} cannot run either.", others=others) if others else NOTHING,
    )


def _blocked(worst: NeverFits, behind: int) -> Message:
    if not behind:
        return NOTHING
    return say(
        "{request:id} blocked the queue: {behind:n other request} waited behind it.",
        request=worst.request_id,
        behind=behind,
    )


def _described(worst: NeverFits) -> Message:
    return say(
        "in {steps} {behind:n request} waited behind {request:id}.",
        steps=Steps(worst.step, worst.last_step, worst.trial),
        behind=worst.waiting_behind,
        request=worst.request_id,
    )


def _advice(timeline: Timeline, cause: str, rows: pl.DataFrame) -> list[Advice]:
    if cause == Cause.KV_BLOCKS:
        return [*_more_blocks(timeline, rows), *_shorter(timeline, rows)]
    if cause == Cause.CHUNKED_PREFILL_OFF:
        return [
            Advice(
                message=say(
                    "Enable chunked prefill: {option:setting} (now off).", option="--enable-chunked-prefill"
                ),
                setting="enable_chunked_prefill",
                value=True,
                costs=say("Steps then mix prefill chunks with decodes, which raises inter-token latency."),
            )
        ]
    if cause == Cause.MAMBA_ALIGNMENT and (block := _mamba_block(timeline)) > timeline.token_budget:
        return [
            Advice(
                message=say(
                    "Raise {option} to {block:n} or more (now {now:n}).",
                    option=BATCHED_TOKENS,
                    block=block,
                    now=batched_tokens(timeline),
                ),
                setting="max_num_batched_tokens",
                value=block,
                costs=say("Longer steps raise inter-token latency."),
            )
        ]
    return [] if cause == Cause.OTHER else [Advice(message=advice(timeline.header, cause=cause))]


def _more_blocks(timeline: Timeline, rows: pl.DataFrame) -> list[Advice]:
    """As many as the largest of them can come to need, and the null block."""
    length = timeline.header.max_model_len
    ends = [tokens + (most or 0) for tokens, most in rows.select("prompt_tokens", "max_tokens").iter_rows()]
    largest = max(ends) if length is None else min(length, max(ends))
    needed = blocks_needed(timeline.header, max(largest, *rows["tokens"].to_list()))
    if needed is None or timeline.header.kv_blocks_total is None:
        more = say("Give the KV cache more blocks: {space}.", space=kv_space(timeline))
        return [Advice(message=more, setting="kv_cache_memory_bytes")]
    blocks = sum(needed) + 1
    return [
        Advice(
            message=say(
                "Give the KV cache {blocks:n block} (now {now:n}): {space}.",
                blocks=blocks,
                now=timeline.header.kv_blocks_total,
                space=kv_space(timeline, blocks),
            ),
            setting="num_gpu_blocks_override",
            value=blocks,
            costs=say("More memory for the KV cache."),
        )
    ]


def _shorter(timeline: Timeline, rows: pl.DataFrame) -> list[Advice]:
    """A length with which vLLM refuses such a request at once."""
    longest, length = longest_sequence(timeline.header), timeline.header.max_model_len
    first = Request(rows["request_id"][0])
    if not longest or length is None or longest >= length:
        return [Advice(message=say("Abort {request}: the queue behind it then moves.", request=first))]
    return [
        Advice(
            message=say(
                "Set {option:setting} to {longest:n} (now {now:n}): vLLM then rejects such a request "
                "on arrival.",
                option="--max-model-len",
                longest=longest,
                now=length,
            ),
            setting="max_model_len",
            value=longest,
            costs=say("Clients cannot send longer sequences."),
        )
    ]


def _mamba_block(timeline: Timeline) -> int:
    """Tokens in a block of the aligned groups; 0 if there is none."""
    groups = timeline.header.cache_groups
    return max((group.block_size for group in groups if group.kind == "Mamba"), default=0)


RULE = Rule(
    code=CODE,
    summary="a request needs more than the engine has in total, so it can never run; one finding per cause",
    needs=frozenset({Fact.REQUESTS, Fact.QUEUE, Fact.EXITS, Fact.LIVES}),
    find=find,
    proven=(
        ("kv_blocks", "max_model_len"),
        ("kv_blocks", "num_gpu_blocks_override"),
    ),
)
