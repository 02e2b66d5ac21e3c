"""``arrival-limited``: steps were small because requests had not arrived yet; no request was refused."""

import msgspec
import polars as pl

from schedtrace.diagnose.offered_load import offered_load
from schedtrace.diagnose.rule import Findings, Rule, Threshold
from schedtrace.diagnose.rules.client_limited import more_tokens
from schedtrace.diagnose.rules.common import RESOLVED_FRAC, advise, largest, only, step_finding
from schedtrace.diagnose.waits import FOUND_FROM_FRAC
from schedtrace.model.causes import Cause
from schedtrace.model.kv_need import kv_need
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

MOST_FRAC = 0.5
"""Share of requests that must arrive in bursts for a load to count as bursty."""
SLOW_HANDOVER_FRAC = 0.01
"""Minimum share of the busy time that short steps must take to matter for throughput."""
HANDOVER = (
    "{steps:n step} ran with tokens and seats to spare and no request waiting, while up to "
    "{to_come:n request} of the same trial had not arrived: {spent_ms:ms}, {spent_frac:%} of the busy time. "
    "They used {budget_used_frac:%} of the budget on average. The front end took {handed_over_ms:ms} to hand "
    "over the requests of a trial."
)
"""Sentences about the fields of ``Handover``."""

OF_TRIAL = pl.col("trial").fill_null(-1).alias("of")
"""Trial, or -1 in a trace without trials, because nulls match nothing in a join."""


class Handover(msgspec.Struct, kw_only=True):
    """Short steps of a run whose requests all exist from the start, and the time to hand these over."""

    steps: int
    """Number of steps that nothing limited except that requests of their trial had not arrived."""
    to_come: int
    """Largest number of requests of the trial that had not arrived yet at a short step."""
    spent_ms: float
    """Total time of the short steps, from start to output."""
    spent_frac: float
    """``spent_ms`` as a share of the busy time."""
    budget_used_frac: float
    """Mean share of the token budget that the short steps used."""
    handed_over_ms: float
    """Time between the arrivals of a trial's first and last request in the scheduler; mean over the trials.
    """


class LateRequests(Evidence, kw_only=True):
    """Requests that came too late for a step."""

    late_requests: int
    """Number of requests that came too late for a step."""
    late_us_max: int | None
    """Largest time, in microseconds, from the end of the ``schedule()`` call that missed a request to the
    request's arrival at the front end. Negative: each had already reached the front end, but not the
    scheduler. None: no request was late."""
    on_their_way: int
    """Number of late requests that were at the front end when ``schedule()`` ended."""
    extra_steps: int
    """Number of later steps that first scheduled late requests; they may have run other requests, too."""
    extra_steps_us: int
    """Total time of the extra steps, from start to output."""
    handover: Handover | None
    """Short steps; None: they took too little of the busy time, or clients sent their requests over time."""


def _find(timeline: Timeline) -> Findings:
    late = late_requests(timeline)
    handover = _handover(timeline)
    if late.height:
        yield _late_finding(timeline, late, handover)
    elif handover is not None:
        short = short_steps(timeline)
        yield step_finding(
            timeline,
            short,
            _evidence(timeline, late, handover),
            severity="info",
            cause=Cause.QUEUE_EMPTY,
            via=str(short["waiting_via"].unique().sort()[0]),
            tokens=int(short["remaining_budget"].sum()),
            message=say(HANDOVER, handover),
        )


def _late_finding(timeline: Timeline, late: pl.DataFrame, handover: Handover | None) -> Finding:
    share = _share(timeline, late)
    evidence = _evidence(timeline, late, handover)
    advice = []
    if share is not None and timeline.closed_workload:
        advice.append(
            advise(
                "to measure with full batches, queue all requests before the first step: {run:code}, or "
                "{bench:code}. In production there is nothing to change",
                run="schedtrace run --prequeue",
                bench="vllm bench throughput --prequeue-requests",
            )
        )
    elif share is not None:
        fewer_rounds = more_tokens(offered_load(timeline))
        at_once = "nothing in vLLM, which does not wait for requests; send them before the first step"
        advice += [*([fewer_rounds] if fewer_rounds else []), advise(at_once)]
    missed = late.group_by("step", "trial", maintain_order=True).agg(
        pl.col("total_requests", "used_tokens", "remaining_budget").first(), late=pl.len()
    )
    return step_finding(
        timeline,
        late[["step", "trial"]].unique(),
        evidence,
        title="Requests arrive while the engine already steps" if share is not None else "",
        verdict=NOTHING if share is None else _verdict(timeline, late, share),
        share_frac=share,
        severity="info",
        cause=Cause.QUEUE_EMPTY,
        via=str(late["waiting_via"].unique().sort()[0]),
        location=only(late["waiting_location"]),
        tokens=int(late["prompt_tokens"].sum()),
        message="{steps:n step} left token budget unused because {late_requests:n request} "
        "({tokens:n token}) that would have fitted reached the scheduler after schedule() had ended. "
        "[{late:!}The front end already had all of them when schedule() ended.]"
        "[{late:?}The last one reached the front end {late_us_max:us} after schedule()"
        "[; {on_their_way:n} of them had reached it when schedule() ended].] "
        "[vLLM first scheduled them in {extra_steps:n later step}"
        "[ that took {extra_steps_us:us} in total].]"
        "[{extra_steps:!}None of them was scheduled before the trace ended.][ {of_handover}]",
        values={
            "late": evidence.on_their_way < evidence.late_requests,
            "of_handover": say(HANDOVER, handover) if handover else NOTHING,
        },
        advice=advice,
        example="{at} scheduled {total_requests:n} of {requests:n request} ({used_tokens:n token}) and left "
        "{remaining_budget:n token} of budget.",
        cases=largest(missed.with_columns(requests=pl.col("total_requests") + pl.col("late")), "late"),
    )


