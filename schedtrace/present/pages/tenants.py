"""Sections of a fleet's page about tenants: use and cost, and waits of one tenant behind another."""

from collections.abc import Iterator

from schedtrace.model.fleet import FleetTenant, FleetTenants, SummaryTenantWait
from schedtrace.model.message import Message
from schedtrace.model.printable import integer, number, percent
from schedtrace.model.say import say
from schedtrace.present.sections import Field, Section, basis_note, figure_field, table

MOST_TENANTS, MOST_WAITS = 10, 8


def tenant_sections(tenants: FleetTenants, engines: int) -> Iterator[Section]:
    """Yield the use of a fleet by tenant, and who waited behind whom.

    Args:
        tenants: Use by tenant.
        engines: Number of engines.
    """
    fields: list[Field[FleetTenant]] = [
        Field("tenant", lambda tenant: tenant.tenant),
        figure_field("req.", lambda tenant: integer(tenant.requests)),
        figure_field("waiting\ns", lambda tenant: number(tenant.waiting_us / 1e6)),
        figure_field("running\ns", lambda tenant: number(tenant.running_us / 1e6)),
        figure_field("prompt\ntokens", lambda tenant: integer(tenant.prompt_tokens)),
        figure_field("output\ntokens", lambda tenant: integer(tenant.output_tokens)),
        figure_field("recom-\nputed", lambda tenant: integer(tenant.recomputed_tokens)),
        figure_field("device\ns", lambda tenant: number(tenant.device_us / 1e6)),
        figure_field("share", lambda tenant: percent(tenant.device_frac)),
    ]
    if tenants.price_per_gpu_hour is not None:
        fields.append(figure_field("cost", lambda tenant: number(tenant.cost)))
    yield table(tenants.tenants, fields, most=MOST_TENANTS)
    yield basis_note("Tenants:", _division(tenants, engines))
    if tenants.waits:
        yield table(tenants.waits, _wait_fields(tenants.waits), most=MOST_WAITS)


def _wait_fields(waits: list[SummaryTenantWait]) -> list[Field[SummaryTenantWait]]:
    whole = sum(wait.us for wait in waits)
    return [
        Field("requests of", lambda wait: wait.waiter),
        Field("waited for what was held by", lambda wait: wait.holder),
        figure_field("s", lambda wait: number(wait.us / 1e6)),
        figure_field("share", lambda wait: percent(wait.us / whole)),
    ]


def _division(tenants: FleetTenants, engines: int) -> Message:
    """Return a sentence about the key, the weights of the division, and the cost of idle devices."""
    return say(
        "named by {key:code}; device time is divided {way}.[ {cost}]",
        key=tenants.key,
        way=_way(tenants.by_model, engines),
        cost=_idle(tenants),
    )


def _way(by_model: int, engines: int) -> Message:
    if by_model in (0, engines):
        return say("by the scheduled tokens") if not by_model else say("by a fitted step-time model")
    return say(
        "by a fitted step-time model on {by_model:n engine}, by the scheduled tokens on {rest:n}",
        by_model=by_model,
        rest=engines - by_model,
    )


def _idle(tenants: FleetTenants) -> Message | str:
    if tenants.price_per_gpu_hour is None:
        return ""
    if tenants.idle_cost is None:
        return say("The GPUs of some engines are not recorded, so their cost is unknown.")
    return say(
        "The time in which no batch ran costs {idle:n} more, at {price:n2} per GPU hour.",
        idle=tenants.idle_cost,
        price=tenants.price_per_gpu_hour,
    )
