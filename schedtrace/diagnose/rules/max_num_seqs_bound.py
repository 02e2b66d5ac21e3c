"""``max-num-seqs-bound``: requests waited for one of the seats of running requests."""

import polars as pl

from schedtrace.diagnose.gains import peak_requests, with_more_running
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import (
    BATCHED_TOKENS,
    LONG_PREFILL,
    kv_space,
    most_seats,
    seats_cost,
    seats_setting,
    threshold,
)
from schedtrace.diagnose.rules.common import (
    WAITED,
    Waited,
    advise,
    by_class,
    listed,
    wait_figures,
)
from schedtrace.diagnose.rules.full_device import limit_finding
from schedtrace.diagnose.settings import capped_steps
from schedtrace.diagnose.waits import Charged, ClassTime, charged, mean, running_classes, steps_inside
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Message, Setting
from schedtrace.model.report import Advice
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

LEAST_TIMES = 1.1
"""Minimum factor by which advice raises the seats; a smaller rise is not worth a restart."""
CAPPED_TIMES = 2.0
"""Minimum ratio of the steps with capped chunks to the full steps for the same tokens at which the cap is
named."""
FULLEST_FRAC = 0.1
"""Share of the steps, those with the fullest KV cache, that ``seats_that_fit`` leaves out."""


class Seats(Waited, kw_only=True):
    """Waits for a seat, the requests that had seats, and the resources that were free."""

    refused_steps: int
    """Number of steps in which requests waited for a seat."""
    steps: int
    """Number of all steps."""
    seats: int
    """``max_num_seqs``."""
    decoding: float | None
    """Mean number of requests that decoded in the steps with waits for a seat."""
    prefilling: float | None
    """Mean number of requests that prefilled or recomputed."""
    without_tokens: float | None
    """Mean number of requests that had a seat but got no tokens."""
    mean_blocks_free_frac: float | None
    """Mean share of the KV blocks that were free."""
    mean_budget_left_frac: float | None
    """Mean share of the token budget that was left."""
    seats_that_fit: int | None
    """Number of requests for which the KV cache has room: ``seats / (1 - share of free KV blocks)``, with the
    share that at least nine tenths of the steps with waits for a seat had free."""
    capped_steps: int | None
    """Number of steps in which ``long_prefill_token_threshold`` made chunks smaller and left budget; None
    unless more requests with seats prefilled than decoded, and full steps would have been at most half as
    many."""
    full_steps: int | None
    """Number of full steps for the same tokens as in ``capped_steps``; None if that is None."""
    classes: list[ClassTime]
    """Priority classes of the requests that got tokens in the steps with waits for a seat."""


def _find(timeline: Timeline) -> Findings:
    waits = charged(timeline, *RULE.charges)
    if waits is None:
        return
    evidence = _evidence(timeline, waits)
    free = [
        say("{share:%} of the {resource}", share=max(0.0, frac), resource=resource)
        for frac, resource in (
            (evidence.mean_blocks_free_frac, "KV blocks"),
            (evidence.mean_budget_left_frac, "token budget"),
        )
        if frac is not None
    ]
    advice = _advice(timeline, evidence)
    gain = None
    if advice and advice[0].value:  # else more seats alone gain nothing, or another setting comes first
        gain = with_more_running(timeline, waits, pl.lit(advice[0].value))
    yield limit_finding(
        timeline,
        waits,
        title="Too few seats" if evidence.capped_steps is None else "Capped prefill chunks hold the seats",
        verdict="{seats:n seat} ({option}) limit this run: requests spent {share:%} of their time "
        "waiting for one{free}.",
        values={
            "option": seats_setting(timeline),
            "free": say(", while {parts} stayed free", parts=listed(free)) if free else NOTHING,
        },
        holder=_holder(evidence),
        gain=gain,
        limit=Cause.MAX_NUM_SEQS,
        message="All seats were taken in {refused_steps:n} of {steps:n step}; " + WAITED,
        advice=advice,
        evidence=evidence,
    )