def _share(timeline: Timeline, late: pl.DataFrame) -> float | None:
    """Return the share of the requests' time that late requests waited until the next step.

    None if requests arrive independently: each must then wait for the next step, and no setting changes that.
    """
    # A burst brings as many requests too late for a step as the step had, or more.
    each = late.group_by("step").agg(pl.len().alias("late"), pl.col("total_requests").first())
    in_bursts = int(each.filter(pl.col("late") >= pl.col("total_requests"))["late"].sum())
    is_bursty = in_bursts >= MOST_FRAC * timeline.arrivals.height
    if not timeline.requests_us or not (timeline.closed_workload or is_bursty):
        return None
    nexts = timeline.steps.select("step", next_us=pl.col("start_us").shift(-1))
    waited = (
        late.join(nexts, on="step", how="left")
        .filter(pl.col("queued_us") <= pl.col("next_us"))  # else it was the front end's time
        .select(us=(pl.col("next_us") - pl.max_horizontal("arrived_us", "end_us")).clip(0))
    )
    share = int(waited["us"].sum()) / timeline.requests_us
    return share if timeline.closed_workload or share >= FOUND_FROM_FRAC else None


def _verdict(timeline: Timeline, late: pl.DataFrame, share: float) -> Message:
    spent = share if share >= RESOLVED_FRAC else None
    first = late.sort("step").filter(pl.col("step") == pl.col("step").min())
    there = int(first["total_requests"][0])
    in_trial = timeline.arrivals.filter(pl.col("trial").eq_missing(pl.lit(first["trial"][0])))
    at_once = timeline.closed_workload or there + first.height >= in_trial.height  # else it is a server
    begins = timeline.present.is_empty()  # else its first step is not that of the load
    if (
        begins
        and at_once
        and first["step"][0] == timeline.trial_rows(timeline.steps, first["trial"][0])["step"].min()
    ):
        return say(
            "The client set the pace, not the scheduler: when the first step ran, {there:n} of "
            "{came:n request} had arrived. The others ran in later steps; no ready request was refused. "
            "[The requests spent {spent:%} of their time waiting for those steps. ]With {prequeue:code}, all "
            "requests are queued before the first step.",
            there=there,
            came=in_trial.height,
            spent=spent,
            prequeue="--prequeue",
        )
    return say(
        "The client set the pace, not the scheduler: steps were small because requests had not arrived; no "
        "ready request was refused.[ They spent {spent:%} of their time until the next step.]",
        spent=spent,
    )


def _evidence(timeline: Timeline, late: pl.DataFrame, handover: Handover | None) -> LateRequests:
    first_seen = (
        timeline.admitted.lazy()
        .filter(pl.col("phase") == "new")
        .group_by("request_id")
        .agg(pl.col("step").min())
    ).collect()
    followers = late[["request_id"]].join(first_seen, on="request_id")["step"].unique()
    extra = timeline.steps.filter(pl.col("step").is_in(pl.lit(followers).implode()))
    lateness = late["late_us"]
    return LateRequests(
        late_requests=late.height,
        late_us_max=int(lateness.max()) if late.height else None,  # type: ignore[arg-type]  # integers
        on_their_way=late.filter(pl.col("late_us") <= 0).height,
        extra_steps=extra.height,
        extra_steps_us=int(extra.select((pl.col("output_us") - pl.col("start_us")).sum()).item() or 0),
        handover=handover,
    )


