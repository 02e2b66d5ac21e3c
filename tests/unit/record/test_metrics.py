"""Totals, series and the server of metrics, on lines made by hand."""

import json
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

pytest.importorskip("prometheus_client")

from loguru import logger
from prometheus_client.parser import text_string_to_metric_families

from schedtrace.model.causes import CAUSES
from schedtrace.model.live import Health
from schedtrace.model.trace import AlsoSkipped, Events, Exit, Output, Preemption, Present
from schedtrace.record.metrics import families
from schedtrace.record.metrics.engine_meter import (
    Address,
    EngineMeter,
    LeadingCause,
    metrics_address,
)
from schedtrace.record.metrics.families import FAMILIES, MORE, MOST_SERIES, Series
from schedtrace.record.metrics.measuring import EngineFacts, Measuring
from schedtrace.record.metrics.tally import Tally, step_causes
from schedtrace.record.switches import NotUnderstoodError
from tests import makers
from tests.makers import arrival, finish
from tests.toys import Totals

HOSTILE = 'm"odel\n{x="1"} 7\\'


def step(number, start_us, *, used=0, **fields):
    """A step in which as many requests as tokens decode; its output is not back."""
    return makers.step(
        number, start=start_us, took=10, back=None, ended=None, total_requests=used, decode_tokens=used,
        **{"budget": 100, "remaining_budget": 100 - used, **fields},
    )  # fmt: skip


def refuses(cause, name=None, kind="break", loop="waiting", **fields):
    return Exit(loop=loop, kind=kind, cause=cause, request_id=name, **fields)


def waited(tally):
    return {cause: us for cause, us in tally.waits.us.items() if us}


def test_a_request_waits_for_the_exit_that_ended_the_loop_and_a_skipped_one_for_its_skip():
    tally = Tally()
    came = [arrival("a", 40, 40), arrival("b", 60, 60), arrival("c", 70, 70)]
    exits = [refuses("kv_blocks", "b"), refuses("grammar_pending", "c", kind="continue")]
    tally.note_step(step(0, 100, waiting=2, exits=exits, arrived=came, used=1), admitted=["a"])
    tally.note_step(step(1, 300, waiting=2, exits=exits), admitted=[])
    assert waited(tally) == {"next_step": 60 + 40 + 30, "kv_blocks": 200, "grammar_pending": 200}
    assert tally.running.us == {"running": 200}
    assert tally.refusals == {"kv_blocks": 2, "grammar_pending": 2}
    assert tally.queue_causes == {"kv_blocks": 1, "grammar_pending": 1}


def test_a_request_that_leaves_between_two_steps_waits_until_then():
    tally = Tally()
    exits = [refuses("max_num_seqs")]
    came = [arrival("a", 90, 90), arrival("b", 100, 100)]
    tally.note_step(step(0, 100, waiting=2, exits=exits, arrived=came), admitted=[])
    tally.advance_to(180)
    assert waited(tally) == {"next_step": 10, "max_num_seqs": 160}
    tally.note_step(
        step(1, 200, waiting=1, exits=exits, finished=[finish("a", finished_us=150)]), admitted=[]
    )
    assert waited(tally) == {"next_step": 10, "max_num_seqs": 50 + 100}


def test_a_running_request_without_tokens_is_stalled_once_its_output_is_back():
    tally = Tally()
    exits = [refuses("token_budget", loop="running")]
    came = [arrival("a", 100, 100)]
    tally.note_step(step(0, 100, used=1, arrived=came), admitted=["a"], scheduled={"a"})
    tally.note_output(Output(step=0, output_us=230, update_us=5, output_tokens=1))
    tally.note_step(step(1, 200, exits=exits), admitted=[], left=[("a", "a")], scheduled=set())
    tally.note_step(step(2, 300, exits=exits), admitted=[])
    tally.note_step(step(3, 450, used=1), admitted=[], scheduled={"a"})
    assert tally.stalled_us == {"token_budget": 70 + 150}
    assert tally.held_us == {"running": 350 - 220, "stalled": 220, "set_aside": 0}


