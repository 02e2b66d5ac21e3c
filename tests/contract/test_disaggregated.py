"""Disaggregated prefill on vLLM's real schedulers: a made-up delay is in the part where it was put."""

import json

import pytest

pytest.importorskip("vllm")

from schedtrace.fleet.engines import read_fleet
from schedtrace.fleet.inputs import find_fleet
from schedtrace.fleet.reduce import fleet_report
from schedtrace.fleet.workers import HereOnly
from schedtrace.present.pages.fleet import fleet_page
from schedtrace.present.renderers import Format
from tests.contract.transfers import DECODES, PREFILLS, change_header, record
from tests.unit.present.test_goldens import text_of

pytestmark = pytest.mark.vllm

PREFILL_ENGINE, DECODE_ENGINE = "host=node-p/engine-0", "host=node-d/engine-1"
DELAY_MS, HANDOVER_MS = 80.0, 3.0
WITHIN_MS = 1.0
"""An idle engine looks for the end of a transfer once a millisecond."""
PARTS = [
    "prefill_queue", "prefill", "handover", "decode_queue", "transfer", "decode_requeue", "first_step"
]  # fmt: skip
REQUESTS = 6
BEGIN_US = 1_000_000.0


def spread(deployment):
    """Requests that never meet: half a second apart."""
    for number in range(REQUESTS):
        deployment.send(BEGIN_US + 500_000 * number, f"req{number}", prompt=160)


def fleet_of(folder):
    return fleet_report(read_fleet(find_fleet([str(folder)]), lambda _: HereOnly()))


def means(report):
    """Part to its mean in milliseconds; None where it is not known."""
    return {part.part: part.times and part.times.mean for part in report.parts}


def set_clocks(folder, *, behind_us):
    """Give each host its own clock with an error of 205 us; the decode node's is behind by so much."""
    for engine, moved_us in ((PREFILL_ENGINE, 0), (DECODE_ENGINE, behind_us)):
        trace = folder / f"{engine}.jsonl"
        anchor_us = json.loads(trace.read_bytes().partition(b"\n")[0])["wall_anchor_us"]
        own = {"clock": "monotonic", "clock_id": engine, "wall_anchor_us": anchor_us + 10**9 - moved_us}
        change_header(trace, **own, wall_uncertainty_us=5, wall_max_error_us=200)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """``recorded(play, delay_ms)``: the folder of a deployment's traces, and the deployment."""

    def make(play, delay_ms=DELAY_MS, **options):
        return tmp_path, record(tmp_path, play, monkeypatch, delay_us=1e3 * delay_ms, **options)

    return make


def test_the_delay_of_the_connector_is_in_the_transfer(recorded):
    folder, _ = recorded(spread)
    fleet = fleet_of(folder)
    report = fleet.disaggregated
    assert (report.matched, report.by_remote_id, report.unmatched) == (REQUESTS, REQUESTS, [])
    lengths = means(report)
    assert list(lengths) == PARTS
    assert lengths["transfer"] == pytest.approx(DELAY_MS, abs=WITHIN_MS)
    assert lengths["handover"] == pytest.approx(HANDOVER_MS, abs=0.01)
    assert lengths["prefill_queue"] == pytest.approx(0, abs=0.5)
    assert lengths["decode_queue"] == pytest.approx(0, abs=WITHIN_MS)
    assert (report.leading, fleet.verdict[-1].arguments["matched"].count) == ("transfer", REQUESTS)
    assert sum(part.share_frac for part in report.parts) == pytest.approx(1.0)
    assert report.total.mean == pytest.approx(sum(lengths.values()))
    [pair] = report.pairs
    assert (pair.prefill, pair.decode, pair.clock) == (PREFILL_ENGINE, DECODE_ENGINE, "same")
    assert {
        (held.engine, held.other_engine, held.requests, held.blocks, held.waits_for) for held in report.held
    } == {
        (PREFILL_ENGINE, DECODE_ENGINE, 1, 10, "transfer"),
        (DECODE_ENGINE, PREFILL_ENGINE, 1, 10, "transfer"),
    }
    document = json.loads(text_of(fleet_page(fleet), output_format=Format.JSON))
    assert document["disaggregated"]["leading"] == "transfer"
    assert all(
        "KV transfer" in text_of(fleet_page(fleet), output_format=each) for each in (Format.TEXT, Format.HTML)
    )


