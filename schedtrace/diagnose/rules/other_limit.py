"""``other-limit``: requests waited for a limit without a rule of its own; one finding per cause."""

from typing import NamedTuple

import polars as pl

from schedtrace.diagnose.kv_cache import cache_use, kv_tier
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import (
    BATCHED_TOKENS,
    Decodes,
    batched_tokens,
    decodes_of_all,
    more_adapters,
    replay_advice,
)
from schedtrace.diagnose.rules.common import Waited, advise, wait_figures, wait_finding
from schedtrace.diagnose.rules.kv_bound import RULE as KV_BOUND
from schedtrace.diagnose.rules.max_num_seqs_bound import RULE as MAX_NUM_SEQS_BOUND
from schedtrace.diagnose.rules.token_budget_bound import RULE as TOKEN_BUDGET_BOUND
from schedtrace.diagnose.rules.token_budget_bound import more_batched_tokens
from schedtrace.diagnose.waits import Charged, charged, mean, steps_inside, totals
from schedtrace.model.causes import ASKED_FOR, CAUSES, Cause, cause_advice, reason
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Advice, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import CHARGES as NAMED
from schedtrace.timeline.spans import LENGTH_US, merged, overlap_us, total_us
from schedtrace.timeline.step_time import median
from schedtrace.timeline.timeline import Timeline, made_once

SLOW_LOAD = 2.0
"""Minimum ratio of a KV load's time to the time of computing the same tokens at which the load is called
slow."""
MOSTLY = 0.9
"""Minimum share of the waits for a connector's answer that a reason must explain to be stated."""
FEWEST_UNANSWERED = 3
"""Minimum number of requests without an answer at which the connector counts as not answering."""
HAVE_A_RULE = frozenset(
    charge for rule in (KV_BOUND, MAX_NUM_SEQS_BOUND, TOKEN_BUDGET_BOUND) for charge in rule.charges
)
"""Causes that have rules of their own."""


def holder_of(timeline: Timeline, cause: str, waits: Charged) -> Message:  # noqa: PLR0911  # one per cause
    """Return a sentence about the holders, or nothing if the trace does not record them."""
    match cause:
        case Cause.LORA_CAP:
            return _adapters(timeline, waits)
        case Cause.GRAMMAR_PENDING:
            return _grammars(timeline)
        case Cause.MAMBA_ALIGNMENT | Cause.CHUNKED_PREFILL_OFF | Cause.PREFILL_LOOKAHEAD:
            return _budget(waits)
        case Cause.SPEC_DECODE_PADDING:
            return _padded_decodes(timeline)
        case Cause.ENCODER_BUDGET:
            return _encoder(timeline, waits)
        case Cause.REMOTE_KV_PENDING if times := _load_times(timeline):
            return say(
                "{loads:n KV load} began and took {median_us:us} (median)[; {pending:n} never arrived]"
                "[{is_slow:?}; this engine computes as many tokens ({tokens:n}) in about {compute_us:us}].",
                times,
            )
        case Cause.CONNECTOR_UNDECIDED:
            return _undecided(timeline)
        case _:
            return NOTHING


def _adapters(timeline: Timeline, waits: Charged) -> Message:
    """Describe which adapter ran the most in these steps, and which one requests waited for the longest."""
    adapters = timeline.known_requests[["request_id", "lora"]].drop_nulls()
    wanted = totals(waits.rows.join(adapters, on="request_id"), "time_us", by="lora")
    ran = timeline.request_states.filter(pl.col("tokens") > 0).join(adapters, on="request_id")
    held = (
        ran.with_columns(steps=steps_inside(ran, waits.steps))
        .group_by("lora")
        .agg(pl.col("steps").sum(), requests=pl.col("request_id").n_unique())
        .filter(pl.col("steps") > 0)
        .sort("steps", "lora", descending=[True, False])
    )
    if held.is_empty() or wanted.is_empty():
        return NOTHING
    most = timeline.header.settings.get("lora_config.max_loras")
    return say(
        "Adapter {holder:code} ran the most meanwhile ({requests:n request})[, with {slots:n slot} for all]; "
        "{wanted:code} waited the longest.",
        holder=str(held["lora"][0]),
        requests=int(held["requests"][0]),
        slots=int(most or 0),
        wanted=str(wanted["lora"][0]),
    )


def _grammars(timeline: Timeline) -> Message:
    if "grammars" not in timeline.lists:
        return NOTHING
    took = (
        timeline.lists["grammars"]
        .select("request_id", us=pl.col("compiled_us") - pl.col("started_us"))
        .collect()
        .sort("us", descending=True)
    )
    if took.is_empty():
        return NOTHING
    return say(
        "{grammars:n grammar} compiled, {request:id} the longest ({time:us}).",
        grammars=took.height,
        request=str(took["request_id"][0]),
        time=int(took["us"][0]),
    )


