"""Usage of engines by tenant: time, tokens and device time of requests, and waits between tenants.

A tenant is identified by a recorded property of requests: their priority, their adapter, or a part of their
id. Every figure is divided so that the tenants' parts add up to the whole in microseconds and tokens.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl

from schedtrace.errors import UsageError
from schedtrace.model.causes import Cause
from schedtrace.model.fleet import (
    EngineSummary,
    FleetTenant,
    FleetTenants,
    SummaryTenant,
    SummaryTenantWait,
)
from schedtrace.model.printable import hashed
from schedtrace.model.trace import Header
from schedtrace.timeline.charges import (
    ABORTED_WORK,
    HEAD_OF_LINE,
    IDLE_HOLDERS,
    LONG_PROMPT,
    PRIORITY_INVERSION,
    RECOMPUTE,
)
from schedtrace.timeline.engine_states import DEVICE, device_spans
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.spans import LENGTH_US, at_steps, level, merged, overlap_us, time_within, total_us
from schedtrace.timeline.timeline import Timeline, context_tokens

NONE, UNKNOWN, FURTHER, NOBODY = "(none)", "(unknown)", "(further)", "(nobody)"
HASHED_IDS = "(hashed ids)"
"""Tenant of all requests whose recorded ids are hashes, if ids name the tenants."""
MOST_TENANTS = 50
"""Maximum number of an engine's tenants that keep their names, by request time; the others are ``FURTHER``.
"""
RUNS = ("prefill", "decode", "recompute")
HOLDS_SEAT = (*RUNS, "stalled")
US_PER_HOUR = 3.6e9
MODEL, TOKENS = "step-time model", "scheduled tokens"
KEYS = ("priority", "adapter", "id:REGEX")
RESOURCES: dict[str, str] = {
    str(Cause.MAX_NUM_SEQS): "seats",
    str(Cause.KV_BLOCKS): "context",
    str(Cause.PREEMPTED_THIS_STEP): "context",
    str(Cause.STALE_OUTPUT_PENDING): "context",
    str(Cause.TOKEN_BUDGET): "tokens",
    str(Cause.INPUT_BUDGET): "tokens",
    str(Cause.CHUNKED_PREFILL_OFF): "tokens",
    LONG_PROMPT: "tokens",
    IDLE_HOLDERS: "idle blocks",
}
"""Resource of each charge or cause; a wait is divided among the holders by their shares of this resource."""


@dataclass(frozen=True)
class TenantKey:
    """Property of a request that names its tenant."""

    field: str
    """Name of the property: ``priority``, ``adapter`` or ``id``."""
    pattern: str = ""
    """Regular expression whose first group matches the tenant in an id."""
    is_hashed: bool = False
    """Whether tenants are named by hashes."""

    def __str__(self) -> str:
        words = f"{self.field}:{self.pattern}" if self.pattern else self.field
        return f"{words}, hashed" if self.is_hashed else words

    def names(self, requests: pl.DataFrame, header: Header) -> pl.Series:
        """Return the tenant of each row of ``known_requests``."""
        if self.field == "id" and header.hashed_ids:
            return pl.Series("tenant", [HASHED_IDS] * requests.height, dtype=pl.String)
        values = {
            "priority": pl.col("priority").cast(pl.String),
            "adapter": pl.col("lora"),
            "id": pl.col("request_id").str.extract(self.pattern),
        }
        names = requests.select(tenant=values[self.field])["tenant"]
        if self.is_hashed:
            real = names.drop_nulls().unique().to_list()
            names = names.replace({name: hashed(name) for name in real})
        return names.fill_null(NONE if self.field == "adapter" else UNKNOWN)


def parse_tenant_key(text: str, *, is_hashed: bool) -> TenantKey:
    """Return the key that an option names.

    Raises:
        UsageError: If there is no such key, or its regular expression is invalid.
    """
    field, _, pattern = text.partition(":")
    if field == "id" and pattern:
        try:
            pl.Series([""]).str.extract(pattern)
        except pl.exceptions.ComputeError as error:
            msg = f"--tenant {text}: {str(error).splitlines()[0]}"
            raise UsageError(msg) from error
        return TenantKey(field, pattern, is_hashed)
    if text not in KEYS[:-1]:
        msg = f"--tenant {text}: no such property; there are {', '.join(KEYS)}"
        raise UsageError(msg)
    return TenantKey(text, is_hashed=is_hashed)


def gpus_of(header: Header) -> int | None:
    """Return the number of GPUs of an engine, or of one data-parallel rank; None if not recorded."""
    sizes = [
        header.settings.get("parallel_config.tensor_parallel_size"),
        header.pipeline_parallel_size,
        header.settings.get("parallel_config.prefill_context_parallel_size", 1),
    ]
    product = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        product *= size
    return product


def tenant_fields(timeline: Timeline, key: TenantKey) -> dict[str, Any]:
    """Return the fields of an engine's summary that are about tenants."""
    requests = timeline.known_requests
    named = requests.select("request_id").with_columns(key.names(requests, timeline.header).alias("tenant"))
    times = timeline.request_states.group_by("request_id").agg(us=LENGTH_US.sum())
    sums = named.join(times, on="request_id", how="left").group_by("tenant").agg(pl.col("us").sum())
    largest = sums.sort("us", "tenant", descending=[True, False])["tenant"].head(MOST_TENANTS)
    is_large = pl.col("tenant").is_in(largest.implode())
    tenants = named.with_columns(tenant=pl.when(is_large).then("tenant").otherwise(pl.lit(FURTHER)))
    division = _Division(timeline, tenants)
    return {
        "tenant_key": str(key),
        "divided_by": TOKENS if timeline.step_time is None else MODEL,
        "tenants": division.use(),
        "tenant_waits": division.tenant_waits(),
    }


