"""Facts that findings about waits share: requests, times and steps of a charge, and who caused it.

Waiting requests would often have been served at once without the requests ahead (``behind_whom``). Requests
are divided into kinds by a recorded property: whether they arrived together, or their adapter, priority, API
server, prefix or size. A load of a single kind cannot be divided, nor can a load whose kinds have similar
needs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from schedtrace.diagnose.kv_cache import most_blocks
from schedtrace.model.causes import Cause
from schedtrace.model.message import Count, Message
from schedtrace.model.report import Advice, Finding
from schedtrace.model.say import say
from schedtrace.timeline.charges import SHORT_FRAC
from schedtrace.timeline.spans import LENGTH_US, level, steps_of
from schedtrace.timeline.step_time import median
from schedtrace.timeline.timeline import Timeline

FOUND_FROM_FRAC = 0.01
"""Minimum share of the requests' time for a finding; a smaller share hardly affects latencies."""


@dataclass(frozen=True)
class Charged:
    """Time that is charged to some causes."""

    rows: pl.DataFrame
    """Rows of ``timeline.charges``."""
    time_us: int
    share_frac: float
    """Share of all requests' time."""
    requests: int
    """Number of requests that waited, or recomputed tokens, because of the causes."""
    longest_us: int
    longest_id: str
    """Request that waited longest in total because of the causes."""
    steps: pl.DataFrame
    """Steps of ``timeline.steps`` in which the requests waited."""


def charged(timeline: Timeline, *charges: str) -> Charged | None:
    """Return the time charged to these causes; None below ``FOUND_FROM_FRAC`` of the requests' time."""
    time_us = sum(timeline.charge_tables.charged_us.get(str(charge), 0) for charge in set(charges))
    if not timeline.requests_us or time_us / timeline.requests_us < FOUND_FROM_FRAC:
        return None
    rows = timeline.charges.filter(pl.col("charge").is_in([str(charge) for charge in charges]))
    each = totals(rows, "time_us")
    return Charged(
        rows=rows,
        time_us=time_us,
        share_frac=time_us / timeline.requests_us,
        requests=each.height,
        longest_us=int(each["time_us"][0]),
        longest_id=str(each["request_id"][0]),
        steps=steps_of(timeline.steps, rows),
    )


def totals(rows: pl.DataFrame, amount: str, by: str = "request_id") -> pl.DataFrame:
    """Return the sum of an amount for each request (or another key), the largest first."""
    return rows.group_by(by).agg(pl.col(amount).sum()).sort(amount, by, descending=[True, False])


class ClassTime(msgspec.Struct, kw_only=True):
    """Priority class, with the mean number of its requests that got tokens in some steps."""

    priority: int
    """Priority; lower is more urgent."""
    running: float
    """Mean number of requests of this class that got tokens."""


def running_classes(timeline: Timeline, steps: pl.DataFrame) -> list[ClassTime]:
    """Return the priority classes of requests that got tokens in these steps, the most urgent first."""
    asked = timeline.known_requests[["request_id", "priority"]]
    ran = timeline.request_states.filter(pl.col("tokens") > 0).join(asked, on="request_id")
    inside = ran.with_columns(steps=steps_inside(ran, steps))
    each = inside.group_by("priority").agg(pl.col("steps").sum()).sort("priority")
    return [
        ClassTime(priority=priority, running=count / max(1, steps.height))
        for priority, count in each.iter_rows()
        if count
    ]


