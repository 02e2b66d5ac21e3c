"""The report of a fleet, as a page and as a document."""

import json
from pathlib import Path

import jsonschema
import pytest

from schedtrace.fleet.engines import FleetSummaries
from schedtrace.fleet.reduce import fleet_report
from schedtrace.fleet.summary import message_json, sketch_of
from schedtrace.model.fleet import EngineRead, FleetManifest, LeftOut, SummaryFinding
from schedtrace.model.say import say
from schedtrace.present.pages.fleet import fleet_page
from schedtrace.present.renderers import Format
from tests.unit.fleet.conftest import summary
from tests.unit.present.test_goldens import check, text_of

SCHEMA = Path(__file__).parents[3] / "docs" / "schema" / "fleet.schema.json"
KV = SummaryFinding(
    code="kv-bound",
    severity="critical",
    leads=True,
    share_frac=0.4,
    saved_frac=0.3,
    title=message_json(say("KV cache too small")),
    holder=message_json(say("Holders: {requests:n request}.", requests=3)),
)


@pytest.fixture
def report(fleet_of):
    """Nine healthy engines, and one with each fault; two inputs are left out."""
    engines = fleet_of(
        slow=summary("slow", us_per_step=14_000.0, host="node1"),
        slower=summary("slower", us_per_step=15_000.0, host="node1"),
        small=summary("small", kv_blocks=110, shares={("waiting", "kv_blocks"): 0.4}, findings=[KV]),
        hot=summary("hot", requests=301, arrivals=[8] * 40),
        still=summary("still", quiet_us=4_000_000, arrivals=[4] * 12 + [0] * 16 + [4] * 12),
        paused=summary("paused", shares={("interrupted", None): 0.2}, clock_error_us=None),
    )
    for place, each in enumerate(engines.values()):
        each.sketches = [sketch_of("ttft", [10.0 + place, 20.0]), sketch_of("e2e", [1000.0 + 10 * place])]
    rows = [
        EngineRead(engine=name, path=f"logs/{name}/engine-0.jsonl", files=2, size_bytes=10**6, cached=False)
        for name in engines
    ]
    rows[0].cached = True
    rows[1].problems = [say("logs/e1/engine-0.jsonl: the end is missing.")]
    left_out = [
        LeftOut(path="logs/notes.txt", why="no trace of schedtrace"),
        LeftOut(path="logs/\x1b[31mred/engine-0.jsonl", why="it vanished before it was read"),
    ]
    fleet = FleetSummaries(engines, FleetManifest(engines=rows, left_out=left_out, redone=1))
    return fleet_report(fleet, ["logs"], "--last 600s")


def test_the_page_at_80_columns(report):
    text = text_of(fleet_page(report))
    assert max(map(len, text.splitlines())) <= 80
    check("fleet", text)


@pytest.mark.parametrize("width", [40, 60, 120])
def test_the_page_at_other_widths_keeps_its_lines_and_its_names(report, width):
    text = text_of(fleet_page(report), width)
    assert max(map(len, text.splitlines())) <= width
    assert all(name in text for name in ("slower", "small", "hot", "still", "paused"))


@pytest.mark.parametrize("output_format", [Format.HTML, Format.MARKDOWN])
def test_the_page_in_other_formats_names_every_engine_that_differs(report, output_format):
    text = text_of(fleet_page(report), output_format=output_format)
    assert all(name in text for name in ("slower", "small", "hot", "still", "paused"))
    assert "\x1b" not in text


def test_the_json_passes_its_schema(report):
    document = json.loads(text_of(fleet_page(report), output_format=Format.JSON))
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert {each["engine"]: each["kind"] for each in document["differences"]} == {
        "paused": "interrupted",
        "slow": "slow-steps",
        "slower": "slow-steps",
        "small": "smaller-limit",
        "hot": "more-load",
        "still": "no-arrivals",
    }


def test_the_parts_of_the_fleet_s_time_add_up_to_all_of_it(report):
    assert sum(part.share_frac for part in report.time_split) == pytest.approx(1.0)
    [kv] = [part for part in report.time_split if part.cause == "kv_blocks"]
    assert kv.share_frac == pytest.approx((0.4 + sum(0.002 * number for number in range(9))) / 15)
    assert (kv.most, kv.most_frac) == ("small", pytest.approx(0.4))


def test_a_root_cause_is_weighed_by_the_fleet_s_time(report):
    [root] = report.root_causes
    assert (root.code, root.engines, root.leads, root.most) == ("kv-bound", 1, 1, "small")
    assert root.share_frac == pytest.approx(0.4 / 15)
    assert root.saved_frac == pytest.approx(0.3 / 15)


def test_the_verdict_names_the_load_that_differs(fleet_of):
    long_prompts = summary("long", arrived_tokens=40_000)
    _, load = fleet_report(FleetSummaries(fleet_of(long=long_prompts))).verdict[:2]
    assert (load.arguments["engine"].text, load.arguments["unit"]) == ("long", "tokens/s")


def test_hosts_and_clocks(report):
    assert [(host.host, host.is_slow) for host in report.hosts][:2] == [
        ("node1", True),
        ("host-of-e8", False),
    ]
    clocks = report.clocks
    assert (clocks.hosts, clocks.unknown, clocks.apart_us, clocks.virtual) == (14, 1, None, 0)


def test_clocks_differ_by_the_errors_of_the_two_worst_hosts(fleet_of):
    engines = fleet_of(
        a=summary("a", clock_error_us=700), b=summary("b", clock_error_us=900, host="host-of-a")
    )
    assert fleet_report(FleetSummaries(engines)).clocks.apart_us == 900 + 100
