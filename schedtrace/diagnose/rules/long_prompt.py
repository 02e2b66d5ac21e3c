"""``long-prompt``: one prompt took the steps' token budget while far shorter requests waited."""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.allowed import LONG_PREFILL, replayed, threshold
from schedtrace.diagnose.rules.common import wait_finding
from schedtrace.diagnose.waits import Charged, charged
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.charges import LONG_PROMPT
from schedtrace.timeline.long_prompts import long_prefills
from schedtrace.timeline.timeline import Timeline

CODE = "long-prompt"
CHARGES = (LONG_PROMPT,)


class LongPrompt(Evidence, kw_only=True):
    """The prompt, what it took, and who waited."""

    request_id: str
    prompt_tokens: int
    prompts: int
    prefill_frac: float
    steps: int
    time_ms: float
    requests: int
    mean_wait_ms: float
    threshold: int


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/long-prompt.md``."""
    waits = charged(timeline, *CHARGES)
    if waits is None:
        return []
    evidence = _evidence(timeline, waits)
    return [
        wait_finding(
            timeline,
            waits,
            code=CODE,
            title=say("A long prompt monopolizes the token budget"),
            verdict=say(
                "One prompt took the steps: {request:id} ({tokens:n token}) used {share:%} of the "
                "prefill tokens of {steps:n step} ({time:us}); {others:n shorter request} waited "
                "{wait:us} on average for it.",
                request=evidence.request_id,
                tokens=evidence.prompt_tokens,
                share=evidence.prefill_frac,
                steps=evidence.steps,
                time=1e3 * evidence.time_ms,
                others=evidence.requests,
                wait=1e3 * evidence.mean_wait_ms,
            ),
            cause=Cause.TOKEN_BUDGET,
            message=_message(evidence),
            advice=[replayed(LONG_PREFILL)],
            evidence=evidence,
        )
    ]


def _evidence(timeline: Timeline, waits: Charged) -> LongPrompt:
    steps = long_prefills(timeline).join(waits.steps.select("step", "start_us", "output_us"), on="step")
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
        threshold=threshold(timeline),
    )


def _message(evidence: LongPrompt) -> Message:
    others = NOTHING
    if evidence.prompts > 1:
        others = say(" {count:n prompt} of this size did so.", count=evidence.prompts)
    return say(
        "{share:%} of the prefill tokens of these steps were for it.{others}",
        share=evidence.prefill_frac,
        others=others,
    )


RULE = Rule(
    code=CODE,
    summary="one long prompt took the token budget while far shorter requests waited",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES, Fact.REQUESTS}),
    find=find,
    charges=tuple(map(str, CHARGES)),
    specific=True,
)