def _budget(waits: Charged) -> Message:
    """Describe the part of the steps' budget that running requests left."""
    left, decodes = mean(waits.steps, pl.col("remaining_budget")), mean(waits.steps, pl.col("decode_tokens"))
    budget = mean(waits.steps, pl.col("token_budget"))
    if left is None or decodes is None or not budget:
        return NOTHING
    return say(
        "Decodes take {decodes:n1} of the {budget:n} tokens of such a step; {left:n1} "
        "({share:%}) stay unused.",
        decodes=decodes,
        budget=budget,
        left=left,
        share=left / budget,
    )


def _padded_decodes(timeline: Timeline) -> Message:
    """Describe how many seats' decodes fit into a step's budget; nothing if all of them do."""
    decodes: Decodes = decodes_of_all(timeline)
    budget = timeline.token_budget
    if decodes.total_tokens <= budget:
        return NOTHING
    return say(
        "A decode takes {each:n token}, so {budget:n token} hold those of {held:n} of {seats:n seat}.",
        decodes,
        budget=budget,
        held=budget // decodes.each,
    )


def _encoder(timeline: Timeline, waits: Charged) -> Message:
    free = mean(waits.steps, pl.col("encoder_slots_free"))
    freeable = mean(waits.steps, pl.col("encoder_slots_freeable"))
    size = timeline.header.scheduler_config.get("encoder_cache_size")
    if free is None or freeable is None or not isinstance(size, int):
        return NOTHING
    return say(
        "Meanwhile, of {size:n} encoder cache slots, {held:n} are held by requests in use and {free:n} "
        "are free on average.",
        size=size,
        held=round(size - freeable),
        free=round(free),
    )


class LoadTimes(NamedTuple):
    """Times of KV loads from elsewhere."""

    loads: int
    """Number of loads that began."""
    pending: int
    """Number of loads that began and never arrived."""
    median_us: float
    """Median time of a load."""
    tokens: int
    """Median number of tokens that a load brings; 0 if not recorded."""
    compute_us: float
    """Time in which this engine computes as many prompt tokens, by the model of step times; 0 if unknown."""

    @property
    def is_slow(self) -> bool:
        """Whether a load takes far longer than computing the same tokens."""
        return 0 < SLOW_LOAD * self.compute_us <= self.median_us


def _load_spans(timeline: Timeline) -> pl.DataFrame | None:
    """Return ``request_id``, ``begin_us``, ``end_us`` and ``over_us`` (null: not over) of each KV load.

    None if there are no loads.
    """
    if "kv_loads" not in timeline.lists:
        return None
    loads = timeline.lists["kv_loads"].select("request_id", "event", "at_us").collect()
    begun = loads.filter(pl.col("event") == "begun").unique("request_id", keep="first", maintain_order=True)
    over = loads.filter(pl.col("event") != "begun").group_by("request_id").agg(over_us=pl.col("at_us").min())
    spans = begun.join(over, on="request_id", how="left", maintain_order="left").select(
        "request_id",
        "over_us",
        begin_us="at_us",
        end_us=pl.col("over_us").fill_null(timeline.end_us),
    )
    return None if spans.is_empty() else spans


@made_once
def _load_times(timeline: Timeline) -> LoadTimes | None:
    """Return the times of the KV loads; None if there are none."""
    if (took := _load_spans(timeline)) is None:
        return None
    tokens = 0.0
    if "admitted" in timeline.lists:
        admitted = timeline.lists["admitted"].select("request_id", "external_tokens").collect()
        brought = admitted.join(took, on="request_id", how="semi")["external_tokens"].drop_nulls()
        tokens = median(brought.filter(brought > 0))
    model = timeline.step_time
    return LoadTimes(
        loads=took.height,
        pending=took["over_us"].null_count(),
        median_us=median(took.select(LENGTH_US).to_series()),
        tokens=round(tokens),
        compute_us=tokens * model.per_prefill_token_us if model else 0.0,
    )


@made_once
def _waits_for_loads(timeline: Timeline) -> float | None:
    """Return the share of the waits for the connector's answer in which it loaded KV for another request.

    None if no load is recorded.
    """
    if (loads := _load_spans(timeline)) is None:
        return None
    waits = timeline.request_states.filter(pl.col("cause") == str(Cause.CONNECTOR_UNDECIDED))
    whole_us = total_us(waits)
    return int(overlap_us(waits, merged(loads)).sum()) / whole_us if whole_us else None


