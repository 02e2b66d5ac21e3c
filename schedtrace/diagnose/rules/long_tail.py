"""``long-tail``: a few requests with far longer outputs run alone at the end, or take most of the time.

Requests that do not run alone count only if the others stop by themselves and nothing limits the engine.
"""

from dataclasses import dataclass

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule, Threshold, cost_frac
from schedtrace.diagnose.rules.common import advise, severity_by_weight, share_of_requests, step_finding
from schedtrace.model.message import Requests
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.spans import total_us
from schedtrace.timeline.timeline import Timeline

FAR = 3.0
"""Minimum factor by which a tail's outputs exceed those of nine tenths of the requests; less is usual."""
QUANTILE = 0.9
FEWEST = 20
"""Minimum number of requests to compare; with fewer, the longest tenth has fewer than two."""
FOUND_FROM_FRAC = 0.05
"""Minimum share of the run for the finding to be reported."""
FEW_FRAC, MOST_FRAC = 0.25, 0.5
"""Maximum share of the requests that count as a few, and minimum share of the requests' time that these take.
"""


class Tail(Evidence, kw_only=True):
    """Tails of all trials."""

    requests: list[str]
    """Requests of the longest tail, the longest output first."""
    output_tokens: int
    """Number of output tokens of the first request in ``requests``."""
    usual_tokens: float
    """90th percentile of the numbers of output tokens."""
    tail_ms: float
    """Total length of the tails of all trials."""


class Unbounded(Evidence, kw_only=True):
    """Requests that ran to their ``max_tokens``, far beyond the outputs of requests that stopped."""

    capped: int
    """Number of requests that ran to their ``max_tokens``."""
    stopped: int
    """Number of requests that stopped by themselves."""
    output_tokens: int
    """Number of output tokens of the longest request that ran to its ``max_tokens``."""
    usual_tokens: float
    """90th percentile of the outputs of requests that stopped."""
    time_frac: float
    """Share of all requests' time that the requests in ``capped`` took."""
    again: int
    """Number of requests in ``capped`` whose prompt a later request repeats, according to the prompts'
    hashes."""


@dataclass(frozen=True)
class _OneTail:
    """Tail of a trial."""

    begin_us: int
    end_us: int
    requests: list[str]
    output_tokens: int
    usual_tokens: float
    began_first: bool
    """Whether the longest request began almost with the run, so that sending it first would gain nothing."""

    @property
    def length_us(self) -> int:
        return self.end_us - self.begin_us


def _find(timeline: Timeline) -> Findings:
    yield from _tails(timeline)
    yield from _unbounded(timeline)


def _unbounded(timeline: Timeline) -> Findings:
    """Report requests that ran to ``max_tokens`` and took most of the time while others stop far earlier."""
    ends = timeline.finishes.drop_nulls("output_tokens")
    stopped = ends.filter(pl.col("status") == "STOPPED")
    if stopped.height < FEWEST:
        return
    usual = float(stopped["output_tokens"].quantile(QUANTILE) or 0)
    capped = ends.filter((pl.col("status") == "LENGTH_CAPPED") & (pl.col("output_tokens") >= FAR * usual))
    theirs = pl.col("request_id").is_in(pl.lit(capped["request_id"]).implode())
    time_frac = share_of_requests(timeline, total_us(timeline.request_states.filter(theirs))) or 0.0
    if not 0 < capped.height <= FEW_FRAC * ends.height or time_frac < MOST_FRAC:
        return
    sent = timeline.first_arrivals.drop_nulls("prefix_hashes").sort("queued_us")
    is_last = pl.struct("prompt_tokens", "prefix_hashes").is_last_distinct()
    again = sent.filter(theirs & ~is_last)
    longest = capped.sort("output_tokens", "request_id", descending=[True, False]).row(0, named=True)
    evidence = Unbounded(
        capped=capped.height,
        stopped=stopped.height,
        output_tokens=int(longest["output_tokens"]),
        usual_tokens=usual,
        time_frac=time_frac,
        again=again.height,
    )
    yield step_finding(
        timeline,
        capped,
        evidence,
        title="Outputs that end only at max_tokens",
        verdict="{capped:n request} ran to max_tokens and wrote up to {output_tokens:n token}, where nine "
        "tenths of the {stopped:n} that stopped by themselves wrote at most {usual:n}: {time_frac:%} of the "
        "requests' time.[ {again:n} of their prompts came again.]",
        tokens=int(capped["output_tokens"].sum()),
        message="{longest:id} is the longest. No setting of the engine makes one request's tokens come in "
        "parallel.",
        values={"usual": round(usual), "longest": longest["request_id"]},
        advice=[
            advise(
                "Bound these outputs: a smaller {limit:code}, or {thinking:code} where the model reasons"
                "[{again:?}; a prompt that is sent again runs as long again].",
                evidence,
                limit="max_tokens",
                thinking="thinking_token_budget",
            )
        ],
    )