def late_requests(timeline: Timeline) -> pl.DataFrame:
    """Return requests that a step missed only because they arrived too late, and that would have fitted.

    One row per request: ``step``, ``trial``, ``request_id``, ``prompt_tokens``, ``late_us`` (arrival at the
    front end minus the end of ``schedule()``; negative: it was on its way) and the step's columns. A request
    is counted once, at the first step whose output came back after its arrival.
    """
    steps = timeline.steps.filter(
        (pl.col("total_requests") > 0) & pl.col("output_us").is_not_null() & pl.col("end_us").is_not_null()
    ).sort("output_us")
    arrivals = (
        timeline.arrivals.filter(pl.col("arrived_us").is_not_null() & ~pl.col("streaming_update"))
        .select("request_id", "arrived_us", "queued_us", "prompt_tokens")
        .sort("arrived_us")
    )
    missed = arrivals.join_asof(
        steps, left_on="arrived_us", right_on="output_us", strategy="forward", coalesce=False
    ).filter(
        (pl.col("queued_us") >= pl.col("end_us"))
        & (pl.col("remaining_budget") > 0)
        & (pl.col("waiting_cause") == Cause.QUEUE_EMPTY)
    )
    if missed.is_empty():
        return missed.hstack([pl.Series("late_us", [], pl.Int64)])
    need, lengths = kv_need(timeline.header), missed["prompt_tokens"].unique()
    counted = [need.held(0, tokens) if need else None for tokens in lengths]
    needed = [sum(blocks) if blocks else None for blocks in counted]
    blocks = pl.col("prompt_tokens").replace_strict(lengths, pl.Series(needed, dtype=pl.Int64))
    seats = timeline.seats - pl.col("num_running_after")
    return (
        missed.sort("queued_us")
        .with_columns(
            late_us=pl.col("arrived_us") - pl.col("end_us"),
            tokens_so_far=pl.col("prompt_tokens").cum_sum().over("step"),
            blocks_so_far=blocks.cum_sum().over("step"),
            place=pl.col("step").cum_count().over("step"),
        )
        .filter(
            (pl.col("tokens_so_far") <= pl.col("remaining_budget"))
            & (pl.col("place") <= seats)
            & (pl.col("blocks_so_far") <= pl.col("kv_blocks_free_after")).fill_null(value=True)
        )
    )


def _handover(timeline: Timeline) -> Handover | None:
    """Return figures about short steps; None if clients send over time, or short steps take little time."""
    if not timeline.closed_workload or not timeline.busy_us:
        return None
    short = short_steps(timeline)
    spent_us = int(short["spent_us"].sum() or 0)
    if spent_us / timeline.busy_us < SLOW_HANDOVER_FRAC:
        return None
    queued = pl.col("queued_us")  # from the first request of a trial in the scheduler to the last one
    handed_over_us = timeline.arrivals.group_by("trial").agg(queued.max() - queued.min())["queued_us"].mean()
    return Handover(
        steps=short.height,
        to_come=int(short["to_come"].max()),  # type: ignore[arg-type]  # an integer column with rows
        spent_ms=spent_us / 1e3,
        spent_frac=spent_us / timeline.busy_us,
        budget_used_frac=float(short["use_frac"].sum()) / short.height,
        handed_over_ms=float(handed_over_us or 0) / 1e3,  # type: ignore[arg-type]  # a mean of integers
    )


def short_steps(timeline: Timeline) -> pl.DataFrame:
    """Return the steps with work that nothing limited except that requests of their trial had not arrived.

    Columns of ``timeline.steps``, ``to_come`` (requests that reached the scheduler after ``schedule()`` had
    returned) and ``spent_us`` (from the step's start to its output).
    """
    arrivals = (
        timeline.new_requests.select(OF_TRIAL, "queued_us")
        .sort("queued_us")
        .with_columns(came=pl.int_range(1, pl.len() + 1).over("of"), all=pl.len().over("of"))
    )
    totals = arrivals[["of", "all"]].unique()
    return (
        timeline.steps.with_columns(OF_TRIAL)
        .sort("end_us")
        .join_asof(
            arrivals[["of", "queued_us", "came"]],
            left_on="end_us",
            right_on="queued_us",
            by="of",
            check_sortedness=False,
        )
        .join(totals, on="of", how="left", maintain_order="left")
        .with_columns(
            to_come=pl.col("all").fill_null(0).cast(pl.Int64) - pl.col("came").fill_null(0),
            spent_us=pl.col("output_us") - pl.col("start_us"),
        )
        .filter(
            (pl.col("to_come") > 0)
            & (pl.col("total_requests") > 0)
            & (pl.col("eligible_after") == 0)
            & (pl.col("remaining_budget") > 0)
            & (pl.col("num_running_after") < timeline.seats)
            & pl.col("spent_us").is_not_null()
        )
        .sort("step")
    )


def _short_frac(finding: Finding) -> float | None:
    """Return the busy time's share in short steps; None if the finding is not about short steps alone."""
    evidence = finding.evidence
    if not isinstance(evidence, LateRequests) or evidence.late_requests or evidence.handover is None:
        return None
    return evidence.handover.spent_frac


RULE = Rule(
    code="arrival-limited",
    summary="steps were small because requests had not reached the scheduler yet; no request was refused",
    needs=frozenset({Fact.TIMES, Fact.QUEUE, Fact.EXITS, Fact.LIVES, Fact.REQUESTS}),
    find=_find,
    quiet=4,
    threshold=Threshold(SLOW_HANDOVER_FRAC, _short_frac),
)