class Unanswered(NamedTuple):
    """Requests for which the connector had not answered when they left or the record ended."""

    never: int
    left: int
    """Number of unanswered requests that left before the record ended."""
    longest_us: int
    """Longest time for which a request waited for the connector's answer."""


@made_once
def _unanswered(timeline: Timeline) -> Unanswered | None:
    """Return the requests without an answer; None if there are few or their wait is not most of the waits."""
    states = timeline.request_states
    waits = states.filter(pl.col("cause") == str(Cause.CONNECTOR_UNDECIDED))
    ran = states.filter(pl.col("tokens") > 0)
    never = waits.join(ran, on="request_id", how="anti")
    each = never.group_by("request_id").agg(us=LENGTH_US.sum(), end_us=pl.col("end_us").max())
    if each.height < FEWEST_UNANSWERED or total_us(never) < MOSTLY * total_us(waits):
        return None
    left = each.filter(pl.col("request_id").is_in(timeline.finishes["request_id"].implode())).height
    return Unanswered(each.height, left, int(each["us"].max() or 0))  # type: ignore[arg-type]  # integers


def _undecided(timeline: Timeline) -> Message:
    """Describe whether the connector never answered, or was loading KV for other requests."""
    if (unanswered := _unanswered(timeline)) is not None:
        return say(
            "The connector never answered for {never:n request}: {left:n} left, and the others still waited "
            "when the record ended; the longest wait is {longest_us:us}.",
            unanswered,
        )
    return say(
        "[In {share:%} of that time, the connector loaded KV blocks for another request.]",
        share=share if (share := _waits_for_loads(timeline)) and share >= MOSTLY else None,
    )


class LimitWait(Waited, kw_only=True):
    """Waits for one limit."""

    refused_steps: int
    """Number of steps with an exit that refused or skipped a request for this limit."""
    steps: int
    """Number of all steps."""


def _find(timeline: Timeline) -> Findings:
    causes = timeline.charges["charge"].unique().sort().to_list()
    for cause in [cause for cause in causes if cause not in NAMED and cause not in HAVE_A_RULE]:
        if (waits := charged(timeline, cause)) is not None:
            yield _finding(timeline, cause, waits)


def _finding(timeline: Timeline, cause: str, waits: Charged) -> Finding:
    title = CAUSES[cause].entry.title if cause in CAUSES else ""
    refusals = timeline.exits.filter((pl.col("cause") == cause) & pl.col("refusal"))
    detail = refusals["detail"].drop_nulls().mode().sort().to_list()[:1] or [None]
    stalls = (waits.rows["state"] == "stalled").all()
    why = reason(timeline.header, loop="running" if stalls else "waiting", cause=cause, detail=detail[0])
    advice = _advice(timeline, cause, detail[0]) if refusals.height else []
    if _batches_take_turns(timeline, cause, detail[0]):
        scheduler = timeline.header.scheduler_class
        title = "Batches take turns"
        why = say(
            "their outputs were in flight: unlike vLLM's AsyncScheduler, {scheduler:code} schedules no "
            "request then, so each gets a token in one of {depth:n step}",
            scheduler=scheduler,
            depth=timeline.header.batches_in_flight,
        )
        advice = [
            advise(
                "Derive {scheduler:code} from vLLM's AsyncScheduler; until then, {option} leaves one batch "
                "with all requests",
                scheduler=scheduler,
                option="--no-async-scheduling",
            )
        ]
    return wait_finding(
        timeline,
        waits,
        title=title or "Waiting for {cause:cause}",
        verdict="Requests spent {share:%} of their time waiting because {why} ({cause:cause})."
        if refusals.height
        else "Requests spent {share:%} of their time waiting for something that the trace does not record.",
        holder=_guard(refusals) if cause == Cause.OTHER else holder_of(timeline, cause, waits),
        cause=cause,
        message="{refused_steps:n} of {steps:n step} refused or passed over a request for it; "
        "{requests:n request} waited, {longest_request:id} the longest ({longest_ms:ms}).",
        values={"cause": cause, "why": why},
        advice=advice,
        evidence=LimitWait(
            **wait_figures(waits),
            refused_steps=refusals["step"].n_unique(),
            steps=timeline.steps.height,
        ),
    )


def _batches_take_turns(timeline: Timeline, cause: str, detail: str | None) -> bool:
    """Return whether batches take turns although no pipeline needs that.

    vLLM's ``AsyncScheduler`` schedules a request whose output is in flight. If a scheduler does not, although
    vLLM keeps several batches in flight, the requests split into batches that compute in turn.
    """
    header = timeline.header
    in_flight = (header.batches_in_flight or 1) > 1 and header.pipeline_parallel_size == 1
    return cause == Cause.NO_NEW_TOKENS and detail is None and in_flight and header.async_scheduling is True