def test_device_host_and_idle_add_up_to_the_time_since_the_first_step():
    tally = Tally()
    tally.note_step(step(0, 100, used=1, arrived=[arrival("a", 90, 90)]), admitted=["a"])
    tally.note_output(Output(step=0, output_us=160, update_us=10, output_tokens=1))
    tally.note_events(
        Events(at_us=500, finished=[finish("a", finished_us=165)], arrived=[arrival("b", 400, 400)])
    )
    tally.advance_to(450)
    busy = tally.busy
    assert busy.device_us == 50
    assert busy.idle_us(450) == 400 - 170
    assert busy.host_us(450) == 350 - 50 - 230


def test_time_of_dropped_steps_is_in_no_total():
    tally = Tally()
    exits = [refuses("kv_blocks")]
    tally.note_step(step(0, 100, waiting=1, exits=exits, arrived=[arrival("a", 100, 100)]), admitted=[])
    tally.note_step(step(1, 200, waiting=1, exits=exits), admitted=[])
    tally.note_events(Events(at_us=900, dropped_steps=7))
    tally.note_step(step(9, 1000, waiting=1, exits=exits), admitted=[])
    tally.note_step(step(10, 1100, waiting=1, exits=exits), admitted=[])
    assert waited(tally) == {"kv_blocks": 100 + 10 + 100}
    assert tally.dropped_steps == 7


def test_preemptions_by_reason():
    tally = Tally()
    tally.begin_with(
        0, [(n, Present(request_id=n, state="running", arrived_us=0, prompt_tokens=5)) for n in "abcd"]
    )
    lost = [
        Preemption(request_id="a", lost_tokens=3, for_request_id="b"),
        Preemption(request_id="b", lost_tokens=3, for_request_id="b"),
        Preemption(request_id="c", lost_tokens=3, in_schedule=False),
        Preemption(request_id="d", lost_tokens=3, for_request_id="b"),
    ]
    tally.note_step(step(0, 10, waiting=4, preempted=lost), admitted=[])
    assert tally.preemptions == {"kv_blocks": 2, "itself": 1, "cache_reset": 1}
    assert tally.queue_causes == {"other": 4}


@pytest.mark.parametrize(
    ("exits", "waiting", "cause"),
    [
        ([], 0, "queue_empty"),
        ([], 1, "other"),
        ([refuses("queue_empty")], 0, "queue_empty"),
        ([refuses("max_num_seqs"), refuses("kv_blocks")], 1, "kv_blocks"),
        ([refuses("lora_cap", "a", kind="continue"), refuses("queue_empty")], 1, "lora_cap"),
        (
            [
                refuses("lora_cap", "a", kind="continue"),
                refuses("grammar_pending", "b", kind="continue", also=[AlsoSkipped("c", 1)]),
            ],
            3,
            "grammar_pending",
        ),
    ],
)
def test_the_cause_that_ended_a_step_s_waiting_loop(exits, waiting, cause):
    assert step_causes(exits, waiting=waiting).waiting == cause


def test_an_exit_line_that_stands_for_many_counts_as_many_and_an_empty_queue_is_no_reason_to_wait():
    """After 64 skips at a place the rest share a line, which names no request."""
    skips = [Exit("waiting", "continue", "max_loras", "a"), Exit("waiting", "continue", "max_loras", count=5)]
    causes = step_causes([*skips, Exit("waiting", "condition", "queue_empty")], waiting=6)
    assert causes.refusals == {"max_loras": 6}
    assert step_causes([Exit("waiting", "condition", "queue_empty")], waiting=1).queue_cause == "other"


class Sunk:
    """A sink that keeps what it gets."""

    def __init__(self):
        self.values = {}

    def add(self, family, label, amount):
        assert amount >= 0
        key = family.full_name, label
        self.values[key] = self.values.get(key, 0) + amount

    def set(self, family, label, value):
        self.values[family.full_name, label] = value


