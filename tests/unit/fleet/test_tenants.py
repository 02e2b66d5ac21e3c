"""The use of engines by tenant: exact parts of small engines, and sums of recorded ones."""

from dataclasses import replace

import polars as pl
import pytest

from schedtrace.errors import UsageError
from schedtrace.fleet.tenants import (
    FURTHER,
    HASHED_IDS,
    NOBODY,
    fleet_tenants,
    parse_tenant_key,
    tenant_fields,
)
from schedtrace.model.causes import Cause
from schedtrace.model.fleet import SummaryTenant, SummaryTenantWait
from schedtrace.model.printable import hashed
from schedtrace.model.trace import Exit, ScheduledRequest
from schedtrace.read.run import read_run
from schedtrace.timeline.charges import FEWEST_STEPS, HEAD_OF_LINE, IDLE_HOLDERS
from schedtrace.timeline.spans import total_us
from schedtrace.timeline.step_time import StepTime
from schedtrace.timeline.timeline import make_timeline
from schedtrace.timeline.window import Window, windowed
from tests import makers
from tests.makers import arrival, finish, step
from tests.samples import FINDINGS
from tests.unit.fleet.conftest import summary
from tests.unit.timeline.test_charges import refusing

RECORDED = [
    "kv-bound",
    "preemption",
    "priority-inversion",
    "head-of-line",
    "other-limit",
    "stall",
    "spec-decode",
]


def at(number, **fields):
    """A step of 1 ms whose batch is on the device for 900 us."""
    return step(number, start=1000 * number, took=100, back=1000, **fields)


def came(name, us=0, **fields):
    return arrival(name, None, queued=us, **fields)


@pytest.fixture
def timeline(tmp_path):
    def make(*lines, **header):
        return make_timeline(read_run(makers.run_folder(tmp_path / "run", *lines, **header)).traces[0])

    return make


def divided(timeline, key="priority", *, is_hashed=False):
    return tenant_fields(timeline, parse_tenant_key(key, is_hashed=is_hashed))


def amounts(fields, name):
    return {tenant.tenant: getattr(tenant, name) for tenant in fields["tenants"]}


def waited(fields):
    return {(wait.waiter, wait.holder): wait.us for wait in fields["tenant_waits"]}


SHARED = [
    at(
        0,
        got={"a": 60, "b": 30},
        new="ab",
        arrived=[came("a", prompt_tokens=60, lora="x"), came("b", prompt_tokens=30, priority=5)],
    ),
    at(
        1,
        got={"a": 1, "b": 1},
        waiting=1,
        running=2,
        ended=Exit("waiting", "break", Cause.MAX_NUM_SEQS, "c"),
        arrived=[came("c", 1000, prompt_tokens=10, priority=5)],
    ),
    at(2, got={"a": 1, "c": 10}, new="c", finished=[finish("b", finished_us=2000, output_tokens=2)]),
    at(3, got={}, finished=[finish(name, finished_us=3000, output_tokens=3) for name in "ac"]),
]
SHARED[1].requests = [ScheduledRequest("a", 60, 1), ScheduledRequest("b", 30, 1)]
SHARED[2].requests = [ScheduledRequest("a", 61, 1), ScheduledRequest("c", 0, 10, "new")]
"""a and b share a step in the ratio 2 to 1, then 1 to 1; c waits for a seat while both hold one each."""


def test_a_step_s_device_time_is_divided_by_its_scheduled_tokens(timeline):
    fields = divided(timeline(*SHARED))
    assert fields["divided_by"] == "scheduled tokens"
    of_a = 600 + 450 + round(900 / 11)
    assert amounts(fields, "device_us") == {"0": of_a, "5": 2700 - of_a}
    assert amounts(fields, "requests") == {"0": 1, "5": 2}
    assert amounts(fields, "prompt_tokens") == {"0": 60, "5": 40}
    assert amounts(fields, "output_tokens") == {"0": 3, "5": 5}


def test_a_step_s_device_time_is_divided_by_the_step_time_model_if_there_is_one(timeline):
    model = StepTime(100.0, 10.0, 0.0, 0.0, steps=20, error_frac=0.0, most_base_us=100.0)
    fields = divided(replace(timeline(*SHARED), longer_step_time=model))
    assert fields["divided_by"] == "step-time model"
    assert amounts(fields, "device_us") == {"0": 585 + 450 + 225, "5": 315 + 450 + 675}