def _guard(refusals: pl.DataFrame) -> Message:
    """Return the scheduler's condition that refused most of the requests."""
    guarded = refusals.filter(pl.col("guard").is_not_null() & pl.col("location").is_not_null())
    if guarded.is_empty():
        return NOTHING
    often = (
        guarded.group_by("guard", "location")
        .agg(pl.col("count").sum(), pl.col("values").drop_nulls().mode().sort().first())
        .sort("count", "location", descending=[True, False])
        .row(0, named=True)
    )
    return say(
        "Most often {guard:code} held at {location:code}[, with {values:code}].",
        **{name: often[name] for name in ("guard", "location", "values")},
    )


def _load_advice(timeline: Timeline, cause: str) -> Advice | None:
    """Return advice on the KV connector's loads; None if the trace shows nothing about them."""
    connector = str(timeline.header.settings.get("kv_transfer_config.kv_connector", "the KV connector"))
    if cause == Cause.CONNECTOR_UNDECIDED:
        if _unanswered(timeline) is not None:
            return advise(
                "Find out why {connector} never answers for these requests: it may wait for a store or load "
                "of blocks of theirs that never ends. No setting of the scheduler helps.",
                connector=connector,
            )
        if (_waits_for_loads(timeline) or 0.0) < MOSTLY:
            return None
        return advise(
            "Find out whether {connector} must end one load before it answers about the next request: here, "
            "requests wait for each other's loads.",
            connector=connector,
        )
    # An engine whose prompts another engine computes has no choice but to load.
    times = _load_times(timeline)
    if times is None or not times.is_slow or kv_tier(timeline) is None:
        return None
    return advise(
        "Load only what loads faster than it is computed ({load_us:us} a token against {token_us:us}): from "
        "a faster tier, or let {connector} load less.",
        load_us=times.median_us / times.tokens,
        token_us=times.compute_us / times.tokens,
        connector=connector,
        costs="Steps that compute these prompts delay the decodes.",
    )


def _advice(timeline: Timeline, cause: str, detail: str | None) -> list[Advice]:  # noqa: PLR0911  # one per cause
    """Return advice, with a legal value if there is one; empty if a client requested the wait."""
    if cause in ASKED_FOR or cause == Cause.OTHER:
        return []
    match cause:
        case Cause.LORA_CAP:
            if (more := more_adapters(timeline)) is not None:
                return [more]
        case Cause.SPEC_DECODE_PADDING if detail != "max_model_len":
            decodes = decodes_of_all(timeline)
            if decodes.batched_tokens > batched_tokens(timeline):
                return [more_batched_tokens(timeline, decodes.batched_tokens)]
        case Cause.MAMBA_ALIGNMENT | Cause.PREFILL_LOOKAHEAD | Cause.ENCODER_BUDGET:
            now = batched_tokens(timeline)
            if now and detail != "max_model_len":
                return [_larger_budget(timeline, cause, 2 * now)]
        case Cause.REMOTE_KV_PENDING | Cause.CONNECTOR_UNDECIDED if look := _load_advice(timeline, cause):
            return [look]
        case Cause.CHUNKED_PREFILL_OFF:
            return [
                advise(
                    "{option} (now off): the next prompt then takes what is left of a step's budget",
                    setting="enable_chunked_prefill",
                    value=True,
                    costs="Steps that mix prefills and decodes.",
                )
            ]
    return [Advice(message=cause_advice(timeline.header, cause=cause, detail=detail))]


def _larger_budget(timeline: Timeline, cause: str, tokens: int) -> Advice:
    """Return advice on a larger budget, without a value if prefix caching may become less effective.

    Mamba layers may cache a state only at the end of each chunk, so larger chunks leave fewer states.
    """
    at_chunks = any(group.cache_mode == "align" for group in timeline.header.cache_groups)
    if cause == Cause.MAMBA_ALIGNMENT and at_chunks and cache_use(timeline)["shareable_tokens"].sum() > 0:
        return replay_advice(BATCHED_TOKENS)
    return more_batched_tokens(timeline, tokens)


RULE = Rule(
    code="other-limit",
    summary="requests waited for another limit: LoRA slots, a grammar, a KV transfer, the encoder, ...; one "
    "per cause",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES}),
    find=_find,
    proven=(
        ("chunked_prefill_off", "enable_chunked_prefill"),
        ("encoder_budget", "max_num_batched_tokens"),
        ("lora_cap", "max_loras"),
        ("mamba_alignment", "max_num_batched_tokens"),
    ),
)
