"""``head-of-line``: a request refused for its size held up requests behind it that would have fitted."""

import polars as pl

from schedtrace.diagnose.gains import unless_shown
from schedtrace.diagnose.kv_cache import need_at_refusals
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import twice_the_blocks
from schedtrace.diagnose.rules.common import Waited, advise, only, wait_figures, wait_finding
from schedtrace.diagnose.rules.kv_bound import largest_holder
from schedtrace.diagnose.waits import charged
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Advice
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import HEAD_OF_LINE
from schedtrace.timeline.queue_waits import heads_by_size
from schedtrace.timeline.timeline import Timeline


class HeadOfLine(Waited, kw_only=True):
    """Refused requests, and the requests behind them."""

    heads: int
    """Number of different heads."""
    head: str
    """Head behind which requests waited longest in total."""
    head_tokens: int
    """Number of tokens that this head wanted."""
    blocks_free: float | None
    """Median number of free KV blocks after the steps that refused this head."""

    @property
    def other_heads(self) -> int:
        """Refused requests other than ``head``."""
        return self.heads - 1


def held_up_requests(timeline: Timeline) -> pl.DataFrame:
    """Return ``timeline.held_up`` with ``waited_us``, each request's additional wait, longest first."""
    starts = timeline.steps[["step", "start_us"]]
    passed = timeline.held_up.join(starts, on="step", how="left", maintain_order="left").join(
        starts.rename({"step": "left_step", "start_us": "left_us"}), on="left_step", how="left"
    )
    waited = pl.col("left_us").fill_null(timeline.end_us) - pl.col("start_us")
    return passed.with_columns(waited_us=waited).sort("waited_us", "step", descending=[True, False])


def _find(timeline: Timeline) -> Findings:
    waits = charged(timeline, *RULE.charges)
    if waits is None:
        return
    heads, passed = heads_by_size(timeline.refused_heads), held_up_requests(timeline)
    cause = str(passed["cause"].mode().sort()[0])
    worst = (
        passed.group_by("head", maintain_order=True)
        .agg(pl.col("waited_us").sum(), pl.col("head_tokens").first())
        .sort("waited_us", "head", descending=[True, False])
        .row(0, named=True)
    )
    evidence = HeadOfLine(
        heads=heads["head"].n_unique(),
        head=worst["head"],
        head_tokens=worst["head_tokens"],
        blocks_free=heads.filter(pl.col("head") == worst["head"])["kv_blocks_free"].median(),  # type: ignore[arg-type]  # of integers
        **wait_figures(waits),
    )
    yield wait_finding(
        timeline,
        waits,
        title="A refused request holds up others that would fit",
        verdict="The head of the queue holds up the rest: requests that would have fitted spent {share:%} of "
        "all requests' time behind {head:id}[ and {other_heads:n} others, which were refused for their size]"
        "[{other_heads:!}, which was refused for its size].",
        holder=_holder(timeline, evidence, cause),
        cause=cause,
        location=only(heads["location"]),
        message="{requests:n request} would have been admitted {mean:us} earlier on average "
        "({longest_request:id}: {longest_ms:ms}), had vLLM looked past {heads:n refused request}; it "
        "admits in queue order.",
        values={"mean": waits.time_us / waits.requests},
        advice=unless_shown(timeline, waits, _advice(timeline, cause)),
        evidence=evidence,
        example="{at} refused {head:id} ({head_tokens:n token}) and left {budget_left:n token}, "
        "{kv_blocks_free:n KV block} and {seats_left:n seat}; {request_id:id} behind it needed "
        "{tokens:n token} and {blocks:n block}, and waited {waited_us:us} more.",
        cases=passed,
    )


def _holder(timeline: Timeline, evidence: HeadOfLine, cause: str) -> Message:
    if cause != Cause.KV_BLOCKS or evidence.blocks_free is None:
        return say("{head:id} has {head_tokens:n token} ({cause:cause}).", evidence, cause=cause)
    held = need_at_refusals(timeline, evidence.head)
    running = NOTHING
    if held.running and held.blocks_held is not None:
        running = say(
            "; {blocks_held:n} of {total:n} are held by {running:n running request}{largest}",
            held,
            total=held.blocks_total - 1 if held.blocks_total else None,
            largest=largest_holder(held),
        )
    needs = say("has {tokens:n token}", tokens=evidence.head_tokens)
    if held.blocks_needed is not None:
        needs = say("needs {blocks_needed:n KV block}", held)
    return say(
        "{head:id} {needs}, {blocks_free:n} are free{running}{step}.",
        held,
        head=evidence.head,
        needs=needs,
        running=running,
        step=NOTHING if held.held_step is None else say(" ({held_step:step})", held),
    )


def _advice(timeline: Timeline, cause: str) -> list[Advice]:
    config = timeline.header.scheduler_config
    pieces = []
    if cause == Cause.KV_BLOCKS:
        pieces.append(twice_the_blocks(timeline))
        if config.get("scheduler_reserve_full_isl") and config.get("enable_chunked_prefill"):
            pieces.append(
                advise(
                    "{option:setting} (now on) admits it with its first chunk",
                    option="--no-scheduler-reserve-full-isl",
                    costs="A risk of preemptions.",
                )
            )
    if cause == Cause.CHUNKED_PREFILL_OFF:
        pieces.append(
            advise(
                "{option} (now off): the large prompt then takes the budget that is left",
                setting="enable_chunked_prefill",
                value=True,
            )
        )
    pieces.append(advise("send long prompts to an engine of their own"))
    return pieces


RULE = Rule(
    code="head-of-line",
    summary="a refused request held up others behind it that would have fitted",
    needs=frozenset(
        {Fact.QUEUE, Fact.EXITS, Fact.LIVES, Fact.BLOCKS, Fact.REQUESTS, Fact.TIMES, Fact.CONFIG}
    ),
    find=_find,
    charges=(HEAD_OF_LINE,),
    specific=True,
    proven=(("kv_blocks", "num_gpu_blocks_override"),),
)