@dataclass
class _Division:
    """Division of one engine's figures among tenants."""

    timeline: Timeline
    tenants: pl.DataFrame
    """Table with ``request_id`` and ``tenant`` of every known request."""

    @cached_property
    def names(self) -> list[str]:
        """Tenants in alphabetical order; ``UNKNOWN``, for unknown requests, is last."""
        return [*sorted({*self.tenants["tenant"]} - {UNKNOWN}), UNKNOWN]

    def _named(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of requests with an added ``tenant`` column."""
        named = rows.join(self.tenants, on="request_id", how="left", maintain_order="left")
        return named.with_columns(pl.col("tenant").fill_null(UNKNOWN))

    def _sums(self, rows: pl.DataFrame, **amounts: pl.Expr) -> dict[str, dict[str, int]]:
        """Return sums over rows of requests, by tenant and name."""
        sums = self._named(rows).group_by("tenant").agg(**amounts).to_dicts()
        return {row.pop("tenant"): row for row in sums}

    def use(self) -> list[SummaryTenant]:
        """Return the usage of each tenant that used the engine."""
        state, timeline = pl.col("state"), self.timeline
        waits, runs = state.is_in([*QUEUED, "stalled"]), state.is_in(RUNS)
        parts = [
            self._sums(
                timeline.recorded_states,
                waiting_us=LENGTH_US.filter(waits).sum(),
                running_us=LENGTH_US.filter(runs).sum(),
                front_end_us=LENGTH_US.filter(~waits & ~runs).sum(),
            ),
            self._sums(
                timeline.arrivals.filter(~pl.col("streaming_update")),
                requests=pl.len(),
                prompt_tokens=pl.col("prompt_tokens").sum(),
            ),
            self._sums(timeline.finishes, output_tokens=pl.col("output_tokens").sum()),
            self._sums(recomputed(timeline), recomputed_tokens=pl.col("recomputed_tokens").sum()),
            {tenant: {"device_us": us} for tenant, us in self.device_us().items()},
        ]
        merged_parts: dict[str, dict[str, int]] = defaultdict(dict)
        for part in parts:
            for tenant, amounts in part.items():
                merged_parts[tenant] |= {name: amount or 0 for name, amount in amounts.items()}
        fields = [name for name in SummaryTenant.__struct_fields__ if name != "tenant"]
        return [
            SummaryTenant(tenant=tenant, **{name: amounts.get(name, 0) for name in fields})
            for tenant, amounts in sorted(merged_parts.items())
            if any(amounts.values())
        ]

    @cached_property
    def tenant_work(self) -> pl.DataFrame:
        """Table with a row per step and per tenant with requests in the step.

        Columns: ``step``, ``place`` (of the tenant in ``names``), ``requests``, ``tokens``, ``prompt``
        (tokens of prompts) and ``context`` (tokens that were computed before the step).
        """
        timeline = self.timeline
        steps = timeline.steps.select("step").sort("step")
        prompts = (
            self._named(timeline.prefills)
            .with_columns(
                prompt=pl.min_horizontal(
                    "scheduled_tokens", pl.col("prompt_tokens") - pl.col("computed_tokens")
                )
            )
            .group_by("step", "tenant")
            .agg(pl.col("prompt").sum())
        )
        tables, is_known = [], pl.col("request_id").is_in(self.tenants["request_id"].implode())
        for place, tenant in enumerate(self.names):
            ids = self.tenants.filter(pl.col("tenant") == tenant)["request_id"]
            is_own = pl.col("request_id").is_in(ids.implode())
            own = timeline.stretches.filter(is_own | ~is_known if tenant == UNKNOWN else is_own)
            counts = level(
                own, "step", pl.col("last_step") + 1, requests=pl.lit(1), tokens=pl.col("scheduled_tokens")
            )
            tables.append(
                at_steps(counts, steps)
                .with_columns(context_tokens(own, steps)["context_tokens"].alias("context"))
                .filter(pl.col("requests") > 0)
                .join(prompts.filter(pl.col("tenant") == tenant).drop("tenant"), on="step", how="left")
                .select(
                    "step",
                    pl.lit(place).alias("place"),
                    *(pl.col(name).cast(pl.Float64) for name in ("requests", "tokens", "context")),
                    pl.col("prompt").fill_null(0).cast(pl.Float64),
                )
            )
        return pl.concat(tables).sort("step", "place")

    def device_us(self) -> dict[str, int]:
        """Return the device time of each tenant; the sum equals that of ``engine_states``.

        A step's time is divided in proportion to the times that the step-time model gives for each tenant's
        tokens and context, plus the tenant's part of the constant time, which is divided by numbers of
        requests. Without a model, a step's time is divided in proportion to the scheduled tokens.
        """
        engine = self.timeline.engine_states.filter(pl.col("state") == DEVICE)
        spans = merged(device_spans(self.timeline.steps))
        times = spans.with_columns(us=overlap_us(spans, engine)).group_by("step").agg(pl.col("us").sum())
        model, weight = self.timeline.step_time, pl.col("tokens")
        if model is not None:
            weight = (
                model.base_us * pl.col("requests") / pl.col("requests").sum().over("step")
                + model.per_prefill_token_us * pl.col("prompt")
                + model.per_decode_token_us * (pl.col("tokens") - pl.col("prompt"))
                + model.per_context_token_us * pl.col("context")
            )
            weight = pl.when(weight.sum().over("step") > 0).then(weight).otherwise("tokens")
        rows = self.tenant_work.with_columns(weight=weight).join(times, on="step").sort("step", "place")
        ends = pl.col("weight").cum_sum().over("step")
        shares = rows.with_columns(end=(pl.col("us") * (ends / ends.last().over("step"))).round())
        parts = shares.with_columns(part=pl.col("end") - pl.col("end").shift(1).over("step").fill_null(0))
        sums = parts.group_by("place").agg(pl.col("part").sum().cast(pl.Int64))
        by_tenant = {self.names[place]: us for place, us in sums.iter_rows()}
        rest = total_us(engine) - sum(by_tenant.values())  # of steps whose requests are not recorded
        return {**by_tenant, UNKNOWN: by_tenant.get(UNKNOWN, 0) + rest}

    def tenant_waits(self) -> list[SummaryTenantWait]:
        """Return the charged time of all waits, by the tenants of waiting requests and of holders."""
        rows = self._named(self.timeline.charges.filter(pl.col("charge") != RECOMPUTE))
        by_cause = pl.col("charge").is_in([PRIORITY_INVERSION, ABORTED_WORK])
        rows = rows.with_columns(reason=pl.when(by_cause).then("cause").otherwise("charge"))
        waits: list[tuple[str, str, int]] = []
        for (reason,), part in rows.group_by("reason", maintain_order=True):
            if reason == HEAD_OF_LINE:
                held_up = self.timeline.charge_tables.held_up.select("request_id", head="head")
                heads = held_up.unique("request_id", keep="last")
                of_head = self.tenants.select(head="request_id", holder="tenant")
                held = part.join(heads, on="request_id", how="left").join(of_head, on="head", how="left")
                held = held.select("tenant", pl.col("holder").fill_null(UNKNOWN), "time_us")
            elif str(reason) in RESOURCES:
                held = self._divided(part, self._shares(RESOURCES[str(reason)]))
            else:
                held = part.select("tenant", holder=pl.lit(NOBODY), us="time_us")
            waits += held.iter_rows()
        return _longest_first(waits)

    def _divided(self, rows: pl.DataFrame, shares: pl.DataFrame) -> pl.DataFrame:
        """Return the waits, divided by the tenants' shares of a resource in the steps of each wait.

        Args:
            rows: Rows of the charges, with ``tenant``.
            shares: ``begin_us``, ``end_us`` and a cumulated share for each place in ``names``.
        """
        places = [*map(str, range(len(self.names)))]
        within = time_within(rows, shares, {place: pl.col(place) for place in places})
        scale = pl.col("time_us") / LENGTH_US
        ends = pl.concat([rows, within], how="horizontal").with_columns(
            (pl.col(place) * scale).fill_nan(0).round().cast(pl.Int64).clip(0, pl.col("time_us"))
            for place in places
        )
        parts, before = [], pl.lit(0)
        for place, name in zip(places, self.names, strict=True):
            parts.append(ends.select(waiter="tenant", holder=pl.lit(name), us=pl.col(place) - before))
            before = pl.col(place)
        parts.append(ends.select(waiter="tenant", holder=pl.lit(NOBODY), us=pl.col("time_us") - before))
        return pl.concat(parts).group_by("waiter", "holder").agg(pl.col("us").sum())

    def _shares(self, resource: str) -> pl.DataFrame:
        """Return the cumulative shares of the tenants in each step.

        Args:
            resource: ``seats``, ``idle blocks``, ``context`` (tokens in the KV cache) or ``tokens``.
        """
        if resource == "seats":  # running requests when the step begins
            rows = self._named(self.timeline.recorded_states)
            holding = rows.filter(pl.col("state").is_in(HOLDS_SEAT) & (LENGTH_US > 0))
            steps = self.timeline.steps.select("step", "start_us").drop_nulls().sort("start_us")
            tables = []
            for place, tenant in enumerate(self.names):
                levels = level(holding.filter(pl.col("tenant") == tenant), amount=pl.lit(1)).select(
                    "at", "amount"
                )
                tables.append(
                    steps.join_asof(levels, left_on="start_us", right_on="at")
                    .filter(pl.col("amount") > 0)
                    .select("step", pl.lit(place).alias("place"), pl.col("amount").cast(pl.Float64))
                )
            amounts = pl.concat(tables)
        elif resource == "idle blocks":
            idle = self._named(self.timeline.charge_tables.idle_holders)
            blocks = idle.group_by("first_step", "last_step", "tenant").agg(pl.col("blocks").sum())
            places = pl.DataFrame({"tenant": self.names, "place": [*range(len(self.names))]})
            in_steps = blocks.join(places, on="tenant").with_columns(
                step=pl.int_ranges("first_step", pl.col("last_step") + 1)
            )
            amounts = (
                in_steps.explode("step")
                .group_by("step", "place")
                .agg(amount=pl.col("blocks").sum().cast(pl.Float64))
                .with_columns(pl.col("place").cast(pl.Int32))
            )
        else:
            own = {"context": pl.col("context") + pl.col("tokens"), "tokens": pl.col("tokens")}[resource]
            amounts = self.tenant_work.select("step", "place", amount=own)
        return self._cumulated(amounts)

    def _cumulated(self, amounts: pl.DataFrame) -> pl.DataFrame:
        """Return the spans of the steps with the cumulative shares of the tenants in an amount."""
        steps = self.timeline.steps.drop_nulls("start_us").select(
            "step",
            begin_us="start_us",
            end_us=pl.col("start_us").shift(-1).fill_null(self.timeline.end_us),
        )
        share = pl.col("amount") / pl.col("amount").sum().over("step")
        wide = amounts.with_columns(share=share.fill_nan(0)).pivot("place", index="step", values="share")
        held = steps.join(wide, on="step", how="left", maintain_order="left")
        columns = [str(place) for place in range(len(self.names))]
        absent = [pl.lit(0.0).alias(name) for name in columns if name not in held.columns]
        filled = held.with_columns(*absent).with_columns(pl.col(columns).fill_null(0.0))
        totals = [pl.sum_horizontal(columns[: place + 1]).clip(0, 1) for place in range(len(columns))]
        named = (total.alias(name) for total, name in zip(totals, columns, strict=True))
        return filled.select("begin_us", "end_us", *named)


def recomputed(timeline: Timeline) -> pl.DataFrame:
    """Return ``request_id`` and ``recomputed_tokens`` of each stretch that computed lost tokens again."""
    its = pl.col("request_id").is_in(timeline.losses["request_id"].unique().implode())
    rows = timeline.with_work(timeline.stretches.filter(its).collect()).filter(pl.col("work") == "recompute")
    steps = pl.col("last_step") - pl.col("step") + 1
    end = pl.min_horizontal(pl.col("computed_tokens") + steps * pl.col("scheduled_tokens"), "lost_tokens")
    return rows.select("request_id", recomputed_tokens=end - pl.col("computed_tokens"))


def fleet_tenants(
    engines: Mapping[str, EngineSummary], price_per_gpu_hour: float | None = None
) -> FleetTenants | None:
    """Return the usage of a fleet by tenant; None if its summaries are not divided by tenant."""
    summaries = [summary for summary in engines.values() if summary.tenant_key]
    if not summaries:
        return None
    per_us = None if price_per_gpu_hour is None else price_per_gpu_hour / US_PER_HOUR
    tenants = sorted(_added_up(summaries, per_us), key=lambda tenant: (-tenant.device_us, tenant.tenant))
    gpu_us = _gpu_us((summary.length_us, summary.gpus) for summary in summaries)
    used_us = sum(tenant.gpu_us or 0 for tenant in tenants)
    return FleetTenants(
        key=summaries[0].tenant_key,
        tenants=tenants,
        waits=_longest_first(
            (wait.waiter, wait.holder, wait.us) for summary in summaries for wait in summary.tenant_waits
        ),
        by_model=sum(summary.divided_by == MODEL for summary in summaries),
        price_per_gpu_hour=price_per_gpu_hour,
        gpu_us=gpu_us,
        idle_cost=None if gpu_us is None or per_us is None else (gpu_us - used_us) * per_us,
    )


def _added_up(summaries: Sequence[EngineSummary], per_us: float | None) -> Iterator[FleetTenant]:
    """Yield the sums for each tenant over all engines."""
    whole_us = sum(tenant.device_us for summary in summaries for tenant in summary.tenants)
    by_tenant: dict[str, list[tuple[SummaryTenant, int | None]]] = defaultdict(list)
    for summary in summaries:
        for tenant in summary.tenants:
            by_tenant[tenant.tenant].append((tenant, summary.gpus))
    amounts = [name for name in SummaryTenant.__struct_fields__ if name != "tenant"]
    for name, parts in by_tenant.items():
        sums = {amount: sum(getattr(part, amount) for part, _ in parts) for amount in amounts}
        gpu_us = _gpu_us((part.device_us, gpus) for part, gpus in parts)
        yield FleetTenant(
            tenant=name,
            **sums,
            device_frac=sums["device_us"] / whole_us if whole_us else 0.0,
            gpu_us=gpu_us,
            cost=None if gpu_us is None or per_us is None else gpu_us * per_us,
        )


def _gpu_us(times: Iterable[tuple[int, int | None]]) -> int | None:
    """Return the sum of times, each multiplied by its engine's number of GPUs; None if any is unknown."""
    total = 0
    for us, gpus in times:
        if gpus is None:
            return None
        total += us * gpus
    return total


def _longest_first(waits: Iterable[tuple[str, str, int]]) -> list[SummaryTenantWait]:
    """Return waiting time by waiter and holder, the longest first.

    Args:
        waits: Waiter, holder and microseconds of each wait.
    """
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for waiter, holder, us in waits:
        sums[waiter, holder] += us
    ordered = sorted(sums.items(), key=lambda entry: (-entry[1], entry[0]))
    return [SummaryTenantWait(waiter=waiter, holder=holder, us=us) for (waiter, holder), us in ordered if us]
