"""``cache-resets``: the prefix cache was emptied while requests ran, which computed again what they had."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import StepExample, advise, step_finding
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import CACHE_RESET
from schedtrace.timeline.timeline import Timeline

KEYS = " The resets dropped {prefix_keys:n cached block} that later prompts could have found."


class Reset(StepExample, kw_only=True):
    """A reset: ``step`` is the first one afterwards."""

    preempted: int
    """Number of requests that the reset preempted."""
    lost_tokens: int
    """Computed tokens that they lost."""


class Resets(Evidence, kw_only=True):
    """All resets that preempted somebody."""

    resets: int
    """Number of resets that preempted a request."""
    preempted: int
    """Number of preemptions."""
    requests: int
    """Number of requests that were preempted."""
    most_request: str
    """Request that was preempted most often."""
    most_times: int
    """Number of its preemptions."""
    lost_tokens: int
    """Computed tokens that the requests lost."""
    prefix_keys: int | None
    """Cached blocks that all resets dropped; None in older traces."""
    wait_ms: float
    """Time charged to the resets."""
    examples: list[Reset]
    """Resets that cost most tokens; the step is the first one afterwards."""

    @property
    def preempted_again(self) -> bool:
        """True if some request was preempted by several resets."""
        return self.most_times > 1


def _find(timeline: Timeline) -> Findings:
    taken = timeline.preemptions.filter(~pl.col("in_schedule"))
    if taken.is_empty() or not timeline.requests_us:
        return
    time_us = int(timeline.charges.filter(pl.col("charge") == CACHE_RESET)["time_us"].sum())
    share = time_us / timeline.requests_us
    each = (
        taken.group_by("step", "trial")
        .agg(preempted=pl.len(), lost_tokens=pl.col("lost_tokens").sum())
        .sort("lost_tokens", "step", descending=[True, False])
    )
    often = taken["request_id"].value_counts().sort("count", "request_id", descending=[True, False])
    resets = timeline.controls.filter((pl.col("control") == "reset_prefix_cache") & ~pl.col("failed"))
    keys = resets["prefix_keys"].drop_nulls()
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
    yield step_finding(
        timeline,
        each,
        evidence,
        title="Resets of the prefix cache",
        verdict="{resets:n reset} of the prefix cache took the KV blocks of running requests, which then "
        "spent {share:%} of the requests' time on computing {lost_tokens:n token} again.",
        share_frac=share,
        tokens=evidence.lost_tokens,
        message="{resets:n reset} preempted {requests:n request}"
        "[{preempted_again:?}, {most_request:id} most often ({most_times:n time})]; waiting for the blocks "
        "and computing again took them {wait_ms:ms}." + ("" if evidence.prefix_keys is None else KEYS),
        advice=[
            advise(
                "Reset the cache while nothing runs, or without reset_running_requests: it then refuses "
                "as long as requests hold blocks."
            )
        ],
        example="before {at} a reset preempted {preempted:n request}.",
        cost_ms=evidence.wait_ms,
    )


RULE = Rule(
    code="cache-resets",
    summary="resets of the prefix cache preempted running requests, which computed again what they had "
    "computed",
    needs=frozenset({Fact.TIMES, Fact.LIVES, Fact.PREEMPTIONS}),
    find=_find,
    charges=(CACHE_RESET,),
)