def steps_inside(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.Series:
    """Return the number of these steps that each row with ``begin_step`` and ``end_step`` covers."""
    numbers = steps["step"]
    first = numbers.search_sorted(rows["begin_step"], side="left").cast(pl.Int64)
    last = numbers.search_sorted(rows["end_step"], side="right").cast(pl.Int64)
    return pl.Series(last - first).clip(0)


def mean(rows: pl.DataFrame, value: pl.Expr) -> float | None:
    """Return the mean over the rows that have a value."""
    average = rows.select(value.cast(pl.Float64).mean()).item()
    return None if average is None else float(average)


FEWEST_AT_ONCE = 8
DENSER = 10
"""Factor by which requests that arrive together are closer in time than all requests are on average; in a
Poisson stream, eight requests are practically never so close."""
LEAST_FRAC = 0.1
"""Minimum share of the requests with the same adapter, priority etc. for these to be a kind, and of the
waiting requests that must wait behind the holders."""
MOST_FRAC = 0.8
"""Minimum share of the waiters' waiting time in that of all requests except the holders."""
HALF = 0.5
"""Minimum share of the waiters' whole time that they spent behind the holders."""

ROOM: dict[str, Callable[[Timeline], int]] = {
    str(Cause.MAX_NUM_SEQS): lambda timeline: timeline.seats,
    str(Cause.TOKEN_BUDGET): lambda timeline: timeline.token_budget,
    str(Cause.KV_BLOCKS): lambda timeline: (timeline.header.kv_blocks_total or 0) - 1,
}
"""Function that returns the total amount of a resource that requests share, by the cause of waits for it."""
OF_KIND = ("lora", "priority", "client_index", "prefix")
OF_SIZE = ("prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Behind:
    """Requests of one kind that waited behind requests of another kind."""

    trait: str
    """Property that the holders have in common: ``at_once``, or a member of ``OF_KIND`` or ``OF_SIZE``."""
    value: str | int | None
    """Value of the property if it is in ``OF_KIND``; otherwise None."""
    waiters: int
    wait_us: int
    """Total time that the waiters waited behind the holders."""
    of_wait_frac: float
    """``wait_us`` as a share of all time that requests waited for this limit."""
    share_frac: float
    """``wait_us`` as a share of the total time of all requests."""
    holders: int
    waiter_tokens: float
    """Median number of prompt tokens of a waiter."""
    holder_tokens: float
    endless: int = 0
    """Number of holders that ended at their limit of output tokens; 0 if less than half of them did, or
    if all holders had higher limits than the other requests, so that their lengths were foreseeable."""
    endless_tokens: int = 0
    """Median number of output tokens of the holders that ended at their limit."""
    longest_tokens: int = 0
    """Maximum number of output tokens of a request that is not a holder."""
    held_frac: float = 0.0
    """Share of all requests' running time that was the holders'."""


def behind_whom(timeline: Timeline, waits: Charged) -> Behind | None:
    """Return a division into two kinds, one of which explains most of the other's waiting; else None.

    Without the holders, the waiters would have been served at once, because they are few or small enough:
    when each of them arrived, the earlier waiters that would still have run left room for it. The holders
    arrived together, or need at least four times as much as the other requests, on average.
    """
    limits = waits.rows.filter(pl.col("charge").is_in([*ROOM]))["charge"]
    if limits.is_empty():
        return None
    limit = str(limits[0])  # a finding is about one
    room = ROOM[limit](timeline)
    requests = _requests(timeline, waits.rows.filter(pl.col("charge") == limit), limit)
    if requests.is_empty() or requests["demand"].has_nulls():
        return None
    best: Behind | None = None
    for trait, value, holds in _kinds(requests):
        split = _behind(requests.with_columns(holds=holds), trait, room)
        if split is None or split[1] < FOUND_FROM_FRAC * timeline.requests_us:
            continue
        waiters, wait_us = split
        if best is None or wait_us > best.wait_us:
            best = Behind(
                trait=trait,
                value=value,
                waiters=waiters.height,
                wait_us=wait_us,
                of_wait_frac=wait_us / waits.time_us,
                share_frac=wait_us / timeline.requests_us,
                holders=int(holds.sum()),
                waiter_tokens=median(waiters["prompt_tokens"]),
                holder_tokens=median(requests.filter(holds)["prompt_tokens"]),
                **(_endless(requests, holds) if trait == "output_tokens" else {}),
            )
    return best


def _endless(requests: pl.DataFrame, holds: pl.Series) -> dict[str, Any]:
    """Return the fields of ``Behind`` about holders that ended at their limit; empty if few did.

    Also empty if all holders had higher limits than the other requests.
    """
    held, rest = requests.filter(holds), requests.filter(~holds)
    capped = held.filter("capped")
    limits = pl.concat([held, rest])["max_tokens"]
    told_apart = not limits.has_nulls() and held["max_tokens"].min() > rest["max_tokens"].max()  # type: ignore[operator]  # integers
    if told_apart or capped.height < HALF * held.height:
        return {}
    return {
        "endless": capped.height,
        "endless_tokens": round(median(capped["output_tokens"])),
        "longest_tokens": rest["output_tokens"].max() or 0,
        "held_frac": requests.select(pl.col("runs_us").filter(holds).sum() / pl.col("runs_us").sum()).item(),
    }


def _requests(timeline: Timeline, waits: pl.DataFrame, limit: str) -> pl.DataFrame:
    """Return requests: traits, ``us`` (arrival), ``wait_us``, ``life_us``, ``runs_us``, ``demand``, ``work``.

    ``demand`` is the amount of the limited resource that a request occupies for ``runs_us``; ``work`` is its
    total need.
    """
    computes = pl.col("state").is_in(
        ["prefill", "recompute"] if limit == Cause.TOKEN_BUDGET else ["prefill", "recompute", "decode"]
    )
    lives = timeline.recorded_states.group_by("request_id").agg(
        life_us=LENGTH_US.sum(), runs_us=LENGTH_US.filter(computes).sum()
    )
    waited = waits.group_by("request_id").agg(wait_us=pl.col("time_us").sum())
    outputs = timeline.finishes.group_by("request_id").agg(
        pl.col("output_tokens").max(), capped=(pl.col("status") == "LENGTH_CAPPED").any()
    )
    tokens = pl.col("prompt_tokens") + pl.col("output_tokens").fill_null(0)
    demand, work = {
        str(Cause.TOKEN_BUDGET): (pl.col("prompt_tokens"), pl.col("prompt_tokens")),
        str(Cause.KV_BLOCKS): (
            tokens.map_batches(lambda lengths: most_blocks(timeline.header, lengths), return_dtype=pl.Int64),
            tokens,
        ),
    }.get(limit, (pl.lit(1), pl.col("runs_us")))
    return (
        timeline.started_requests
        # Whoever comes during a step is let in after it: at once, whenever the client sent it.
        .with_columns(us=pl.coalesce("arrived_us", "queued_us"))
        .sort("us", maintain_order=True)
        .select(
            "request_id",
            "prompt_tokens",
            "max_tokens",
            "us",
            *OF_KIND[:-1],
            prefix=pl.col("prefix_hashes").str.head(4),
            seen=pl.col("step"),
        )
        .join(lives, on="request_id", maintain_order="left")
        .join(waited, on="request_id", how="left", maintain_order="left")
        .join(outputs, on="request_id", how="left", maintain_order="left")
        .with_columns(
            pl.col("wait_us").fill_null(0),
            pl.col("capped").fill_null(value=False),
            demand=demand,
            work=work,
        )
    )


def _kinds(requests: pl.DataFrame) -> Iterator[tuple[str, str | int | None, pl.Series]]:
    """Yield each trait and value, with a mask of the requests that have this value."""
    # Requests that one step saw first, and that arrived much closer together than average.
    us = pl.col("us").max() - pl.col("us").min()
    usual_us = requests.select(us / pl.len()).item()
    groups = requests.group_by("seen").agg(
        at_once=(pl.len() >= FEWEST_AT_ONCE) & (DENSER * us <= usual_us * pl.len())
    )
    seen = requests.join(groups, on="seen", how="left", maintain_order="left", nulls_equal=True)
    yield "at_once", None, seen["at_once"]
    for trait in OF_KIND:
        counts = requests[trait].value_counts().sort("count", trait, descending=[True, False])
        if counts.height > 1:
            for value, count in counts.iter_rows():
                if count >= LEAST_FRAC * requests.height:
                    yield (
                        trait,
                        value,
                        requests[trait].eq_missing(pl.Series([value], dtype=requests[trait].dtype)),
                    )
    for trait in OF_SIZE:
        if (least := _long_from(requests[trait])) is not None:
            yield trait, None, (requests[trait] >= least).fill_null(value=False)


def _long_from(tokens: pl.Series) -> int | None:
    """Return the smallest size in the group of large sizes; None if the sizes do not form two groups."""
    values = tokens.drop_nulls().sort()
    if values.is_empty() or values[0] == values[-1]:
        return None
    logs = values.cast(pl.Float64).clip(1).log()
    cuts = pl.DataFrame({"at": pl.int_range(1, values.len(), eager=True), "value": values[1:]}).filter(
        values[1:] > values[:-1]
    )
    below = logs.cum_sum().gather(cuts["at"] - 1)
    above = float(logs.sum()) - below
    # Where the means of both sides are furthest apart, weighted by their sizes (Otsu's method).
    apart = below**2 / cuts["at"] + above**2 / (values.len() - cuts["at"])
    at = int(cuts["at"][apart.arg_max() or 0])
    if SHORT_FRAC * median(values[at:]) < median(values[:at]):
        return None
    return int(values[at])


def _behind(requests: pl.DataFrame, trait: str, room: int) -> tuple[pl.DataFrame, int] | None:
    """Return the waiters and their total waiting time; None if holders do not explain most of the waits."""
    held, rest = requests.filter("holds"), requests.filter(~pl.col("holds"))
    waited_us = int(rest["wait_us"].sum())
    if held.is_empty() or not waited_us:
        return None
    larger = float(rest["work"].mean() or 0) <= SHORT_FRAC * float(held["work"].mean() or 0)  # type: ignore[arg-type]  # numbers
    if not (larger or trait == "at_once"):
        return None
    there = level(rest, "us", pl.col("us") + pl.col("runs_us"), there="demand")
    waiters = rest.join_asof(there, left_on="us", right_on="at").filter(
        (pl.col("there") <= room) & (pl.col("wait_us") > 0)
    )
    wait_us = int(waiters["wait_us"].sum())
    if wait_us < MOST_FRAC * waited_us or wait_us < HALF * int(waiters["life_us"].sum()):
        return None
    if waiters.height < LEAST_FRAC * requests.filter(pl.col("wait_us") > 0).height:
        return None
    return waiters, wait_us


def with_holders(timeline: Timeline, finding: Finding, behind: Behind) -> Finding:
    """Add a sentence about such waits to the finding: as its verdict if most waits are such, else its holder.

    The advice against such waits comes first if it concerns more of the requests' time than the limit's own
    advice would gain. No gain is stated for this advice.
    """
    who_waited = sentence(behind)
    leads = behind.of_wait_frac >= MOST_FRAC
    changed = msgspec.structs.replace(
        finding,
        verdict=who_waited if leads else finding.verdict,
        holder=finding.verdict if leads else who_waited,
        advice=[*finding.advice, _advice(timeline, behind)],
    )
    if finding.gain is None or finding.gain.saved_frac < behind.share_frac:
        changed.advice = [changed.advice[-1], *finding.advice]
        changed.gain = None
    return changed


def sentence(behind: Behind) -> Message:
    """Describe such waits: ``24 shorter requests waited 2.7 s on average behind 80 that came at once``."""
    shorter = behind.waiter_tokens <= SHORT_FRAC * behind.holder_tokens
    return say(
        "{waiters} waited {time:us} on average behind {holders:n} {kind}"
        "[{shorter:?} (prompts of {waiter:n} and {holder:n token} at the median)].",
        behind,
        waiters=Count(behind.waiters, "shorter request" if shorter else "request"),
        time=behind.wait_us / behind.waiters,
        kind=_kind(behind),
        shorter=shorter,
        waiter=round(behind.waiter_tokens),
        holder=round(behind.holder_tokens),
    )


def _kind(behind: Behind) -> Message:
    value = behind.value
    if behind.trait == "lora":
        return say("for adapter {name:code}", name=str(value)) if value else say("without an adapter")
    return {
        "at_once": say("that came at once"),
        "priority": say("of priority {value:n}", value=value),
        "client_index": say("from API server {value:n}", value=value),
        "prefix": say("that begin alike") if value else say("that share no prefix"),
        "prompt_tokens": say("with long prompts"),
        "output_tokens": say(
            "with long outputs[: {endless:n} of these ended only at their limit ({endless_tokens:n token}, "
            "the other requests after {longest_tokens:n} at most), and they took {held_frac:%} of the "
            "running time]",
            behind,
            endless=behind.endless or None,
        ),
    }[behind.trait]


def _advice(timeline: Timeline, behind: Behind) -> Advice:
    if behind.endless:  # whoever sends such a request does not know that it will be long
        return Advice(
            message=say(
                "{option:setting} below {endless_tokens:n} in the requests, and a look at the answers that "
                "reach it: some may repeat themselves",
                behind,
                option="max_tokens",
            ),
            costs=say("Longer answers are cut off."),
        )
    return Advice(
        message=say(
            "[{policy:setting} with ]more urgent priorities for the {waiters:n}, or an engine of their own",
            behind,
            policy=""
            if timeline.header.scheduler_config.get("policy") == "priority"
            else "--scheduling-policy priority",
        ),
        costs=say("The other {holders:n} wait longer.", behind),
    )
