"""Offered load and served load of an engine: rates, the backlog, and what sets the pace."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import polars as pl

from schedtrace.diagnose.stuck_requests import GONE
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.say import say
from schedtrace.timeline.frames import NOT_RECORDED
from schedtrace.timeline.spans import LENGTH_US, level
from schedtrace.timeline.timeline import Timeline, made_once
from schedtrace.workloads.clients import Clients, clients_of

BURST_FRAC, DONE_FRAC = 0.9, 0.1
"""Shares that define requests that come all at once: at least ``BURST_FRAC`` of a trial's requests arrive
within the first ``DONE_FRAC`` of its steps."""
FEWEST = 8
"""Minimum number of requests of a trial from which a rate is computed."""
BEYOND_FRAC = 0.10
"""Minimum share by which the offered load exceeds the served one if the backlog grows; less may be chance."""
PARTS = 3
"""Number of parts of the arrival period; a growing backlog must grow from each part to the next."""
GROWS_FRAC = 0.2
"""Minimum growth of the backlog from the second to the last part, as a share; in the first part, the backlog
of an empty engine always grows."""
BURST = 2
"""Minimum mean number of requests in a busy period for busy periods to be reported."""
IDLE_FRAC = 0.5
"""Minimum share of idle time for an engine to count as waiting for its clients."""
LEAST_IDLE_FRAC = 0.05
"""Maximum share of idle time at which an engine sets the pace; a more idle engine could have taken more work.
"""
THINKS_MS = 1.0
FEWEST_EVEN, EVEN = 20, 0.3
"""Minimum number of gaps between even arrivals, and maximum ratio of the gaps' standard deviation to their
mean; the ratio of independent arrivals is 1."""
GIVEN_UP_FRAC = 0.1
"""Minimum share of requests that clients gave up at which an engine counts as not keeping up."""
NEARLY_ALL = 0.95
"""Minimum share of requests with a single output token for a description of the load to mention them."""
ROOM_FRAC = 0.9
"""Maximum share of the working time that the work takes in steps as full as the fullest one, for the summary
to mention it."""


@dataclass(frozen=True)
class OfferedLoad:
    """Offered load, from the first arrival to the last, and served load, from the first answer to the last.

    A run's throughput is lower than the served load, because it also covers the time until the first answer.
    """

    pace: Literal["at_once", "answers", "clock", "unknown"]
    """Trigger of requests: the start of the trial, earlier answers, or times of their own. ``unknown``: too
    few requests, or not all of them are in the trace."""
    working_frac: float
    """Share of the time in which the engine had work."""
    clients: Clients | None = None
    """Pattern in which requests follow answers; None if they arrive at times of their own or all at once."""
    latency_ms: float | None = None
    """Median time from a request to its answer, if requests follow answers."""
    rounds: "Rounds | None" = None
    """Figures about rounds; None unless requests follow answers in a pattern other than ``loop``."""
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    """Offered tokens per second: uncached prompt tokens, and output tokens."""
    served_requests_per_s: float | None = None
    served_tokens_per_s: float | None = None
    grows: bool = False
    """Whether more load was offered than served, and the backlog grew throughout."""
    backlog: int = 0
    """Number of requests in the scheduler when the last request arrived."""
    busy_periods: int = 0
    """Number of periods with requests, separated by periods without any."""
    requests_per_busy_period: float = 0.0
    fullest: int = 0
    """Number of requests in the fullest step."""
    at_fullest_frac: float | None = None
    """Share of the time that the same work would take in steps as full as the fullest one; None without a
    model.
    """
    every_us: float | None = None
    """Median time between two arrivals if they come evenly; None if they do not."""
    gave_up_frac: float = 0.0
    """Share of the requests whose clients disconnected before the answer."""
    one_token: bool = False
    """Whether requests come in rounds and nearly all of them generate a single token."""

    @property
    def keeps_up(self) -> bool:
        """Whether the engine keeps up with the offered load: no growing backlog, and few clients give up."""
        return not self.grows and self.gave_up_frac < GIVEN_UP_FRAC

    @property
    def beyond_frac(self) -> float:
        """Excess of the offered over the served request rate, as a share; 0 if the backlog does not grow."""
        if not self.grows or not self.requests_per_s or not self.served_requests_per_s:
            return 0.0
        return self.requests_per_s / self.served_requests_per_s - 1

    @property
    def think_ms(self) -> float | None:
        """Median time from an answer to the next request of the same client."""
        if self.clients is None or not self.clients.think_us:
            return None
        return median(self.clients.think_us) / 1e3

    @property
    def thinks_frac(self) -> float:
        """Ratio of think time to latency; infinite if requests do not follow answers."""
        return (self.think_ms or 0.0) / self.latency_ms if self.latency_ms else math.inf

    @property
    def summary(self) -> Message:
        """Sentence about the pattern of the load; empty if there is no pattern."""
        if self.pace == "answers":
            return say("{client_words}; the engine {works}.", self)
        if self.pace != "clock":
            return NOTHING
        if self.grows:
            return say(
                "Offered {offered} from the first arrival to the last, served {served} from the first answer "
                "to the last: the backlog grew to {backlog:n request}.",
                self,
                served=_rates(self.served_requests_per_s, self.served_tokens_per_s),
            )
        return say(
            "Offered {offered}[, one request every {every_us:us}][{keeps_up:?}, and the engine keeps up: it "
            "{works}][{keeps_up:!}; clients gave up {gave_up_frac:%} of the requests]."
            "[{every_us:?} A client with a fixed rate, or a router before the engine, sets this pace.]",
            self,
        )

    @property
    def throughput_note(self) -> Message:
        """Sentence saying that clients set the throughput if the engine idled at times; else ``summary``."""
        if self.pace != "clock" or not self.keeps_up or self.working_frac >= 1 - LEAST_IDLE_FRAC:
            return self.summary
        words = "The clients set the throughput: they offer {offered}, and the engine keeps up: it {works}."
        return say(words, self)

    @property
    def offered(self) -> Message:
        """Description of the offered load: ``149 requests/s (19,000 tokens/s)``."""
        return _rates(self.requests_per_s, self.tokens_per_s)

    @property
    def client_words(self) -> Message:
        """Phrase such as ``2 clients with one request open each, sent 300 ms after the previous answer``."""
        if self.clients is None:
            return NOTHING
        think_ms, words = self.think_ms or 0.0, CLIENT_WORDS[self.clients.pattern]
        values = {
            "thinks": think_ms >= THINKS_MS,
            "time": round(1e3 * think_ms),
            "one_token": self.one_token,
        }
        return say(words, self.clients, **{name: values[name] for name in values if f"{{{name}:" in words})

    @property
    def works(self) -> Message:
        """Phrase such as ``works 9 % of the time, in 10 busy periods of 8 requests each``."""
        detail = NOTHING
        if self.requests_per_busy_period >= BURST and self.working_frac <= IDLE_FRAC:
            detail = say(
                ", in {busy_periods:n busy period} of {requests_per_busy_period:n1} requests on average", self
            )
        elif self.at_fullest_frac is not None and self.at_fullest_frac < ROOM_FRAC * self.working_frac:
            sentence = "; in steps as full as its fullest ({fullest:n request}) the same work takes {share:%}"
            detail = say(sentence, self, share=self.at_fullest_frac)
        return say("works {share:%} of the time{detail}", share=self.working_frac, detail=detail)


@made_once
def offered_load(timeline: Timeline) -> OfferedLoad:
    """Return the load of one engine, as far as its trace shows it."""
    spent = timeline.engine_states.select(
        LENGTH_US.filter(pl.col("state") == "idle").sum().alias("idle"),
        LENGTH_US.filter(pl.col("state") != NOT_RECORDED).sum().alias("all"),
    ).row(0)
    working = 1 - spent[0] / spent[1] if spent[1] else 0.0
    requests = _requests(timeline)
    arrived = requests.filter("came").drop("came")
    if timeline.closed_workload or came_at_once(timeline):
        return OfferedLoad("at_once", working)
    largest = max(requests.partition_by("trial"), key=lambda rows: rows.height, default=requests)
    if timeline.requests_missing or largest.height < FEWEST:
        return OfferedLoad("unknown", working)
    clients = clients_of(*(largest[name].to_list() for name in ("came_us", "gone_us", "gave_up")))
    latency_us = largest.select((pl.col("gone_us") - pl.col("came_us")).median()).item()
    latency_ms = None if clients is None else latency_us / 1e3
    if clients is None or not clients.is_replayed:
        load = _by_clock(timeline, arrived, requests, working)
        return replace(load, clients=clients, latency_ms=latency_ms)
    if clients.pattern == "loop":
        return OfferedLoad("answers", working, clients, latency_ms)
    fullest, at_fullest = _at_fullest(timeline, working)
    outputs = timeline.finishes["output_tokens"].drop_nulls()
    nearly_all = (outputs == 1).sum() >= NEARLY_ALL * max(1, outputs.len())
    only_prefills = timeline.header.settings.get("kv_transfer_config.kv_role") == "kv_producer"
    return OfferedLoad(
        "answers",
        working,
        clients,
        latency_ms,
        rounds_of(largest, min(clients.clients, timeline.seats or clients.clients)),
        fullest=fullest,
        at_fullest_frac=at_fullest,
        one_token=clients.pattern == "barrier" and nearly_all and not only_prefills,
    )


CLIENT_WORDS = {
    "loop": "{clients:n client} with one request open each, sent "
    "[{thinks:?}{time:us} (median)][{thinks:!}right] after the previous answer",
    "barrier": "{clients:n request} at once[{one_token:?}, each for one token], and the next ones "
    "[{thinks:?}{time:us} (median) after all are done][{thinks:!}when all are done]",
    "limit": "a queue in front of the engine that keeps at most {clients:n request} open",
    "sessions": "{clients:n session} with one request open each, sent {time:us} (mean) after the previous "
    "answer",
    "retries": "{clients:n request} repeated {time:us} (median) after being given up",
}
"""Phrases for the patterns of clients."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of requests, each of which starts when the previous round is done."""

    rounds: int
    empty_frac: float
    """Mean share of a round's places (or of the seats if these are fewer) that are empty until the round's
    last request is done."""


