"""``cache-resets``: the prefix cache was emptied while requests ran, which computed again what they had."""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import StepExample, severity_by_weight, step_numbers, trial_numbers
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.charges import CACHE_RESET
from schedtrace.timeline.timeline import Timeline

CODE = "cache-resets"
CHARGES = (CACHE_RESET,)


class Reset(StepExample, kw_only=True):
    """One reset: ``step`` is the first one afterwards."""

    preempted: int
    lost_tokens: int


class Resets(Evidence, kw_only=True):
    """All resets that preempted somebody."""

    resets: int
    preempted: int
    requests: int
    most_request: str
    most_times: int
    lost_tokens: int
    prefix_keys: int | None
    wait_ms: float
    examples: list[Reset]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/cache-resets.md``."""
    taken = timeline.preemptions.filter(~pl.col("in_schedule"))
    if taken.is_empty() or not timeline.requests_us:
        return []
    time_us = int(timeline.charges.filter(pl.col("charge") == CACHE_RESET)["time_us"].sum())
    share = time_us / timeline.requests_us
    each = (
        taken.group_by("step", "trial")
        .agg(preempted=pl.len(), lost_tokens=pl.col("lost_tokens").sum())
        .sort("lost_tokens", "step", descending=[True, False])
    )
    often = taken["request_id"].value_counts().sort("count", "request_id", descending=[True, False])
    known = timeline.controls.filter((pl.col("control") == "reset_prefix_cache") & ~pl.col("failed"))
    keys = known["prefix_keys"].drop_nulls()
    evidence = Resets(
        resets=each.height,
        preempted=taken.height,
        requests=often.height,
        most_request=str(often["request_id"][0]),
        most_times=int(often["count"][0]),
        lost_tokens=int(taken["lost_tokens"].sum()),
        prefix_keys=int(keys.sum()) if keys.len() else None,
        wait_ms=time_us / 1e3,
        examples=Reset.first(each),
    )
    return [
        Finding(
            code=CODE,
            severity=severity_by_weight(None, share),
            title=say("Resets of the prefix cache"),
            verdict=say(
                "{resets:n reset} of the prefix cache took the KV blocks of running requests, which "
                "then spent {share:%} of the requests' time on computing {tokens:n token} again.",
                resets=evidence.resets,
                share=share,
                tokens=evidence.lost_tokens,
            ),
            share_frac=share,
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=each.height,
            trials=trial_numbers(each),
            steps=step_numbers(each),
            tokens=evidence.lost_tokens,
            message=_message(evidence),
            advice=[
                Advice(
                    message=say(
                        "Reset the cache while nothing runs, or without reset_running_requests: it then "
                        "refuses as long as requests hold blocks."
                    )
                )
            ],
            evidence=evidence,
            example=say(
                "before {step} a reset preempted {requests:n request}.",
                step=evidence.examples[0].at,
                requests=evidence.examples[0].preempted,
            ),
            cost_ms=time_us / 1e3,
        )
    ]


def _message(evidence: Resets) -> Message:
    keys = NOTHING
    if evidence.prefix_keys is not None:
        keys = say(
            " The resets dropped {keys:n cached block} that later prompts could have found.",
            keys=evidence.prefix_keys,
        )
    most = NOTHING
    if evidence.most_times > 1:
        most = say(
            ", {request:id} most often ({times:n time})",
            request=evidence.most_request,
            times=evidence.most_times,
        )
    return say(
        "{resets:n reset} preempted {requests:n request}{most}; waiting for the blocks and "
        "computing again took them {time:us}.{keys}",
        resets=evidence.resets,
        requests=evidence.requests,
        most=most,
        time=1e3 * evidence.wait_ms,
        keys=keys,
    )


RULE = Rule(
    code=CODE,
    summary="resets of the prefix cache preempted running requests, which computed again what they had "
    "computed",
    needs=frozenset({Fact.TIMES, Fact.LIVES, Fact.PREEMPTIONS}),
    find=find,
    charges=tuple(map(str, CHARGES)),
)
