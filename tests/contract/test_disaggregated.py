"""Disaggregated prefill on vLLM's real schedulers: a made-up delay is in the part where it was put."""

import pytest

pytest.importorskip("vllm")

from schedtrace.fleet.engines import read_fleet
from schedtrace.fleet.inputs import find_fleet
from schedtrace.fleet.reduce import fleet_report
from schedtrace.fleet.workers import HereOnly
from tests.contract.transfers import STEP_US, TOKEN_US, change_header, record

pytestmark = pytest.mark.vllm

DELAY_MS, HANDOVER_MS = 80.0, 3.0
REQUESTS = 6
PREFILL_ENGINE, DECODE_ENGINE = "host=node-p", "host=node-d"


def spread(deployment):
    """Requests that never meet: half a second apart."""
    for number in range(REQUESTS):
        deployment.send(1e6 + 500_000.0 * number, f"req{number}", prompt=160)


def across(folder):
    fleet = read_fleet(find_fleet([str(folder / name) for name in (PREFILL_ENGINE, DECODE_ENGINE)]), lambda _: HereOnly())
    return fleet_report(fleet).disaggregated


def means(report):
    return {part.part: part.times.mean for part in report.parts if part.times is not None}


@pytest.fixture
def spread_out(tmp_path, monkeypatch):
    deployment = record(tmp_path, spread, monkeypatch, delay_us=1e3 * DELAY_MS)
    return tmp_path, deployment


def test_every_request_is_matched_and_the_delay_is_in_the_transfer(spread_out):
    folder, _ = spread_out
    report = across(folder)
    print(report)
    assert 0