def rounds_of(requests: pl.DataFrame, places: int) -> Rounds:
    """Return the number of rounds, and the share of their places that stays empty.

    Args:
        requests: Times at which each request came and left: ``came_us``, ``gone_us``.
        places: Number of requests in a round, or number of seats if that is smaller.
    """
    open_us = requests.select(begin_us="came_us", end_us="gone_us", requests=1).drop_nulls().cast(pl.Int64)
    times = level(open_us, requests="requests").filter(pl.col("requests") > 0)
    length = pl.col("until") - pl.col("at")
    taken, whole = times.select(
        taken=(length * pl.min_horizontal("requests", places)).sum(), whole=length.sum()
    ).row(0)
    begun = requests.sort("came_us").select(
        (pl.col("came_us") >= pl.col("gone_us").cum_max().shift(1)).fill_null(value=True).sum()
    )
    return Rounds(int(begun.item()), 1 - taken / (places * whole) if whole else 0.0)


def came_at_once(timeline: Timeline) -> bool:
    """Return whether nearly all requests of each trial arrived before its work had really begun.

    False for a trace that begins with requests, because the start of its work is unknown.
    """
    if timeline.present.height:
        return False
    first_parts = timeline.new_requests
    early = []
    for trial in timeline.trials():
        steps, arrivals = timeline.trial_rows(timeline.steps, trial), timeline.trial_rows(first_parts, trial)
        if steps.is_empty() or arrivals.is_empty():
            continue
        done = steps["start_us"][int(DONE_FRAC * (steps.height - 1))]
        early.append(float((arrivals["queued_us"] <= done).mean() or 0.0))
    return bool(early) and min(early) >= BURST_FRAC


