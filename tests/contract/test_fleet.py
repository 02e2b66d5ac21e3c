"""A fleet on vLLM's real scheduler, with known faults: each is found with its cause, and no healthy engine.

``tools/bench/fleet.py`` does the same with 200 engines and several seeds.
"""

import pytest

pytest.importorskip("vllm")

from schedtrace.fleet.engines import read_fleet
from schedtrace.fleet.inputs import find_fleet
from schedtrace.fleet.reduce import fleet_report
from schedtrace.fleet.workers import HereOnly
from tests.simulated_fleet import KINDS, faults_by_name, plan, record_fleet


def test_faults_are_found_with_their_cause_and_no_healthy_engine_is_accused(tmp_path):
    planned = plan(14, slow_hosts=1, kv=1, hot=1, client=1, paused=1)
    record_fleet(tmp_path, planned, seed=5, requests=60)
    fleet = read_fleet(find_fleet([str(tmp_path)]), lambda _: HereOnly())
    report = fleet_report(fleet)
    differences = {each.engine: each for each in report.differences}
    faults = faults_by_name(planned)
    assert {name: each.kind for name, each in differences.items()} == {
        name: KINDS[fault] for name, fault in faults.items()
    }
    wheres = {fault: differences[name].where for name, fault in faults.items()}
    assert wheres == {"slow": "host", "kv": "engine", "hot": "router", "client": "client", "paused": "engine"}
    [slow_host] = [host.host for host in report.hosts if host.is_slow]
    assert {slow_host} == {engine.host for engine in planned if engine.fault == "slow"}
    [group] = report.groups
    assert (group.even_load, group.even_capacity) == (False, False)
    assert sum(part.share_frac for part in report.time_split) == pytest.approx(1.0)