def _evidence(timeline: Timeline, waits: Charged) -> Seats:
    steps = waits.steps
    free = pl.col("kv_blocks_free_after") / pl.col("kv_blocks_total")
    states = timeline.request_states.filter(pl.col("tokens") > 0)
    decodes, prefills = (
        None
        if steps.is_empty()
        else float(steps_inside(states.filter(pl.col("state").is_in(of)), steps).sum()) / steps.height
        for of in (["decode"], ["prefill", "recompute"])
    )
    least_free = steps.select(free).to_series().quantile(FULLEST_FRAC, "lower")
    fit = None
    if least_free is not None and least_free < 1:
        fit = int(timeline.seats / (1 - least_free))
    capped = capped_steps(timeline)
    holds = (prefills or 0) > (decodes or 0) and capped.steps >= CAPPED_TIMES * max(1, capped.full_steps)
    return Seats(
        **wait_figures(waits),
        refused_steps=steps.height,
        steps=timeline.steps.height,
        seats=timeline.seats,
        decoding=decodes,
        prefilling=prefills,
        without_tokens=mean(steps, pl.col("num_running_after") - pl.col("total_requests")),
        mean_blocks_free_frac=mean(steps, free),
        mean_budget_left_frac=mean(steps, pl.col("remaining_budget") / pl.col("token_budget")),
        seats_that_fit=fit,
        capped_steps=capped.steps if holds else None,
        full_steps=capped.full_steps if holds else None,
        classes=running_classes(timeline, steps),
    )


def _holder(evidence: Seats) -> Message:
    parts = [
        say("{count:n1} decode", count=evidence.decoding or 0),
        say("{count:n1} prefill", count=evidence.prefilling or 0),
    ]
    idle = evidence.without_tokens or 0
    if idle >= 0.05 * evidence.seats:  # a twentieth of the seats
        parts.append(say("{count:n1} got no token", count=idle))
    return say(
        "Of the {seats:n seat}, {parts} on average, in the {refused_steps:n} of {steps:n step} in which "
        "requests waited for one[{mixed:?}: {by_class}].[ {threshold:setting} made their chunks smaller in "
        "{capped_steps:n step}; full steps would have needed {full_steps:n} for the same tokens.]",
        evidence,
        parts=listed(parts),
        threshold=LONG_PREFILL.name,
        mixed=len(evidence.classes) > 1,
        by_class=by_class(evidence.classes),
    )


def _advice(timeline: Timeline, evidence: Seats) -> list[Advice]:
    advice = []
    partial_prefills = timeline.header.scheduler_config.get("max_num_partial_prefills", 1)
    # vLLM sets a threshold of its own where several prompts may prefill at once.
    if evidence.capped_steps is not None and partial_prefills <= 1:
        advice.append(
            advise(
                "{option} {value:n}, no limit (now {now:n}): prompts then take the budget that is left",
                setting="long_prefill_token_threshold",
                value=0,
                now=threshold(timeline),
                costs="Longer steps: requests that decode beside a long prompt wait longer for each token.",
            )
        )
    wanted, most = peak_requests(timeline), most_seats(timeline)
    fit = evidence.seats_that_fit or wanted
    value = min(wanted, most, fit)
    if value < LEAST_TIMES * timeline.seats:
        return advice + _other_limit_first(timeline, fit=fit, most=most, wanted=wanted)
    seats = advise(
        "{option} {value:n} (now {seats:n}): {wanted:n request} were present at once[, and the KV cache "
        "has room for about {fit:n}]",
        seats=timeline.seats,
        wanted=wanted,
        fit=evidence.seats_that_fit,
        setting=timeline.seats_name,
        value=value,
        costs=seats_cost(timeline),
    )
    return [*advice, seats]


def _other_limit_first(timeline: Timeline, *, fit: int, most: int, wanted: int) -> list[Advice]:
    """Return the advice to raise another limit together with the seats, if seats alone have no effect."""
    option, costs = seats_setting(timeline), seats_cost(timeline)
    if fit < LEAST_TIMES * timeline.seats:
        total, value = timeline.header.kv_blocks_total, min(wanted, most)
        blocks = -(-total * value // fit) if total and fit and value > timeline.seats else None
        advice = advise(
            "{space} together with {option}[ {seats_then:n}] (now {seats:n}): at its fullest the KV cache "
            "has room for about {fit:n request}",
            space=kv_space(timeline, blocks),
            option=option,
            seats_then=None if blocks is None else value,
            seats=timeline.seats,
            fit=fit,
            costs=costs,
        )
    elif most <= timeline.seats:
        advice = advise(
            "a larger {limit} together with {option} (both {seats:n} now): vLLM accepts no more seats",
            limit=Setting("--max-num-seqs") if timeline.active_limit else BATCHED_TOKENS,
            option=option,
            seats=timeline.seats,
            costs=costs,
        )
    else:
        return []
    return [advice]


RULE = Rule(
    code="max-num-seqs-bound",
    summary="requests waited for a seat (max_num_seqs)",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES}),
    find=_find,
    charges=(str(Cause.MAX_NUM_SEQS),),
    proven=(
        ("max_num_seqs", "max_num_active_seqs"),
        ("max_num_seqs", "max_num_seqs"),
    ),
)