def _requests(timeline: Timeline) -> pl.DataFrame:
    """Return the times at which each request arrived and left, by trial, and its tokens.

    ``came``: the request arrived in this trace; ``answered``: it was not aborted and did not fail;
    ``gave_up``: its client went away.
    """
    ends = timeline.finishes.unique("request_id", keep="last").select(
        "request_id",
        "finished_us",
        "output_tokens",
        "cached_tokens",
        answered=~pl.col("status").is_in(GONE),
        gave_up=(pl.col("status") == "ABORTED") & ~pl.col("in_schedule"),
    )
    return (
        timeline.started_requests.join(ends, on="request_id", how="left", maintain_order="left")
        .select(
            "trial",
            came_us=pl.coalesce("arrived_us", "queued_us"),
            gone_us="finished_us",
            answered=pl.col("answered").fill_null(value=False),
            gave_up=pl.col("gave_up").fill_null(value=False),
            tokens=pl.col("prompt_tokens")
            + pl.col("output_tokens")
            - pl.col("cached_tokens").fill_null(0).clip(0),
            came=~pl.col("request_id").is_in(pl.lit(timeline.present["request_id"]).implode()),
        )
        .drop_nulls("came_us")
    )


def _by_clock(
    timeline: Timeline, arrived: pl.DataFrame, requests: pl.DataFrame, working: float
) -> OfferedLoad:
    ended = requests.filter("answered")
    offered, served = _per_s(arrived, "came_us"), _per_s(ended, "gone_us")
    if offered is None or served is None:
        return OfferedLoad("unknown", working)
    each = arrived["tokens"].mean()
    done = timeline.steps.select(pl.col("used_tokens").sum() - pl.col("recomputed_tokens").fill_null(0).sum())
    parts, backlog = _backlogs(timeline, arrived)
    fullest, at_fullest = _at_fullest(timeline, working)
    gaps = arrived.sort("trial", "came_us").select(us=pl.col("came_us").diff().over("trial")).drop_nulls()
    count, mean, deviation, middle = gaps.select(
        pl.len(), mean=pl.col("us").mean(), deviation=pl.col("us").std(), median=pl.col("us").median()
    ).row(0)
    is_even = count >= FEWEST_EVEN and mean > 0 and deviation <= EVEN * mean
    in_order = arrived.sort("came_us").with_columns(gone=pl.col("gone_us").cum_max().shift(1))
    periods = 1 + in_order.filter(pl.col("came_us") > pl.col("gone")).height
    return OfferedLoad(
        "clock",
        working,
        requests_per_s=offered,
        tokens_per_s=None if each is None else offered * float(each),  # type: ignore[arg-type]  # numbers
        served_requests_per_s=served,
        served_tokens_per_s=served * done.item() / ended.height,
        grows=offered > (1 + BEYOND_FRAC) * served
        and parts[0] < parts[1]
        and parts[-1] > (1 + GROWS_FRAC) * parts[1],
        backlog=backlog,
        busy_periods=periods,
        requests_per_busy_period=arrived.height / periods,
        fullest=fullest,
        at_fullest_frac=at_fullest,
        every_us=float(middle) if is_even else None,
        gave_up_frac=float(requests["gave_up"].mean() or 0.0),  # type: ignore[arg-type]  # of booleans
    )


