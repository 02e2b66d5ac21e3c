"""Requests across engines, from hand-made halves: matching, clocks, parts, and blocks that transfers hold."""

import json

import jsonschema
import pytest

from schedtrace.fleet.disaggregated import disaggregated
from schedtrace.fleet.engines import FleetSummaries
from schedtrace.fleet.reduce import fleet_report
from schedtrace.fleet.summary_cache import summaries_in, summary_frame
from schedtrace.fleet.transfers import key_hash, match_requests, sampled_transfers, transfer_key
from schedtrace.model.disaggregated import SummaryTransfer
from schedtrace.model.message import Count
from schedtrace.present.pages.fleet import fleet_page
from schedtrace.present.renderers import Format
from tests.unit.fleet.conftest import summary
from tests.unit.fleet.test_page import SCHEMA
from tests.unit.present.test_goldens import check, text_of

MS = 1_000
NO_ID = {"remote_request_id": None}
PARTS = ("prefill_queue", "prefill", "handover", "decode_queue", "transfer", "decode_requeue", "first_step")


def half(name, *times_ms, **fields):
    """A request that arrives, is scheduled and has its first token at these times."""
    arrived, scheduled, first = (None if ms is None else round(MS * ms) for ms in times_ms)
    nothing = dict.fromkeys(SummaryTransfer.__struct_fields__)
    times = {"arrived_us": arrived, "scheduled_us": scheduled, "first_token_us": first}
    return SummaryTransfer(**nothing | {"request_id": name} | times | fields)


def prefilled(name="a", begin=0, **fields):
    """10 ms in the queue, 20 ms of prefill; 8 blocks are kept until 101 ms after its end."""
    times = {"kept_us": MS * (begin + 30), "sent_us": MS * (begin + 131), "kept_blocks": 8}
    fields = {"remote": "decode", **times, **fields}
    return half(f"cmpl-{name}-0-aaaaaaaa", begin, begin + 10, begin + 30, **fields)


def decoded(name="a", begin=0, **fields):
    """5 ms after its prefill: 4 ms in the queue, 80 ms of transfer, 6 ms in the queue, a step of 5 ms."""
    load = {"load_begun_us": MS * (begin + 39), "load_ended_us": MS * (begin + 119), "load_blocks": 9}
    fields = {"remote": "prefill", "remote_request_id": f"cmpl-{name}-0-aaaaaaaa", **load, **fields}
    return half(f"cmpl-{name}-0-bbbbbbbb", begin + 35, begin + 125, begin + 130, **fields)


def engine(name, *transfers, clock_id="node", monotonic_begin_us=0, **fields):
    return summary(
        name, transfers=list(transfers), clock_id=clock_id, monotonic_begin_us=monotonic_begin_us, **fields
    )


def pair(prefills, decodes, **decode_fields):
    """Two engines on one host, unless the fields of the decode engine say otherwise."""
    return {"P1": engine("P1", *prefills), "D1": engine("D1", *decodes, **decode_fields)}


def lengths(report):
    return tuple(part.times and part.times.mean for part in report.parts)


def test_the_parts_of_one_request():
    report = disaggregated(pair([prefilled()], [decoded()]))
    assert tuple(part.part for part in report.parts) == PARTS
    assert lengths(report) == (10, 20, 5, 4, 80, 6, 5)
    assert report.total.mean == 130
    assert (report.leading, report.matched, report.by_remote_id) == ("transfer", 1, 1)
    [only] = report.pairs
    assert (only.mean_ms, only.leading_frac, only.clock) == (130, pytest.approx(80 / 130), "same")


def test_engines_of_one_machine_share_its_monotonic_clock_whatever_its_wall_clock_did():
    moved = decoded(begin=-1_000)
    report = disaggregated(
        pair([prefilled()], [moved], monotonic_begin_us=1_000 * MS, begin_unix_us=77_000 * MS)
    )
    assert lengths(report) == (10, 20, 5, 4, 80, 6, 5)


