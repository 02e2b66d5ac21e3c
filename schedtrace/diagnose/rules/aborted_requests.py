"""``aborted-requests``: clients gave up requests that were unfinished, so the work for them was wasted.

If a proxy keeps a request open after its client gave up, there is no abort. Only the retry shows it then: the
same prompt arrives again after the client's timeout, while the first request is unfinished.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from typing import Any

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule, Threshold, share_frac
from schedtrace.diagnose.rules.common import advise, step_finding
from schedtrace.diagnose.waits import FOUND_FROM_FRAC
from schedtrace.model.causes import CONNECTOR_CAUSES, WAITING_STATUS_CAUSES
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.aborted_requests import (
    ALIKE,
    FEWEST_ABORTED,
    have_same_age,
    is_aborted,
    sent_again,
)
from schedtrace.timeline.charges import ABORTED_WORK, IDLE_HOLDERS, PARKED_LOADS
from schedtrace.timeline.events import INTERRUPTED
from schedtrace.timeline.frames import RECORDED
from schedtrace.timeline.spans import LENGTH_US, total_us
from schedtrace.timeline.step_time import median
from schedtrace.timeline.timeline import Timeline

SOON_FRAC = 0.1
"""Largest delay of a retry after the abort, as a share of the time that the client had waited."""
MOST_FRAC = 0.5
"""Minimum share of the aborted requests that are sent again from which retries are a pattern."""
ELSEWHERE = (IDLE_HOLDERS, PARKED_LOADS, *map(str, {*CONNECTOR_CAUSES, *WAITING_STATUS_CAUSES.values()}))
"""Charges of waits that the clients' load does not cause; an abort after such a wait is an effect of the
wait."""


class Aborts(Evidence, kw_only=True):
    """All aborted requests."""

    aborted: int
    """Number of aborted requests."""
    requests: int
    """Number of all requests."""
    kept_waiting_ms: float
    """Total time that other requests waited for a limit while the device worked for aborted requests."""
    kept_waiting: int
    """Number of other requests that waited for a limit while the device worked for aborted requests."""
    device_frac: float | None
    """Share of the engine's busy time in which the device worked for aborted requests; None: no model of step
    times.
    """
    computed_tokens: int
    """Number of tokens scheduled for the aborted requests."""
    output_tokens: int
    """Number of output tokens among ``computed_tokens``."""
    median_age_ms: float
    """Median time from arrival to abort."""
    same_age: bool
    """Whether most aborted requests had about the same age when they were aborted."""
    retries: int
    """Number of aborted requests that clients sent again."""
    by_content: bool
    """Whether retries were recognized by the hashes of their prompts."""

    @property
    def again(self) -> bool:
        """Whether clients sent at least half of the aborted requests again soon after the abort."""
        return self.retries >= MOST_FRAC * self.aborted


class SentAgain(Evidence, kw_only=True):
    """Requests that clients sent again while they were unfinished, and that were not aborted."""

    sent_again: int
    """Number of requests that clients sent again while they were unfinished."""
    arrived: int
    """Number of all requests that arrived."""
    after_ms: float
    """Median time from a request to its retry."""
    retry_output_tokens: int
    """Number of output tokens that the engine computed for these requests, without their retries."""
    behind: int
    """Number of other requests that waited for a limit while the device worked for the requests in
    ``sent_again``."""


def _find(timeline: Timeline) -> Findings:
    yield from [*_aborted(timeline)] or _sent_again(timeline)


def _aborted(timeline: Timeline) -> Findings:
    aborted = timeline.finishes.filter(is_aborted())
    if aborted.height < FEWEST_ABORTED:
        return
    requests = timeline.started_requests
    aborted = (
        aborted.join(requests.drop("trial", "step", strict=False), on="request_id", suffix="_of_arrival")
        .with_columns(
            us=pl.coalesce("abort_us", "finished_us"),
            since=pl.coalesce("arrived_us_of_arrival", "queued_us_of_arrival"),
        )
        .with_columns(age=pl.col("us") - pl.col("since"))
        .sort("us", "request_id")
    )
    if aborted.height < FEWEST_ABORTED or not timeline.requests_us:
        return
    theirs = pl.col("request_id").is_in(pl.lit(aborted["request_id"]).implode())
    states = timeline.recorded_states.filter(theirs)
    # What they lost to an interruption is the interruption's: clients that leave meanwhile are its effect.
    of_engine = timeline.interrupted_states.filter(RECORDED).filter(theirs, pl.col("state") != INTERRUPTED)
    effects = timeline.charges.filter(theirs, pl.col("charge").is_in(ELSEWHERE))
    time_us = max(0, total_us(of_engine) - int(effects["time_us"].sum()))
    for_them = timeline.charges.filter(pl.col("charge") == ABORTED_WORK, ~theirs)
    kept_waiting_us, work = int(for_them["time_us"].sum()), timeline.charge_tables.aborted_work
    device_us = float(work.select((LENGTH_US * pl.col("in_vain")).sum()).item() or 0.0)
    share = min(1.0, (time_us + kept_waiting_us) / timeline.requests_us)
    if share < FOUND_FROM_FRAC:
        return
    retries, by_content = _retries(aborted, timeline.first_arrivals)
    ages = aborted["age"]
    middle = median(ages)
    evidence = Aborts(
        aborted=aborted.height,
        requests=requests.height,
        kept_waiting_ms=kept_waiting_us / 1e3,
        kept_waiting=for_them["request_id"].n_unique(),
        device_frac=device_us / timeline.busy_us if device_us and timeline.busy_us else None,
        computed_tokens=int(states["tokens"].sum()),
        output_tokens=int(aborted["output_tokens"].sum()),
        median_age_ms=middle / 1e3,
        same_age=have_same_age(ages),
        retries=len(retries),
        by_content=by_content,
    )
    most = aborted.sort("output_tokens", "request_id", descending=[True, False])
    advice = advise(
        "Let clients wait longer than {median_age_ms:ms}, or send fewer requests at a time: each retry adds "
        "to the load that made it late.",
        evidence,
    )
    yield step_finding(
        timeline,
        aborted,
        evidence,
        title="Clients give up and try again" if evidence.again else "Aborted requests",
        verdict="{aborted:n} of {requests:n request} were aborted[{same_age:?} after {median_age_ms:ms} "
        "each][{again:?}; {retries:n} of them came again at once]: {share:%} of the requests' time was "
        "spent on them[, with {kept_waiting:n other request} that waited meanwhile].",
        share_frac=share,
        tokens=evidence.computed_tokens,
        message="The engine had computed {computed_tokens:n token} for them, {output_tokens:n} of these "
        "output[, which took {device_frac:%} of its busy time]; the median age was {median_age_ms:ms}."
        "[ {kept_waiting:n other request} waited {kept_waiting_ms:ms} for a limit while the device did this "
        "work.]"
        "[ {retries:n} were followed at once by a request with [{by_content:?}the same prompt]"
        "[{by_content:!}a prompt of the same length].]"
        "[{retries:!}{same_age:?} They were of one age, as with a client's timeout.]"
        "[{retries:!}{same_age:!} The trace does not show whether the client left or the front end had "
        "found a stop string.]",
        values={"retry": retries.get(most["request_id"][0])},
        advice=[advice] if evidence.again or evidence.same_age else [],
        example="{request_id:id} was aborted after {age:us} with {output_tokens:n output token}"
        "[ and came again as {retry:id}].",
        cases=most,
    )


def _retries(aborted: pl.DataFrame, arrivals: pl.DataFrame) -> tuple[dict[str, str], bool]:
    """Return the retry of each aborted request (same prompt, soon after), and whether hashes identify it.

    Without recorded hashes, a retry is a request with the same prompt length, ``max_tokens`` and adapter.
    """
    by_content = arrivals["prefix_hashes"].drop_nulls().len() > 0
    waiting: dict[Any, list[tuple[int, str]]] = defaultdict(list)
    for row in arrivals.select("request_id", "queued_us", *ALIKE).iter_rows():
        insort(waiting[row[2:]], (row[1], row[0]))
    retries: dict[str, str] = {}
    for name, us, age, *like in aborted.select("request_id", "us", "age", *ALIKE).iter_rows():
        candidates = waiting[tuple(like)]
        at = bisect_left(candidates, (us, ""))
        if at < len(candidates) and candidates[at][0] - us <= SOON_FRAC * age and candidates[at][1] != name:
            retries[name] = candidates.pop(at)[1]
    return retries, by_content


def _sent_again(timeline: Timeline) -> Findings:
    """Yield the finding about requests that came again while they were unfinished."""
    unfinished = sent_again(timeline)
    if unfinished.is_empty() or not timeline.requests_us:
        return
    theirs = pl.col("request_id").is_in(pl.lit(unfinished["request_id"]).implode())
    for_them = timeline.charges.filter(pl.col("charge") == ABORTED_WORK, ~theirs)
    kept_waiting_us = int(for_them["time_us"].sum())
    theirs_us = total_us(timeline.recorded_states.filter(theirs))
    share = min(1.0, (theirs_us + kept_waiting_us) / timeline.requests_us)
    if share < FOUND_FROM_FRAC:
        return
    evidence = SentAgain(
        sent_again=unfinished.height,
        arrived=timeline.first_arrivals.height,
        after_ms=median(unfinished["age"]) / 1e3,
        retry_output_tokens=int(unfinished["output_tokens"].sum()),
        behind=for_them["request_id"].n_unique(),
    )
    yield step_finding(
        timeline,
        unfinished,
        evidence,
        title="Clients send unfinished requests again",
        verdict="{sent_again:n} of {arrived:n request} came again {after_ms:ms} later (median) while they "
        "were unfinished, and no abort stopped them: {share:%} of the requests' time was spent on them"
        "[, with {behind:n other request} that waited meanwhile].",
        share_frac=share,
        message="{retry_output_tokens:n} output tokens were computed for them. They came again at one age, "
        "as with a client's timeout.",
        advice=[
            advise(
                "Pass a client's disconnect on to vLLM, so that it aborts the request (a proxy or gateway "
                "may keep it open); else let clients wait longer than {after_ms:ms}, or not try again.",
                evidence,
            )
        ],
        example="{request_id:id} came again after {age:us} as {retry:id}.",
        cases=unfinished,
    )


RULE = Rule(
    code="aborted-requests",
    summary="requests were aborted before their end, or clients sent them again while they were unfinished",
    needs=frozenset({Fact.TIMES, Fact.LIVES}),
    find=_find,
    threshold=Threshold(FOUND_FROM_FRAC, share_frac),
)
