"""``never-fits``: requests that can never run, because they need more than the engine has."""

import polars as pl

from schedtrace.diagnose.kv_cache import blocks_needed, longest_sequence, usable_blocks
from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.allowed_settings import batched_tokens, kv_space
from schedtrace.diagnose.rules.common import advise, only, share_of_requests, step_finding
from schedtrace.diagnose.stuck_requests import never_fitting
from schedtrace.model.causes import Cause, reason
from schedtrace.model.causes import cause_advice as advice_on
from schedtrace.model.message import NOTHING, Message, Steps, joined
from schedtrace.model.report import MAX_STEPS, Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.spans import LENGTH_US, total_us
from schedtrace.timeline.timeline import Timeline


class NeverFitting(Evidence, kw_only=True):
    """Requests that can never run because of one cause, with figures of the first of them."""

    requests: int
    """Number of requests that can never run because of this cause."""
    delayed_requests: int
    """Number of other requests that waited between the first and the last refusal."""
    blocks_usable: int | None
    """Number of KV blocks that requests can hold; None if unknown."""
    longest_sequence_tokens: int | None
    """Longest sequence that fits, including output; None if unknown, or KV blocks are not the cause."""
    request_id: str
    """First of these requests."""
    refusals: int
    """Number of refusals of this request."""
    self_preemptions: int
    """Number of this request's preemptions to free blocks for itself."""
    tokens: int
    """Length of this request's prompt in tokens, or number of tokens at which the request outgrew the pool.
    """
    blocks_needed: list[int]
    """KV blocks that this request needs, by cache group; empty if unknown."""
    waited_ms: float
    """Total time that this request spent in the queue."""
    waiting_behind: int
    """Number of requests in the queue after the last refusal."""

    @property
    def needed(self) -> int:
        """Number of KV blocks that the request needs, over all cache groups; 0 if unknown."""
        return sum(self.blocks_needed)


def _find(timeline: Timeline) -> list[Finding]:
    never = never_fitting(timeline)
    findings = [
        _finding(timeline, rows["cause"][0], rows)
        for rows in never.partition_by("cause", maintain_order=True)
    ]
    return sorted(findings, key=lambda finding: -(finding.share_frac or 0))


def _finding(timeline: Timeline, cause: str, rows: pl.DataFrame) -> Finding:
    # Lost are these requests' time in the engine, and other requests' waits behind them.
    first, last = rows["first_step"].min(), rows["last_step"].max()
    begins = min(timeline.steps.filter(pl.col("step") >= first)["start_us"].to_list())
    ends = min(timeline.steps.filter(pl.col("step") > last)["start_us"].to_list(), default=timeline.end_us)
    own = pl.col("request_id").is_in(pl.lit(rows["request_id"]).implode())
    mine = timeline.recorded_states.filter(own & (pl.col("state") != "front_end") & (LENGTH_US > 0))
    waits = pl.col("state").is_in(QUEUED) & (pl.col("cause") != NEXT_STEP)
    behind = timeline.recorded_states.filter(~own & waits).with_columns(
        pl.col("begin_us", "end_us").clip(begins, ends)
    )
    delayed = behind.filter(LENGTH_US > 0)
    evidence = _evidence(timeline, cause, rows, delayed["request_id"].n_unique())
    return step_finding(
        timeline,
        rows,
        evidence,
        severity="critical",
        title="A request can never run",
        verdict="{request_id:id} can never run: {why}.",
        share_frac=share_of_requests(timeline, total_us(mine) + total_us(delayed)),
        holder="[{request_id:id} blocked the queue: {delayed_requests:n other request} waited behind it.]",
        leads=True,
        cause=cause,
        via=only(rows["via"]) or "inferred",
        location=only(rows["location"]),
        count=int(rows["refusals"].sum()),
        steps=timeline.steps.filter(pl.col("step").is_between(first, last))["step"].head(MAX_STEPS).to_list(),
        tokens=int(rows["tokens"].sum()),
        message="vLLM refused {request_id:id} in {refusals:n step} while no other request held anything"
        "[ and preempted it {self_preemptions:n time} for itself]; it waited {waited_ms:ms}."
        "[ The longest prompt that fits, output included, has {longest_sequence_tokens:n token}.]"
        "[ {others:n other request} cannot run either.]",
        advice=_advice(timeline, cause, rows),
        example="in {span}, {waiting_behind:n request} waited behind {request_id:id}.",
        values={
            "why": _why(timeline, cause, evidence),
            "others": rows.height - 1,
            "span": Steps(*rows[["first_step", "last_step", "trial"]].row(0)),
        },
    )


