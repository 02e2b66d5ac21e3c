"""``cache-resets``: the prefix cache was emptied while requests ran, which computed again what they had."""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import StepExample, severity_by_weight, step_numbers, trial_numbers
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Count, Duration, Message, Request, Share, message
from schedtrace.model.report import Advice, Evidence, Finding
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
            title=message("Resets of the prefix cache"),
            verdict=message(
                "{resets} of the prefix cache took the KV blocks of running requests, which then spent "
                "{share} of the requests' time on computing {tokens} again.",
                resets=Count(evidence.resets, "reset"),
                share=Share(share),
                tokens=Count(evidence.lost_tokens, "token"),
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
                    message=message(
                        "Reset the cache while nothing runs, or without reset_running_requests: it then "
                        "refuses as long as requests hold blocks."
                    )
                )
            ],
            evidence=evidence,
            example=message(
                "before {step} a reset preempted {requests}.",
                step=evidence.examples[0].at,
                requests=Count(evidence.examples[0].preempted, "request"),
            ),
            cost_ms=time_us / 1e3,
        )
    ]


def _message(evidence: Resets) -> Message:
    keys = NOTHING
    if evidence.prefix_keys is not None:
        keys = message(
            " The resets dropped {keys} that later prompts could have found.",
            keys=Count(evidence.prefix_keys, "cached block"),
        )
    most = NOTHING
    if evidence.most_times > 1:
        most = message(
            ", {request} most often ({times})",
            request=Request(evidence.most_request),
            times=Count(evidence.most_times, "time"),
        )
    return message(
        "{resets} preempted {requests}{most}; waiting for the blocks and computing again took them "
        "{time}.{keys}",
        resets=Count(evidence.resets, "reset"),
        requests=Count(evidence.requests, "request"),
        most=most,
        time=Duration(1e3 * evidence.wait_ms),
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