def test_no_request_crosses_engines():
    assert disaggregated({"a": summary("a"), "b": summary("b")}) is None


@pytest.mark.parametrize(
    ("prefill", "decode", "key"),
    [
        ({"transfer_id": "x"}, {"transfer_id": "x"} | NO_ID, "transfer_id"),
        ({}, NO_ID, "request_id"),
        ({"request_id": "same"}, {"request_id": "same"} | NO_ID, "request_id"),
        ({"request_id": "cmpl-a"}, {"request_id": "chatcmpl-a-01234567"} | NO_ID, "request_id"),
        ({"remote_request_id": "of-an-earlier-turn"}, {}, "remote_request_id"),
    ],
)  # fmt: skip
def test_what_requests_are_matched_by(prefill, decode, key):
    engines = pair([prefilled(**prefill)], [decoded(**decode)])
    [request] = match_requests(engines).requests
    assert request.key == key
    assert transfer_key(request.prefill.row) == transfer_key(request.decode.row)


def reasons(engines):
    return {each.reason: each.requests for each in match_requests(engines).unmatched_requests()}


def test_requests_that_cannot_be_matched_are_counted_by_reason():
    alone = decoded("nowhere")
    assert reasons(pair([prefilled()], [alone])) == {"no_prefill": 1, "no_decode": 1}
    cut = decoded(scheduled_us=None, first_token_us=None)
    assert reasons(pair([prefilled()], [cut])) == {"incomplete": 1}
    loading = decoded(load_ended_us=None)
    assert reasons(pair([prefilled()], [loading])) == {"incomplete": 1}


def test_an_id_on_the_prefill_engine_is_never_replaced_by_a_similar_one():
    other = prefilled(request_id="cmpl-a-0-cccccccc")
    assert reasons(pair([other], [decoded()])) == {"no_prefill": 1, "no_decode": 1}


def test_ids_that_several_requests_share_are_ambiguous():
    by_id = decoded(remote_request_id=None)
    engines = pair([prefilled()], [by_id]) | {"P2": engine("P2", prefilled(request_id="cmpl-a-0-dddddddd"))}
    assert reasons(engines) == {"ambiguous": 1}
    again = decoded(request_id="cmpl-a-0-eeeeeeee", remote_request_id=None)
    shared = pair([prefilled()], [by_id, again])
    assert (reasons(shared), match_requests(shared).requests) == ({"ambiguous": 2}, [])


def test_children_may_share_their_prefill():
    children = [decoded(request_id=f"{number}_cmpl-a-0-bbbbbbbb") for number in range(2)]
    report = disaggregated(pair([prefilled()], children))
    assert (report.matched, report.unmatched) == (2, [])


def test_blocks_from_a_store_are_no_request_of_another_engine():
    """A load without parameters of another engine: LMCache, or offloading to the host's memory."""
    stored = decoded(remote=None, remote_request_id=None)
    assert disaggregated({"a": engine("a", stored, role="kv_both"), "b": engine("b", role="kv_both")}) is None
    assert reasons({"a": engine("a", stored, role="kv_consumer")}) == {"no_prefill": 1}


def test_a_decode_engine_that_gets_its_request_before_the_prefill_is_done():
    """Its wait until then is covered by the prefill's parts, and the parts still add up."""
    early = decoded(arrived_us=2 * MS, load_begun_us=3 * MS, transfer_id="x", remote_request_id=None)
    report = disaggregated(pair([prefilled(transfer_id="x")], [early]))
    assert lengths(report) == (10, 20, 0, 0, 89, 6, 5)
    assert report.total.mean == 130


def test_a_request_without_a_recorded_transfer():
    """The connector loads within the first step, or the prompt was cached."""
    report = disaggregated(pair([prefilled()], [decoded(load_begun_us=None, load_ended_us=None)]))
    assert lengths(report) == (10, 20, 5, 90, None, None, 5)
    assert (report.without_transfer, report.total.mean) == (1, 130)