def test_counters_never_decrease():
    sunk = Sunk()
    series = Series([sunk])
    for total in (3.0, 2.0, 2.5, 4.0):
        series.count({(families.WAIT, "kv_blocks"): total})
    assert sunk.values == {("schedtrace_wait_seconds_total", "kv_blocks"): 4.0}


def test_there_are_at_most_fifty_series_and_nothing_is_lost():
    series = Series([])
    bounded = [family for family in FAMILIES if family.label == "cause"]
    counters = [family for family in bounded if family.kind == "counter"]
    for family in counters:
        series.count({(family, cause): 1.0 for cause in CAUSES})
    for family in bounded:
        if family.kind == "gauge":
            series.gauge(family, dict.fromkeys(CAUSES, 1.0))
    for family in FAMILIES:
        if family.label != "cause":
            labels = dict.fromkeys(family.values or [""], 1.0)
            series.gauge(family, labels) if family.kind == "gauge" else series.count(
                {(family, label): value for label, value in labels.items()}
            )
    assert len(series.values) == MOST_SERIES
    for family in counters:
        assert sum(v for (f, _), v in series.values.items() if f is family) == len(CAUSES)
    assert all(series.values[family, MORE] > 0 for family in counters)


def test_a_cause_of_another_package_is_no_label():
    series = Series([])
    series.count({(families.REFUSALS, HOSTILE): 2.0, (families.REFUSALS, "other"): 1.0})
    assert series.values == {(families.REFUSALS, "other"): 3.0}


def test_a_gauge_s_absent_labels_are_zero():
    series = Series([])
    series.gauge(families.WAITING, {"kv_blocks": 3})
    series.gauge(families.WAITING, {"max_num_seqs": 2})
    assert series.values == {(families.WAITING, "kv_blocks"): 0.0, (families.WAITING, "max_num_seqs"): 2.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("off", None),
        ("0", None),
        ("1", Address("127.0.0.1", 9415, asked=False)),
        ("on", Address("127.0.0.1", 9415, asked=False)),
        ("9000", Address("127.0.0.1", 9000, asked=True)),
        ("0.0.0.0:9000", Address("0.0.0.0", 9000, asked=True)),  # noqa: S104  # parsed, not bound
        ("[::1]:9000", Address("::1", 9000, asked=True)),
    ],
)
def test_addresses(text, expected):
    assert metrics_address(text) == expected