def _per_s(requests: pl.DataFrame, column: str) -> float | None:
    """Return the number of events per second, from each trial's first event to its last."""
    spans = requests.group_by("trial").agg(us=pl.col(column).max() - pl.col(column).min(), more=pl.len() - 1)
    us, more = (int(spans[name].sum()) for name in ("us", "more"))
    return 1e6 * more / us if us and more else None


def _at_fullest(timeline: Timeline, working: float) -> tuple[int, float | None]:
    """Return the number of requests in the fullest step, and the share of time that such steps would need."""
    steps = timeline.steps.filter(pl.col("total_requests") > 0)["total_requests"]
    fullest = int(steps.max() or 0)  # type: ignore[arg-type]  # a column of integers
    if timeline.step_time is None or not fullest:
        return fullest, None
    saved_us = timeline.step_time.base_us * (steps.len() - int(steps.sum()) / fullest)
    return fullest, working * (1 - min(1.0, saved_us / timeline.busy_us))


def _backlogs(timeline: Timeline, arrived: pl.DataFrame) -> tuple[list[float], int]:
    """Return the backlog: its mean in each part of the arrival period, and its last value.

    Only the first trial counts, because each trial begins anew. If a part has no step, the means show no
    growth.
    """
    first = arrived.filter(pl.col("trial").eq_missing(pl.lit(arrived["trial"][0])))
    begin, end = int(first["came_us"].min()), int(first["came_us"].max())  # type: ignore[arg-type]  # integers
    there = timeline.trial_rows(timeline.steps, arrived["trial"][0]).filter(
        pl.col("start_us").is_between(begin, end)
    )
    each = there.select(
        part=((pl.col("start_us") - begin) * PARTS // (end - begin + 1)),
        requests=pl.col("num_running_after") + pl.col("num_waiting_after").fill_null(0),
    )
    means = each.group_by("part").agg(pl.col("requests").mean()).sort("part")["requests"].to_list()
    last = each["requests"][-1] if each.height else 0
    return (means if len(means) == PARTS else [0.0] * PARTS), int(last or 0)


def load_of_all(loads: Sequence[OfferedLoad]) -> Message:
    """Describe the load of several engines; empty if any does not keep up, or its load is unknown."""
    if any(load.pace != "clock" or not load.keeps_up or load.requests_per_s is None for load in loads):
        return NOTHING
    requests = sum(load.requests_per_s or 0.0 for load in loads)
    tokens = sum(load.tokens_per_s or 0.0 for load in loads)
    every = [load.every_us for load in loads if load.every_us]
    return say(
        "Offered {offered}[, to each engine one request every {every:us}], and the engines keep up."
        "[{every:?} A client with a fixed rate, or a router or load balancer before the engines, sets this "
        "pace.]",
        offered=_rates(requests, tokens or None),
        every=median(every) if len(every) == len(loads) else None,
    )


def _rates(requests_per_s: float | None, tokens_per_s: float | None) -> Message:
    tokens = NOTHING
    if tokens_per_s is not None:
        tokens = say(" ({tokens:n} tokens/s)", tokens=float(tokens_per_s))
    return say("{requests:n} requests/s{tokens}", requests=requests_per_s, tokens=tokens)