APART = {"clock_id": "other", "clock_error_us": None, "host": "b"}


def offset(report):
    [only] = report.pairs
    return only.clock, only.ahead_least_ms, only.ahead_most_ms, only.out_of_order


def test_the_errors_of_two_clocks_bound_the_handover():
    report = disaggregated(pair([prefilled()], [decoded()], **APART | {"clock_error_us": 900}))
    assert offset(report) == ("recorded", -1, 1, 0)
    assert lengths(report)[2] == 5
    assert [part.uncertain_ms for part in report.parts] == [0, 0, 1, 0, 0, 0, 0]


def test_the_order_of_events_narrows_the_errors_of_the_clocks():
    """Arrivals do not precede their prefill: the decode engine's clock is at most 5 ms ahead."""
    report = disaggregated(pair([prefilled()], [decoded()], **APART | {"clock_error_us": 19_900}))
    assert offset(report) == ("recorded", -20, 5, 0)
    assert (lengths(report)[2], report.parts[2].uncertain_ms) == (12.5, 12.5)


def test_without_clock_errors_the_order_of_events_bounds_the_offset():
    """The load began after 39 ms here, and its blocks were sent by 131 ms there."""
    report = disaggregated(pair([prefilled()], [decoded()], **APART))
    assert offset(report) == ("events", -92, 5, 0)
    unbounded = disaggregated(pair([prefilled(sent_us=None)], [decoded()], **APART))
    assert offset(unbounded) == ("events", None, 5, 0)
    assert lengths(unbounded) == (10, 20, None, 4, 80, 6, 5)
    assert (unbounded.total, unbounded.leading) == (None, "transfer")


def test_clocks_that_contradict_the_order_of_events():
    """The decode engine's clock is 50 ms behind: an arrival seems to be 45 ms before the prefill's end."""
    report = disaggregated(pair([prefilled()], [decoded(begin=-50)], **APART | {"clock_error_us": 900}))
    assert offset(report) == ("events", -142, -45, 1)
    assert lengths(report)[3:] == (4, 80, 6, 5)
    other = [prefilled("b"), decoded("b", begin=200)]
    torn = disaggregated(pair([prefilled(), other[0]], [decoded(begin=-50), other[1]], **APART))
    assert offset(torn) == ("contradictory", None, None, 2)


def test_nothing_bounds_an_offset():
    by_id = {"remote_request_id": None, "load_begun_us": None, "load_ended_us": None}
    report = disaggregated(pair([prefilled()], [decoded(**by_id)], **APART))
    assert offset(report) == ("unknown", None, None, 0)
    assert lengths(report) == (10, 20, None, None, None, None, 5)


def test_without_an_offset_an_early_request_at_the_decode_engine_is_not_told_from_a_slow_transfer():
    pushed = decoded(transfer_id="x", remote_request_id=None)
    report = disaggregated(pair([prefilled(transfer_id="x", sent_us=None)], [pushed], **APART))
    assert offset(report) == ("events", None, 109, 0)
    assert lengths(report) == (10, 20, None, None, None, 6, 5)
    assert report.without_transfer == 0


def test_no_part_leads_if_the_clocks_leave_that_open():
    slow = pair([prefilled(sent_us=None)], [decoded(begin=70)], **APART | {"clock_error_us": 59_900})
    report = disaggregated(slow)
    assert (report.leading, bool(report.verdict)) == (None, False)
    assert report.parts[2].uncertain_ms == 60


def test_the_verdict_names_the_pair_that_takes_most():
    slow = decoded("s", load_ended_us=1_000 * MS, scheduled_us=1_001 * MS, first_token_us=1_002 * MS)
    engines = pair([prefilled(), prefilled("s")], [decoded()]) | {"D2": engine("D2", slow)}
    report = disaggregated(engines)
    named = {
        name: value.text for name, value in report.verdict.arguments.items() if name in ("prefill", "decode")
    }
    assert named == {"prefill": "P1", "decode": "D2"}
    assert [(each.prefill, each.decode) for each in report.pairs] == [("P1", "D2"), ("P1", "D1")]


