"""``long-prompt``: one prompt took the steps' token budget while far shorter requests waited."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import wait_finding
from schedtrace.diagnose.rules.token_budget_bound import shown_budget, smaller_chunks
from schedtrace.diagnose.waits import Charged, charged
from schedtrace.model.causes import Cause
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import LONG_PROMPT
from schedtrace.timeline.timeline import Timeline


class LongPrompt(Evidence, kw_only=True):
    """Long prompt, the budget that it took, and the requests that waited."""

    request_id: str
    """Request whose prompt took the most tokens in the steps in which others waited."""
    prompt_tokens: int
    """Length of the prompt of ``request_id``."""
    prompts: int
    """Number of requests whose prompts took most of a step's prefill tokens while others waited."""
    prefill_frac: float
    """Share of the prefill tokens that the prompt took in the steps in which it took most of them."""
    steps: int
    """Number of steps in which the prompt took most of the prefill tokens."""
    time_ms: float
    """Total time of the steps in which the prompt took most of the prefill tokens."""
    requests: int
    """Number of short requests that waited."""
    mean_wait_ms: float
    """Mean time that the short requests waited."""

    @property
    def like_it(self) -> int:
        """Number of prompts of this kind if there are several; otherwise 0."""
        return self.prompts if self.prompts > 1 else 0


def _find(timeline: Timeline) -> Findings:
    waits = charged(timeline, *RULE.charges)
    if waits is None:
        return
    budget = shown_budget(timeline, waits)
    yield wait_finding(
        timeline,
        waits,
        title="A long prompt monopolizes the token budget",
        verdict="One prompt took the steps: {request_id:id} ({prompt_tokens:n token}) used "
        "{prefill_frac:%} of the prefill tokens of {steps:n step} ({time_ms:ms}); "
        "{requests:n shorter request} waited {mean_wait_ms:ms} on average for it.",
        cause=Cause.TOKEN_BUDGET,
        message="{prefill_frac:%} of the prefill tokens of these steps were for it."
        "[ {like_it:n prompt} of this size did so.]",
        advice=[*([budget] if budget else []), smaller_chunks(timeline, waits.steps)],
        evidence=_evidence(timeline, waits),
    )


def _evidence(timeline: Timeline, waits: Charged) -> LongPrompt:
    steps = timeline.long_prefills.join(waits.steps[["step", "start_us", "output_us"]], on="step")
    each = steps.group_by("request_id").agg(
        pl.col("scheduled_tokens", "prefill_tokens").sum(), pl.col("prompt_tokens").first(), steps=pl.len()
    )
    first = each.sort("scheduled_tokens", "request_id", descending=[True, False]).row(0, named=True)
    ours = steps.filter(pl.col("request_id") == first["request_id"])
    return LongPrompt(
        request_id=first["request_id"],
        prompt_tokens=first["prompt_tokens"],
        prompts=each.height,
        prefill_frac=first["scheduled_tokens"] / first["prefill_tokens"],
        steps=first["steps"],
        time_ms=int(ours.select((pl.col("output_us") - pl.col("start_us")).sum()).item() or 0) / 1e3,
        requests=waits.requests,
        mean_wait_ms=waits.time_us / waits.requests / 1e3,
    )


RULE = Rule(
    code="long-prompt",
    summary="one long prompt took the token budget while far shorter requests waited",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES, Fact.REQUESTS}),
    find=_find,
    charges=(LONG_PROMPT,),
    specific=True,
    proven=((Cause.TOKEN_BUDGET, "max_num_batched_tokens"),),
)