def _tails(timeline: Timeline) -> Findings:
    tails, runs_us = [], 0
    for trial in timeline.trials():
        tail, run_us = _tail(timeline, trial)
        tails += [tail] if tail is not None else []
        runs_us += run_us
    if not tails:
        return
    tail_us = sum(tail.length_us for tail in tails)
    share = tail_us / runs_us
    if share < FOUND_FROM_FRAC:
        return
    spent = share_of_requests(timeline, sum(tail.length_us * len(tail.requests) for tail in tails))
    worst = max(tails, key=lambda tail: tail.length_us)
    inside = pl.any_horizontal(pl.col("start_us").is_between(tail.begin_us, tail.end_us) for tail in tails)
    steps = timeline.steps.filter(inside)
    evidence = Tail(
        requests=worst.requests,
        output_tokens=worst.output_tokens,
        usual_tokens=worst.usual_tokens,
        tail_ms=tail_us / 1e3,
    )
    advice = (
        "Send the longest requests first, or bound their outputs (max_tokens): no setting of the engine "
        "computes the tokens of one request in parallel."
    )
    if worst.began_first:
        advice = (
            "Bound the longest outputs (max_tokens), or have other requests to run meanwhile: the longest "
            "began with the first ones, and no setting of the engine computes its tokens in parallel."
        )
    yield step_finding(
        timeline,
        steps,
        evidence,
        severity=severity_by_weight(None, share),
        title="A long tail: few requests run alone at the end",
        verdict="{who} ran alone in the last {share:%} of the run ({tail_ms:ms}): "
        "{output_tokens:n output token}, where nine tenths of the requests have at most {usual:n}.",
        share_frac=spent,
        tokens=evidence.output_tokens,
        message="{steps:n step} decoded only {alone:n request} while all other seats were free. The reason "
        "is the length of an output, not a limit of the engine.",
        values={
            "who": Requests(worst.requests, len(worst.requests)),
            "share": share,
            "usual": round(worst.usual_tokens),
            "alone": len(worst.requests),
            "longest": worst.requests[0],
        },
        advice=[advise(advice)],
        example="{longest:id} wrote {output_tokens:n output token}.",
        cost_ms=evidence.tail_ms,
        cost_frac=share,
        cost_of="run",
    )


def _tail(timeline: Timeline, trial: int | None) -> tuple[_OneTail | None, int]:
    """Return the tail of a trial (None without one), and the length of the trial."""
    steps = timeline.trial_rows(timeline.steps, trial)
    ends = timeline.trial_rows(timeline.finishes, trial).drop_nulls("output_tokens")
    ends = ends.filter(pl.col("status").is_in(["STOPPED", "LENGTH_CAPPED"]))
    begin_us, end_us = steps["start_us"].min(), ends["finished_us"].max()
    if begin_us is None or end_us is None:
        return None, 0
    run_us = int(end_us) - int(begin_us)  # type: ignore[arg-type]  # integers
    usual = float(ends["output_tokens"].quantile(QUANTILE) or 0)
    long = ends.filter(pl.col("output_tokens") >= FAR * usual)
    usual_ends = ends.filter(pl.col("output_tokens") < FAR * usual)
    last_arrival_us = timeline.trial_rows(timeline.arrivals, trial).select(pl.col("queued_us").max()).item()
    if ends.height < FEWEST or long.is_empty() or usual_ends.is_empty():
        return None, run_us
    begin = max(usual_ends.select(pl.col("finished_us").max()).item(), last_arrival_us or 0)
    alone = long.filter(pl.col("finished_us") > begin).sort(
        "output_tokens", "request_id", descending=[True, False]
    )
    if alone.is_empty():
        return None, run_us
    late_us = alone["scheduled_us"][0]
    ran_before = alone["request_id"][0] in timeline.present.filter(pl.col("state") == "running")["request_id"]
    return _OneTail(
        begin,
        alone.select(pl.col("finished_us").max()).item(),
        alone["request_id"].to_list(),
        int(alone["output_tokens"][0]),
        usual,
        ran_before or (late_us is not None and late_us - begin_us < FOUND_FROM_FRAC * run_us),
    ), run_us


RULE = Rule(
    code="long-tail",
    summary="a few requests with far longer outputs ran alone at the end of a run, or took most of the time",
    needs=frozenset({Fact.TIMES, Fact.LIVES}),
    find=_find,
    quiet=0,
    threshold=Threshold(FOUND_FROM_FRAC, cost_frac),
)