@pytest.mark.parametrize("text", ["maybe", "70000", "host:", ":9", "a b:9", "-1"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(NotUnderstoodError, match="SCHEDTRACE_METRICS"):
        metrics_address(text)


@pytest.fixture
def served(monkeypatch):
    """Metrics on a free port, with a health that a test may change."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    health = [Health("busy")]
    metrics = EngineMeter(
        (HOSTILE, "0"),
        by_priority=False,
        facts=lambda: EngineFacts("worker", 1000.0, {"free": 7, "running": 2}),
        health=lambda: health[0],
    )
    metrics.serve(Address("127.0.0.1", 0, asked=True), 0)
    yield metrics, health
    metrics.close()


def test_the_server_shows_totals_gauges_and_an_escaped_model_name(served):
    metrics, _ = served
    tally = metrics.new_tally()
    exits = [refuses("kv_blocks", "a")]
    tally.note_step(step(0, 0, waiting=1, exits=exits, arrived=[arrival("a", 0, 0)]), admitted=[])
    tally.note_step(step(1, 2_000_000, waiting=1, exits=exits), admitted=[])
    metrics.publish(tally)
    with urlopen(metrics.published_on) as page:
        text = page.read().decode()
    samples = {
        (
            sample.name,
            *(v for k, v in sample.labels.items() if k not in {"model_name", "engine"}),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["model_name"] == HOSTILE
    }
    assert samples["schedtrace_wait_seconds_total", "kv_blocks"] == 2.0
    assert samples["schedtrace_waiting_requests", "kv_blocks"] == 1.0
    assert samples["schedtrace_stalled", "worker"] == 1.0
    assert samples["schedtrace_kv_blocks", "free"] == 7.0
    assert samples["schedtrace_last_progress_timestamp_seconds",] == 1000.0
    assert not any("created" in name for name, *_ in samples)


def test_totals_go_on_over_several_recordings(served):
    metrics, _ = served
    for _ in range(2):
        tally = metrics.new_tally()
        tally.note_step(step(0, 0, used=3), admitted=[])
        metrics.publish(tally)
    with urlopen(metrics.published_on) as page:
        assert 'schedtrace_steps_total{engine="0"' in (text := page.read().decode())
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("schedtrace_steps")] == ["2.0"]


@pytest.mark.parametrize(
    ("health", "alive", "ready"),
    [
        (Health("healthy"), 200, 200),
        (Health("busy"), 200, 200),
        (Health("paused", "asleep"), 200, 503),
        (Health("stalled", "no step"), 503, 503),
    ],
)
def test_health_over_http(served, health, alive, ready):
    metrics, current = served
    current[0] = health
    for path, code in (("health", alive), ("ready", ready)):
        try:
            with urlopen(metrics.published_on.replace("metrics", path)) as answer:
                status, body = answer.status, answer.read()
        except HTTPError as error:
            status, body = error.code, error.read()
        assert status == code
        assert json.loads(body)["state"] == health.state
        assert json.loads(body).get("cause") == health.cause


def test_the_leading_cause_is_that_of_the_last_minute():
    leading = LeadingCause()
    assert leading.gauge_values(0.0, {"kv_blocks": 0.0}) == {}
    assert leading.gauge_values(10.0, {"kv_blocks": 30.0, "next_step": 50.0}) == {"kv_blocks": 1.0}
    later = {"kv_blocks": 30.0, "next_step": 50.0, "max_num_seqs": 90.0}
    assert leading.gauge_values(80.0, later) == {"max_num_seqs": 1.0}
    assert leading.gauge_values(200.0, later) == {}


def test_the_log_says_a_new_leading_cause_with_its_reason_in_words():
    said = []
    sink = logger.add(lambda message: said.append(message.record["message"]), level="INFO")
    leading = LeadingCause()
    for at_s, waited_s in ((0.0, 0.0), (10.0, 30.0), (20.0, 60.0)):
        leading.gauge_values(at_s, {"max_num_seqs": waited_s, "next_step": waited_s / 3})
    logger.remove(sink)
    [line] = said
    assert line == (
        "schedtrace: in the last 10 s, 75 % of waiting time (30.0 of 40.0 s) was for max_num_seqs: "
        "as many requests ran as max_num_seqs allows"
    )


class Assembler:
    tally = None

    def count_with(self, tally):
        self.tally = tally


class Call:
    start_ns = 5_000


@pytest.mark.parametrize(("call", "clock_us"), [(None, 9), (Call(), 5)])
def test_a_call_under_way_stops_the_clock(call, clock_us):
    measuring, totals = Measuring(Assembler()), Totals()
    measuring.meter, measuring.begun = totals, lambda: call
    measuring.begin_round()
    measuring.end_round(9, lambda ns: ns // 1000, complete=True)
    assert [tally.clock_us for tally in totals.tallies] == [clock_us]


def test_a_receiver_that_fails_gets_no_more_and_raises_nothing():
    class Fails(Totals):
        calls = 0

        def publish(self, _):
            self.calls += 1
            raise OSError

    measuring, fails = Measuring(Assembler()), Fails()
    measuring.meter = fails
    for _ in range(3):
        measuring.begin_round()
        measuring.end_round(9, lambda ns: ns, complete=True)
    assert fails.calls == 1