def test_clocks_that_contradict_the_order_of_events_bound_their_offset(recorded):
    """The decode node's clock is 7 s behind: requests seem to arrive before their prefill."""
    folder, _ = recorded(spread)
    exact = means(fleet_of(folder).disaggregated)
    set_clocks(folder, behind_us=7_000_000)
    report = fleet_of(folder).disaggregated
    [pair] = report.pairs
    assert (pair.clock, pair.out_of_order, report.matched) == ("events", REQUESTS, REQUESTS)
    assert pair.ahead_least_ms <= -7_000 <= pair.ahead_most_ms < -6_990
    lengths, errors = means(report), {part.part: part.uncertain_ms for part in report.parts}
    assert {part: lengths[part] for part in PARTS if part != "handover"} == pytest.approx(
        {part: exact[part] for part in PARTS if part != "handover"}
    )
    assert errors.pop("handover") >= abs(lengths["handover"] - exact["handover"]) > 0
    assert set(errors.values()) == {0.0}


def test_with_small_clock_errors_the_handover_has_an_error_and_the_rest_none(recorded):
    folder, _ = recorded(spread)
    set_clocks(folder, behind_us=0)
    report = fleet_of(folder).disaggregated
    [pair] = report.pairs
    assert (pair.clock, pair.ahead_least_ms, pair.ahead_most_ms) == ("recorded", -0.41, 0.41)
    uncertain = {part.part: part.uncertain_ms for part in report.parts if part.uncertain_ms}
    assert uncertain == {"handover": pytest.approx(0.41)}
    assert means(report)["handover"] == pytest.approx(HANDOVER_MS, abs=0.41)


def test_requests_without_their_other_half_are_counted_and_named(recorded):
    """The router loses one request after its prefill, and the trace of another's prefill is not there."""

    def play(deployment):
        spread(deployment)
        deployment.send(BEGIN_US + 2_900_000, "lost", prompt=320)
        deployment.lost.add(f"cmpl-lost-0{PREFILLS}")
        stray = f"cmpl-stray-0{DECODES}"
        deployment.params[stray] = {"do_remote_prefill": True, "remote_request_id": "cmpl-stray-0-cccccccc"}
        deployment.ranks.arrive(BEGIN_US, stray, 160, 2, rank=1)

    folder, _ = recorded(play)
    report = fleet_of(folder).disaggregated
    assert report.matched == REQUESTS
    assert {each.reason: (each.requests, each.example) for each in report.unmatched} == {
        "no_prefill": (1, f"cmpl-stray-0{DECODES}"),
        "no_decode": (1, f"cmpl-lost-0{PREFILLS}"),
    }
    lost = [held for held in report.held if held.other_engine == ""]
    assert [(held.engine, held.blocks, held.waits_for) for held in lost] == [(PREFILL_ENGINE, 20, None)]


def test_a_queue_at_the_prefill_engine_is_found_there(recorded):
    """Give the engine one seat: the second request waits 80 ms, while the first computes 4,000 tokens."""

    def play(deployment):
        for number in range(REQUESTS):
            deployment.send(BEGIN_US + 500_000 * number, f"long{number}", prompt=4_000)
            deployment.send(BEGIN_US + 500_000 * number + 1, f"short{number}", prompt=16)

    folder, deployment = recorded(play, delay_ms=1.0, max_num_seqs=1)
    report = fleet_of(folder).disaggregated
    waited = sum(
        deployment.ended[f"cmpl-long{number}-0{PREFILLS}"] - (BEGIN_US + 500_000 * number)
        for number in range(REQUESTS)
    )
    assert report.matched == 2 * REQUESTS
    assert means(report)["prefill_queue"] == pytest.approx(waited / 1e3 / (2 * REQUESTS), abs=WITHIN_MS)
    shares = {part.part: part.share_frac for part in report.parts}
    assert max(shares, key=shares.get) in {"prefill", "prefill_queue"}


def test_a_queue_at_the_decode_engine_is_found_there_and_its_holder_named(recorded):
    """The only seat of the decode engine is taken by a request of its own."""

    def play(deployment):
        for number in range(REQUESTS):
            at_us = BEGIN_US + 500_000 * number
            deployment.decode_alone(at_us, f"own{number}", prompt=16, tokens=120)
            deployment.send(at_us, f"req{number}", prompt=160)

    folder, deployment = recorded(play, delay_ms=1.0, max_num_seqs=1)
    report = fleet_of(folder).disaggregated
    waited = sum(
        deployment.ended[f"own{number}"] - deployment.ended[f"cmpl-req{number}-0{PREFILLS}"]
        for number in range(REQUESTS)
    )
    assert (report.matched, report.leading) == (REQUESTS, "decode_queue")
    assert means(report)["decode_queue"] == pytest.approx(
        waited / 1e3 / REQUESTS - HANDOVER_MS, abs=WITHIN_MS
    )
    assert means(report)["transfer"] == pytest.approx(1.0, abs=WITHIN_MS)
    [kept] = [held for held in report.held if held.side == "prefill"]
    assert (kept.engine, kept.other_engine, kept.blocks, kept.waits_for) == (
        PREFILL_ENGINE, DECODE_ENGINE, 10, "decode_queue"
    )  # fmt: skip