def _evidence(timeline: Timeline, cause: str, rows: pl.DataFrame, behind: int) -> NeverFitting:
    row, is_kv = rows.row(0, named=True), cause == Cause.KV_BLOCKS
    computed = blocks_needed(timeline.header, row["tokens"]) if is_kv else None
    queued = timeline.request_states.filter(
        (pl.col("request_id") == row["request_id"]) & pl.col("state").is_in(QUEUED)
    )
    return NeverFitting(
        requests=rows.height,
        delayed_requests=behind,
        blocks_usable=usable_blocks(timeline.header),
        longest_sequence_tokens=longest_sequence(timeline.header) if is_kv else None,
        request_id=row["request_id"],
        refusals=row["refusals"],
        self_preemptions=row["self_preemptions"],
        tokens=row["tokens"],
        blocks_needed=computed or ([row["blocks_needed"]] if row["blocks_needed"] else []),
        waited_ms=total_us(queued) / 1e3,
        waiting_behind=max(0, row["waiting"] - 1),
    )


def _why(timeline: Timeline, cause: str, evidence: NeverFitting) -> Message:
    """Return the request's need and what exists; without values that are not recorded."""
    total, budget, block = evidence.blocks_usable, timeline.token_budget, _mamba_block(timeline)
    if cause == Cause.KV_BLOCKS and total is not None and evidence.needed > total:
        groups = [say("{blocks:n}", blocks=blocks) for blocks in evidence.blocks_needed]
        return say(
            "its {tokens:n token} need {needed:n KV block}[ ({groups} by cache group)], and requests can "
            "hold {blocks_usable:n} in all",
            evidence,
            groups=joined(groups, " + ") if len(groups) > 1 else NOTHING,
        )
    if cause == Cause.CHUNKED_PREFILL_OFF and evidence.tokens > budget:
        return say(
            "its prompt of {tokens:n token} is above the token budget of {budget:n}, and chunked prefill is "
            "off",
            evidence,
            budget=budget,
        )
    if cause == Cause.MAMBA_ALIGNMENT and block > budget:
        return say(
            "a chunk has to end at a block of {block:n token}, and the token budget of a step is {budget:n}",
            block=block,
            budget=budget,
        )
    return say(
        "in {refusals:n step} {reason}, although no other request held anything",
        evidence,
        reason=reason(timeline.header, loop="waiting", cause=cause, detail=None),
    )


def _advice(timeline: Timeline, cause: str, rows: pl.DataFrame) -> list[Advice]:
    if cause == Cause.KV_BLOCKS:
        # With a maximum length, vLLM refuses such a request at once.
        longest, length = longest_sequence(timeline.header), timeline.header.max_model_len
        shorter = advise("Abort {request:id}: the queue behind it then moves.", request=rows["request_id"][0])
        if longest and length is not None and longest < length:
            shorter = advise(
                "Set {option} to {value:n} (now {now:n}): vLLM then rejects such a request on arrival.",
                now=length,
                setting="max_model_len",
                value=longest,
                costs="Clients cannot send longer sequences.",
            )
        return [_more_blocks(timeline, rows), shorter]
    if cause == Cause.CHUNKED_PREFILL_OFF:
        return [
            advise(
                "Enable chunked prefill: {option} (now off).",
                setting="enable_chunked_prefill",
                value=True,
                costs="Steps then mix prefill chunks with decodes, which raises inter-token latency.",
            )
        ]
    if cause == Cause.MAMBA_ALIGNMENT and (block := _mamba_block(timeline)) > timeline.token_budget:
        return [
            advise(
                "Raise {option} to {value:n} or more (now {now:n}).",
                now=batched_tokens(timeline),
                setting="max_num_batched_tokens",
                value=block,
                costs="Longer steps raise inter-token latency.",
            )
        ]
    return [] if cause == Cause.OTHER else [Advice(message=advice_on(timeline.header, cause=cause))]


def _more_blocks(timeline: Timeline, rows: pl.DataFrame) -> Advice:
    """Return the advice to have as many blocks as the largest request may need, plus the null block."""
    length = timeline.header.max_model_len
    ends = [tokens + (most or 0) for tokens, most in rows[["prompt_tokens", "max_tokens"]].iter_rows()]
    largest = max(ends) if length is None else min(length, max(ends))
    needed = blocks_needed(timeline.header, max(largest, *rows["tokens"].to_list()))
    if needed is None or timeline.header.kv_blocks_total is None:
        return advise(
            "Give the KV cache more blocks: {space}.",
            space=kv_space(timeline),
            setting="kv_cache_memory_bytes",
        )
    blocks = sum(needed) + 1
    return advise(
        "Give the KV cache {value:n block} (now {now:n}): {space}.",
        now=timeline.header.kv_blocks_total,
        space=kv_space(timeline, blocks),
        setting="num_gpu_blocks_override",
        value=blocks,
        costs="More memory for the KV cache.",
    )


def _mamba_block(timeline: Timeline) -> int:
    """Return the largest number of tokens per block of the Mamba groups; 0 if there are none."""
    groups = timeline.header.cache_groups
    return max((group.block_size for group in groups if group.kind == "Mamba"), default=0)


RULE = Rule(
    code="never-fits",
    summary="a request needs more than the engine has in total, so it can never run; one finding per cause",
    needs=frozenset({Fact.REQUESTS, Fact.QUEUE, Fact.EXITS, Fact.LIVES}),
    find=_find,
    proven=(
        ("kv_blocks", "max_model_len"),
        ("kv_blocks", "num_gpu_blocks_override"),
    ),
)