def test_blocks_held_for_transfers_at_their_peak():
    """Two of three requests overlap; the one whose decode engine is not here holds to the end."""
    stuck = prefilled("stuck", begin=5_000, sent_us=None)
    far = [prefilled("far", begin=60), decoded("far", begin=60)]
    engines = pair([prefilled(), far[0], stuck], [decoded(), far[1]])
    held = {(each.engine, each.side, each.other_engine): each for each in disaggregated(engines).held}
    assert held.keys() == {("P1", "prefill", "D1"), ("D1", "decode", "P1")}
    kept = held["P1", "prefill", "D1"]
    assert (kept.requests, kept.blocks, kept.blocks_total, kept.waits_for) == (2, 16, 700, "transfer")
    assert held["D1", "decode", "P1"].blocks == 18
    [alone] = disaggregated(pair([stuck], [])).held
    assert (alone.other_engine, alone.blocks, alone.waits_for) == ("", 8, None)


def test_blocks_of_an_engine_whose_number_of_blocks_is_not_recorded():
    engines = {"P1": engine("P1", prefilled(), kv_blocks=None), "D1": engine("D1", decoded(), kv_blocks=None)}
    assert [
        (each.blocks, each.blocks_total, each.message.arguments["blocks"].arguments["blocks"])
        for each in disaggregated(engines).held
    ] == [(8, None, Count(8, "block")), (9, None, Count(9, "block"))]


def test_a_sample_is_the_same_on_all_engines():
    prefills = [prefilled(f"r{number}", begin=200 * number) for number in range(40)]
    decodes = [decoded(f"r{number}", begin=200 * number) for number in range(40)]
    chosen, below = sampled_transfers(prefills, 10)
    assert (len(chosen), sampled_transfers(prefills, 40)[1]) == (10, None)
    assert {transfer_key(row) for row in decodes if key_hash(row) < below} == set(map(transfer_key, chosen))
    engines = {"P1": engine("P1", *chosen, transfers_below=below), "D1": engine("D1", *decodes)}
    report = disaggregated(engines)
    assert (report.matched, report.unmatched, report.sampled, report.held) == (10, [], True, [])


def test_transfers_pass_through_a_table_of_summaries():
    [read] = summaries_in(summary_frame([engine("P1", prefilled())]))
    assert read.transfers == [prefilled()]


@pytest.fixture
def report(fleet_of):
    """Two pairs: one whose transfers are slow, one on hosts whose clocks differ; a request is lost."""
    slow = [decoded(f"s{number}", begin=150 * number, kept_us=None, load_blocks=90) for number in range(6)]
    engines = fleet_of(
        P1=engine(
            "P1", *(prefilled(f"s{number}", begin=150 * number, kept_blocks=412) for number in range(6))
        ),
        D1=engine("D1", *slow),
        P2=engine("P2", prefilled("x"), prefilled("lost", begin=900), host="a", clock_id="a"),
        D2=engine("D2", decoded("x", begin=-50), host="b", clock_id="b"),
    )
    return fleet_report(FleetSummaries(engines), ["logs"])


def test_the_page_at_80_columns(report):
    text = text_of(fleet_page(report))
    assert max(map(len, text.splitlines())) <= 80
    check("fleet-disaggregated", text)


@pytest.mark.parametrize("output_format", [Format.HTML, Format.MARKDOWN])
def test_the_page_in_other_formats_names_every_part_and_pair(report, output_format):
    text = text_of(fleet_page(report), output_format=output_format)
    assert all(name in text for name in ("KV transfer", "first decode step", "P2", "D2"))


def test_the_json_passes_its_schema(report):
    document = json.loads(text_of(fleet_page(report), output_format=Format.JSON))
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert [part["part"] for part in document["disaggregated"]["parts"]] == list(PARTS)