def test_a_wait_for_a_seat_is_divided_among_the_requests_that_have_one(timeline):
    whole = timeline(*SHARED)
    waits = waited(divided(whole))
    us = int(whole.charges["time_us"].sum())
    assert us > 0
    assert waits == {("5", "0"): us // 2, ("5", "5"): us - us // 2}


def test_a_wait_for_the_token_budget_is_divided_by_the_tokens_of_the_step(timeline):
    waits = Exit("waiting", "break", Cause.TOKEN_BUDGET, "c")
    lines = [
        at(0, got={"a": 75, "b": 25}, new="ab", budget=100, ended=waits, waiting=1),
        at(1, got={"a": 1, "b": 1, "c": 10}, new="c"),
    ]
    lines[0].arrived = [came("a", prompt_tokens=75), came("b", prompt_tokens=25, priority=1)]
    lines[0].arrived.append(came("c", prompt_tokens=10, priority=2))
    whole = timeline(*lines)
    us = int(whole.charges["time_us"].sum())
    assert waited(divided(whole)) == {("2", "0"): round(0.75 * us), ("2", "1"): us - round(0.75 * us)}


def test_a_wait_for_kv_blocks_is_divided_by_the_tokens_in_the_cache(timeline):
    full = Exit("waiting", "break", Cause.KV_BLOCKS, "c")
    lines = [
        at(0, got={"a": 79, "b": 19}, new="ab", arrived=[came("a"), came("b", priority=1)]),
        at(1, got={"a": 1, "b": 1}, ended=full, waiting=1, arrived=[came("c", 1000, priority=2)]),
        at(2, got={"a": 1, "b": 1, "c": 10}, new="c"),
    ]
    lines[1].requests = [ScheduledRequest("a", 79, 1), ScheduledRequest("b", 19, 1)]
    whole = timeline(*lines)
    us = int(whole.charges["time_us"].sum())
    assert waited(divided(whole)) == {("2", "0"): round(0.8 * us), ("2", "1"): us - round(0.8 * us)}


def test_a_request_behind_a_refused_head_waits_behind_the_head_s_tenant():
    whole = make_timeline(read_run(FINDINGS / "stall" / "shows").traces[0])
    behind_us = int(whole.charges.filter(pl.col("charge") == HEAD_OF_LINE)["time_us"].sum())
    assert waited(divided(whole, "id:(.)$"))["t", "g"] == behind_us


def test_a_wait_for_idle_holders_is_divided_by_the_blocks_that_they_hold(timeline):
    """``a`` and ``b`` get no token for many steps and hold 30 and 20 blocks."""
    lines = refusing(FEWEST_STEPS, got="")
    lines[0].arrived[0].priority = 3
    whole = timeline(*lines)
    us = whole.charges.filter(pl.col("charge") == IDLE_HOLDERS)["time_us"].sum()
    assert us > 0
    behind_holders = {pair: us for pair, us in waited(divided(whole)).items() if pair[1] != NOBODY}
    assert behind_holders == {("0", "3"): round(0.6 * us), ("0", "0"): us - round(0.6 * us)}


def test_a_wait_for_no_shared_resource_has_no_holder(timeline):
    skipped = Exit("waiting", "continue", Cause.GRAMMAR_PENDING, "c")
    lines = [
        at(0, got={"a": 75}, new="a", exits=[skipped], waiting=1, arrived=[came("a"), came("c", priority=2)]),
        at(1, got={"a": 1, "c": 10}, new="c"),
    ]
    assert {*waited(divided(timeline(*lines)))} == {("2", NOBODY)}


@pytest.mark.parametrize(
    ("key", "tenants"),
    [("adapter", {"x", "(none)"}), ("id:^([ab])", {"a", "b", "(unknown)"}), ("priority", {"0", "5"})],
)
def test_tenants_are_named_by_priority_adapter_or_id(timeline, key, tenants):
    fields = divided(timeline(*SHARED), key)
    assert {*amounts(fields, "requests")} == tenants
    assert fields["tenant_key"] == key


def test_the_header_x_request_id_names_the_tenant_within_vllm_s_id():
    key = parse_tenant_key("id:cmpl-([^.]+)[.]", is_hashed=False)
    ids = ["chatcmpl-acme.7f3e-1a2b3c4d", "cmpl-beta.9-0-1a2b3c4d", "chatcmpl-8f3a-1a2b3c4d"]
    names = key.names(pl.DataFrame({"request_id": ids, "priority": 0, "lora": None}), makers.header())
    assert names.to_list() == ["acme", "beta", "(unknown)"]


def test_hashed_tenants_keep_their_figures_and_lose_their_names(timeline):
    whole = timeline(*SHARED)
    plain, secret = divided(whole, "adapter"), divided(whole, "adapter", is_hashed=True)
    assert {*amounts(secret, "requests")} == {hashed("x"), "(none)"}
    assert amounts(secret, "device_us")[hashed("x")] == amounts(plain, "device_us")["x"]


def test_hashed_ids_name_no_tenant(timeline):
    fields = divided(timeline(*SHARED, hashed_ids=True), "id:^(.)")
    assert {*amounts(fields, "requests")} == {HASHED_IDS}


def test_small_tenants_are_added_up(timeline, monkeypatch):
    monkeypatch.setattr("schedtrace.fleet.tenants.MOST_TENANTS", 1)
    fields = divided(timeline(*SHARED))
    assert amounts(fields, "requests") == {"5": 2, FURTHER: 1} or amounts(fields, "requests") == {
        "0": 1,
        FURTHER: 2,
    }


@pytest.mark.parametrize("key", ["tenant", "id", "id:", "id:(", "priority:x"])
def test_an_unknown_key_is_refused(key):
    with pytest.raises(UsageError, match="--tenant"):
        parse_tenant_key(key, is_hashed=False)


def require_sums(timeline, key):
    fields = divided(timeline, key)
    tenants = fields["tenants"]
    device = timeline.engine_states.filter(pl.col("state") == "device")
    of_waits = timeline.charges.filter(pl.col("charge") != "recompute")["time_us"].sum()
    first = timeline.arrivals.filter(~pl.col("streaming_update"))
    assert sum(each.device_us for each in tenants) == total_us(device)
    assert (
        sum(each.waiting_us + each.running_us + each.front_end_us for each in tenants) == timeline.requests_us
    )
    assert sum(each.requests for each in tenants) == first.height
    assert sum(each.prompt_tokens for each in tenants) == first["prompt_tokens"].sum()
    assert sum(each.output_tokens for each in tenants) == timeline.finishes["output_tokens"].sum()
    assert sum(each.recomputed_tokens for each in tenants) == timeline.steps["recomputed_tokens"].sum()
    assert sum(wait.us for wait in fields["tenant_waits"]) == of_waits
    assert all(wait.us > 0 for wait in fields["tenant_waits"])
    assert all(each.device_us >= 0 for each in tenants)
    return fields


@pytest.mark.parametrize("sample", RECORDED)
def test_the_tenants_of_a_recording_add_up_to_the_whole(sample):
    timeline = make_timeline(read_run(FINDINGS / sample / "shows").traces[0])
    fields = require_sums(timeline, r"id:([0-9a-z])$")
    assert len(fields["tenants"]) > 1
    assert fields["divided_by"] == ("step-time model" if timeline.step_time else "scheduled tokens")


def test_the_tenants_of_a_window_add_up_to_the_window():
    timeline = make_timeline(read_run(FINDINGS / "kv-bound" / "shows").traces[0])
    middle = (timeline.begin_us + timeline.end_us) // 2
    cut = windowed(timeline, Window(begin_us=middle, end_us=timeline.end_us))
    assert 0 < cut.requests_us < timeline.requests_us
    fields = divided(cut, r"id:([0-9a-z])$")
    device = cut.engine_states.filter(pl.col("state") == "device")
    assert sum(each.device_us for each in fields["tenants"]) == total_us(device)
    spent = sum(each.waiting_us + each.running_us + each.front_end_us for each in fields["tenants"])
    assert spent == cut.requests_us


def tenant(name, device_us, **fields):
    zeros = dict.fromkeys(SummaryTenant.__struct_fields__[1:], 0)
    return SummaryTenant(tenant=name, **{**zeros, "device_us": device_us, **fields})


@pytest.fixture
def engines():
    """An engine of four GPUs for an hour, and one of a single GPU."""
    hour = 3_600_000_000
    return {
        "a": summary(
            "a",
            tenant_key="priority",
            divided_by="step-time model",
            gpus=4,
            length_us=hour,
            tenants=[tenant("0", hour // 2, requests=3), tenant("5", hour // 4)],
            tenant_waits=[SummaryTenantWait(waiter="5", holder="0", us=7)],
        ),
        "b": summary(
            "b",
            tenant_key="priority",
            divided_by="scheduled tokens",
            gpus=1,
            length_us=hour,
            tenants=[tenant("0", hour, requests=2)],
            tenant_waits=[
                SummaryTenantWait(waiter="0", holder="5", us=9),
                SummaryTenantWait(waiter="5", holder="0", us=4),
            ],
        ),
    }


def test_a_fleet_s_cost_by_tenant_and_of_idle_devices_is_that_of_its_gpu_hours(engines):
    tenants = fleet_tenants(engines, 2.0)
    costs = {each.tenant: each.cost for each in tenants.tenants}
    assert costs == {"0": pytest.approx(2.0 * (0.5 * 4 + 1)), "5": pytest.approx(2.0 * 0.25 * 4)}
    assert tenants.idle_cost + sum(costs.values()) == pytest.approx(2.0 * (4 + 1))
    assert [(wait.waiter, wait.holder, wait.us) for wait in tenants.waits] == [
        ("5", "0", 11),
        ("0", "5", 9),
    ]
    assert (tenants.by_model, tenants.tenants[0].requests) == (1, 5)
    assert sum(each.device_frac for each in tenants.tenants) == pytest.approx(1.0)


def test_unknown_gpus_have_no_cost_and_a_cost_needs_a_price(engines):
    assert fleet_tenants(engines).tenants[0].cost is None
    engines["b"].gpus = None
    tenants = fleet_tenants(engines, 2.0)
    assert {each.tenant: each.cost for each in tenants.tenants} == {"0": None, "5": pytest.approx(2.0)}
    assert (tenants.gpu_us, tenants.idle_cost) == (None, None)


def test_summaries_that_are_not_divided_have_no_tenants(fleet_of):
    assert fleet_tenants(fleet_of()) is None
