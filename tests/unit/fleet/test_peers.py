"""Engines that differ from their peers, and the causes."""

import pytest

from schedtrace.fleet.peers import compare_peers, quietness, step_time_ratios
from schedtrace.model.fleet import SummaryPace
from tests.unit.fleet.conftest import US, summary


def kinds(fleet):
    return {each.engine: (each.kind, each.where) for each in compare_peers(fleet).differences}


def test_healthy_engines_are_not_accused(fleet_of):
    comparison = compare_peers(fleet_of())
    assert comparison.differences == []
    [group] = comparison.groups
    assert (group.engines, group.compared, group.even_load, group.even_capacity) == (9, True, True, True)


@pytest.mark.parametrize(
    ("fields", "kind", "where"),
    [
        ({"us_per_step": 13_000.0}, "slow-steps", "engine"),
        ({"shares": {("waiting", "kv_blocks"): 0.4}, "kv_blocks": 110}, "smaller-limit", "engine"),
        ({"shares": {("stalled", "kv_blocks"): 0.4}, "kv_blocks": 110}, "smaller-limit", "engine"),
        ({"shares": {("waiting", "max_num_seqs"): 0.4}, "max_num_seqs": 8}, "smaller-limit", "engine"),
        ({"shares": {("waiting", "kv_blocks"): 0.4}}, "unexplained", "engine"),
        ({"shares": {("interrupted", None): 0.2}}, "interrupted", "engine"),
        ({"shares": {("waiting", "paused"): 0.2}}, "interrupted", "engine"),
        ({"shares": {("between_steps", None): 0.2}}, "slow-host-work", "engine"),
        ({"requests": 301}, "more-load", "router"),
        ({"arrived_tokens": 40_000}, "more-load", "router"),
        ({"quiet_us": 4 * US}, "no-arrivals", "client"),
    ],
)
def test_each_cause_is_told_from_the_others(fleet_of, fields, kind, where):
    assert kinds(fleet_of(bad=summary("bad", **fields))) == {"bad": (kind, where)}


@pytest.mark.parametrize(
    "fields",
    [
        {"us_per_step": 10_300.0},  # 3 % slower
        {"kv_blocks": 110},  # smaller, and nobody waits for it
        {"kv_blocks": 1000, "shares": {("waiting", "kv_blocks"): 0.04}},
        {"shares": {("waiting", "max_num_seqs"): 0.12}},  # a burst
        {"requests": 111},
        {"quiet_us": US},
    ],
)
def test_what_chance_explains_or_costs_nothing_accuses_nobody(fleet_of, fields):
    assert kinds(fleet_of(fine=summary("fine", **fields))) == {}


def test_a_wait_is_explained_by_the_load_that_causes_it(fleet_of):
    bad = summary("bad", requests=301, shares={("waiting", "max_num_seqs"): 0.4})
    [difference] = compare_peers(fleet_of(bad=bad)).differences
    assert (difference.kind, difference.also) == ("more-load", [])


def test_two_causes_on_one_engine_are_both_named(fleet_of):
    bad = summary("bad", us_per_step=15_000.0, requests=301)
    [difference] = compare_peers(fleet_of(bad=bad)).differences
    assert (difference.kind, difference.also) == ("slow-steps", ["more-load"])


def test_a_host_is_to_blame_only_if_all_of_its_several_engines_are_slow(fleet_of):
    slow = {name: summary(name, us_per_step=14_000.0, host="node1") for name in ("a", "b")}
    assert kinds(fleet_of(**slow)) == dict.fromkeys("ab", ("slow-steps", "host"))
    fine = {"c": summary("c", host="node1")}
    assert kinds(fleet_of(**slow, **fine)) == dict.fromkeys("ab", ("slow-steps", "engine"))


def test_only_equal_work_is_compared(fleet_of):
    """An engine with large batches has long steps; nobody else did that work."""
    paces = [SummaryPace(work="0/9/20", steps=500, median_us=90_000.0)]
    large = summary("large", paces=paces)
    assert "large" not in step_time_ratios(fleet_of(large=large))
    assert kinds(fleet_of(large=large)) == {}


def test_other_models_devices_and_roles_are_no_peers(fleet_of):
    strangers = {
        "model": summary("model", model="toy-70b", us_per_step=90_000.0),
        "device": summary("device", device="b200", us_per_step=2_000.0),
        "role": summary("role", role="kv_producer", us_per_step=30_000.0),
    }
    comparison = compare_peers(fleet_of(**strangers))
    assert comparison.differences == []
    alone = [group for group in comparison.groups if not group.compared]
    assert [(group.engines, group.even_load) for group in alone] == [(1, None)] * 3


def test_an_engine_without_requests_is_no_error(fleet_of):
    idle = summary("idle", requests=0, requests_us=0, arrivals_us=0, quiet_us=0, times=[], paces=[])
    assert kinds(fleet_of(idle=idle)) == {}
    assert quietness(idle) == 0.0
