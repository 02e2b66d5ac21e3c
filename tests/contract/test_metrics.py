"""Metrics equal the sums that ``analyze`` makes of the trace of the same run, at any moment of it."""

import time
from copy import deepcopy
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import polars as pl
import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.lora.request import LoRARequest

from schedtrace.model.causes import CAUSES
from schedtrace.model.live import Health
from schedtrace.read.run import read_run
from schedtrace.record import writer
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.live.attachment import Attachment
from schedtrace.record.metrics.counting_recorder import CountingRecorder, SteadyStep
from schedtrace.record.metrics.engine_meter import Address, EngineMeter
from schedtrace.record.metrics.families import MORE, MOST_SERIES
from schedtrace.record.metrics.measuring import EngineFacts
from schedtrace.record.metrics.tally import NEXT_STEP, Tally, priority_class
from schedtrace.record.queues import policy
from schedtrace.record.settings import Settings
from schedtrace.record.traced import prepared_recorder, traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.timeline import make_timeline
from tests.contract.deciding import LOAD, first_difference
from tests.contract.loads import CHOSEN, FAMILIES, SHORT_STEPS, make_script, play
from tests.contract.switched import Switched
from tests.seeds import SOAK
from tests.toys import Now, Totals, core_of

pytestmark = pytest.mark.vllm

SESSIONS = {"streaming_input"}
"""A session that waits for its next part is in the queue, and no event says when it went back there."""
POINTS = 10
COMPUTING = ["prefill", "decode", "recompute"]


EVERY = 7
"""Steps from one copy to the next: more than ten in the shortest load."""
LOADS = [name for name in (FAMILIES if SOAK else CHOSEN) if name not in SESSIONS]


class Watched(Tally):
    """Keeps copies of itself after some steps."""

    def __init__(self, *, every=1, **options):
        super().__init__(**options)
        self.every, self.copies = every, {}

    def note_step(self, step, **options):
        super().note_step(step, **options)
        if step.step % self.every == 0:
            copies, self.copies = self.copies, {}
            copies[step.step] = deepcopy(self)
            self.copies = copies


def watched_totals(scheduler):
    return Totals(partial(Watched, by_priority=policy(scheduler) == "priority", every=EVERY))


def counted(name, seed=1):
    """The totals of a load as recorded and as counted alone, and the timeline of its trace."""
    family = FAMILIES[name]
    engine = Driver(traced_class, **family.engine)
    lines = RECORDERS.look_up(engine.scheduler).writer
    lines.measuring.meter = meter = watched_totals(engine.scheduler)
    alone = count_beside(engine.scheduler)
    play(engine, make_script(family, seed, SHORT_STEPS))
    RECORDERS.look_up(engine.scheduler).close()
    trace, *_ = read_run(lines.path.parent).traces
    timeline = make_timeline(trace, None)
    [tally], [tally_alone] = meter.tallies, alone.tallies
    for each in (tally, tally_alone):
        each.advance_to(timeline.end_us)
    return tally, tally_alone, timeline


HOOKS = [
    "schedule_begins", "schedule_ended", "schedule_raised", "output_came_back", "request_arrives",
    "request_preempted", "request_was_preempted", "request_freed", "control", "beside", "close",
]  # fmt: skip


def count_beside(scheduler, writers=None):
    """Count for metrics alone beside the recording of a scheduler, with the same times; return the meter.

    Its writer is added to ``writers``.
    """
    recorder = RECORDERS.look_up(scheduler)
    chosen = Settings(Path(), trial_ids=False, hash_ids=recorder.writer.hash_ids, keeps_lines=False)
    alone = prepared_recorder(scheduler, type(scheduler), chosen)
    assert type(alone) is CountingRecorder
    alone.writer.clock.anchor_ns = recorder.writer.clock.anchor_ns
    if writers is not None:
        writers.append(alone.writer)
    alone.writer.measuring.meter = meter = watched_totals(scheduler)
    now_ns = 0
    alone.clock = recorder.clock = lambda: now_ns

    def both(name):
        recorded, counted = getattr(recorder, name), getattr(alone, name)

        def call(*args, **options):
            nonlocal now_ns
            now_ns = time.monotonic_ns()
            alone.events = recorder.events
            recorded(*args, **options)
            counted(*args, **options)

        return call

    for name in HOOKS:
        setattr(recorder, name, both(name))
    return meter


def sums(timeline, until_us, step):
    """What the totals must be at a moment: sums of the timeline's tables up to it."""
    states = timeline.request_states.with_columns(pl.col("end_us").clip(None, until_us)).filter(
        pl.col("end_us") > pl.col("begin_us")
    )
    us = pl.col("end_us") - pl.col("begin_us")
    steps = timeline.steps.filter(pl.col("step") <= step)
    refused = timeline.exits.filter(pl.col("refusal") & (pl.col("step") <= step))
    queued = states.filter(pl.col("state").is_in(QUEUED))

    def by(rows, key, value):
        return {k: v for k, v in rows.group_by(key).agg(value.sum().alias("sum")).iter_rows() if v}

    used = pl.col("token_budget") - pl.col("remaining_budget")
    recompute, decode = pl.col("recomputed_tokens"), pl.col("decode_tokens")
    tokens = steps.select(
        prefill=(used - recompute - decode).sum(), decode=decode.sum(), recompute=recompute.sum()
    ).row(0, named=True)
    priorities = timeline.known_requests.select("request_id", "priority")
    waited = queued.join(priorities, on="request_id").group_by("priority").agg(us=us.sum())
    classes = {}
    for priority, waited_us in waited.iter_rows():
        classes[priority_class(priority)] = classes.get(priority_class(priority), 0) + waited_us
    preempted = timeline.preemptions.filter(pl.col("step") <= step)
    reason = (
        pl.when(~pl.col("in_schedule"))
        .then(pl.lit("cache_reset"))
        .when(pl.col("for_request_id") == pl.col("request_id"))
        .then(pl.lit("itself"))
        .otherwise(pl.lit("kv_blocks"))
    )
    return {
        "waits": by(queued, "cause", us),
        "stalled": by(states.filter(pl.col("state") == "stalled"), "cause", us),
        "running": int(states.filter(pl.col("state").is_in(COMPUTING)).select(us.sum()).item()),
        "refusals": by(refused, "cause", pl.col("count")),
        "preemptions": dict(preempted.with_columns(reason=reason).group_by("reason").len().iter_rows()),
        "tokens": {use: number for use, number in tokens.items() if number},
        "unused": by(steps, "waiting_cause", pl.col("remaining_budget")),
        "classes": classes,
    }


def totals(tally):
    def some(counter):
        return {key: value for key, value in counter.items() if value}

    return {
        "waits": some(tally.waits.us),
        "stalled": some(tally.stalled_us),
        "running": tally.held_us["running"],
        "refusals": some(tally.refusals),
        "preemptions": some(tally.preemptions),
        "tokens": some(tally.tokens),
        "unused": some(tally.unused_tokens),
        "classes": None if tally.classes is None else some(tally.classes.us),
    }


def same(tally, timeline, until_us, step):
    expected = sums(timeline, until_us, step)
    if tally.classes is None:
        expected["classes"] = None
    assert totals(tally) == expected


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.usefixtures("recording")
def test_totals_equal_the_sums_of_the_trace_at_ten_points_and_at_the_end(name):
    *tallies, timeline = counted(name)
    starts = dict(timeline.steps.select("step", "start_us").iter_rows())
    states = timeline.tables.engine_states
    us = (pl.col("end_us") - pl.col("begin_us")).sum()
    engine = dict(states.group_by("state").agg(us).iter_rows())
    for tally in tallies:
        assert len(tally.copies) >= POINTS
        for step, copy in list(tally.copies.items())[:: len(tally.copies) // POINTS]:
            same(copy, timeline, starts[step], step)
        same(tally, timeline, timeline.end_us, len(starts))
        assert tally.busy.device_us == engine.get("device", 0)
        assert tally.busy.idle_us(tally.clock_us) == engine.get("idle", 0)
        assert tally.busy.host_us(tally.clock_us) == sum(
            us for state, us in engine.items() if state not in {"device", "idle"}
        )


def at_one_moment(*meters):
    """The only totals of each of them, up to the later one's clock."""
    tallies = [tally for meter in meters for tally in meter.tallies]
    assert len(tallies) == len(meters)
    for tally in tallies:
        tally.advance_to(max(each.clock_us for each in tallies))
    return tallies


@pytest.mark.usefixtures("recording")
def test_what_dropped_steps_leave_is_the_same_for_metrics_alone(monkeypatch):
    engine = Driver(traced_class, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=16)
    recorded = Totals()
    RECORDERS.look_up(engine.scheduler).writer.measuring.meter = recorded
    alone = count_beside(engine.scheduler)
    for number in range(40):
        if number in (10, 20):
            monkeypatch.setattr(writer, "MAX_PENDING", 0 if number == 10 else 50_000)
        if number % 4 == 0:
            engine.add(f"r{number}", 30 + number % 3, 60)
        engine.step()
    engine.finish()
    RECORDERS.look_up(engine.scheduler).close()
    tally, tally_alone = at_one_moment(recorded, alone)
    assert tally.dropped_steps == tally_alone.dropped_steps == 10
    assert tally.preemptions["kv_blocks"] > 0
    assert totals(tally_alone) == totals(tally)


@pytest.mark.usefixtures("recording")
def test_a_step_whose_output_comes_late_counts_as_any_other(monkeypatch):
    """The writer takes a step that is half a second old without its output."""
    monkeypatch.setattr(writer, "WRITE_LATEST_NS", -(10**18))
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)
    engine = Driver(traced_class, max_num_seqs=4, max_num_batched_tokens=64)
    recorded = Totals()
    writers = [RECORDERS.look_up(engine.scheduler).writer]
    writers[0].measuring.meter = recorded
    alone = count_beside(engine.scheduler, writers)
    engine.add("slow", 40, 8)
    for _ in range(3):
        engine.schedule()
        end_s = time.monotonic() + 20
        while not all(each._early for each in writers):
            assert time.monotonic() < end_s
            time.sleep(0.01)
        engine.update()
    while any(each._early for each in writers):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert [each.working for each in writers] == [True, True]
    engine.finish()
    RECORDERS.look_up(engine.scheduler).close()
    tally, tally_alone = at_one_moment(recorded, alone)
    assert tally.busy.device_us > 0
    assert tally_alone.busy.device_us == tally.busy.device_us
    assert totals(tally_alone) == totals(tally)


@pytest.mark.usefixtures("recording")
def test_a_step_that_decides_what_the_one_before_did_keeps_only_its_times():
    engine = Driver(traced_class, max_num_seqs=2, max_num_batched_tokens=64)
    writers, repeats = [], []
    count_beside(engine.scheduler, writers)
    put = writers[0].put_step
    writers[0].put_step = lambda call: repeats.append(type(call) is SteadyStep) or put(call)
    for name in ("runs", "runs-too", "waits"):
        engine.add(name, 16, 8)
    for _ in range(12):
        engine.step()
    RECORDERS.look_up(engine.scheduler).close()
    admitted_then_decode = [False, False]
    assert repeats == [*admitted_then_decode, *[True] * 6, *admitted_then_decode, True, True]


def switched(before):
    family = FAMILIES[LOAD[0]]
    return play(Switched(before, **family.engine), make_script(family, LOAD[1]))


def test_metrics_alone_change_no_decision_and_leave_nothing(plain):
    parts = Totals()
    engine = switched({20: lambda the: the.attach_meter(parts), 90: lambda the: the.attach_meter(None)})
    assert first_difference(plain, engine.decisions) is None
    assert [tally.steps for tally in parts.tallies] == [70]
    assert type(engine.scheduler).__module__.startswith("vllm.")
    assert RECORDERS.look_up(engine.scheduler) is None


def test_metrics_go_on_through_a_recording_that_begins_and_ends(plain, tmp_path):
    parts = Totals(Watched)
    engine = switched(
        {
            20: lambda the: the.attach_meter(parts),
            40: lambda the: the.start_recording(tmp_path / "run", None, hash_ids=True),
            90: lambda the: the.stop_recording(),
            130: lambda the: the.attach_meter(None),
        }
    )
    assert first_difference(plain, engine.decisions) is None
    assert [tally.steps for tally in parts.tallies] == [20, 50, 40]
    trace, *_ = read_run(tmp_path / "run").traces
    timeline = make_timeline(trace, None)
    starts = dict(timeline.steps.select("step", "start_us").iter_rows())
    last = max(starts)
    same(parts.tallies[1].copies[last], timeline, starts[last], last)


def joined(the, parts):
    """Switch metrics on, and wait for the writer's next round."""
    the.attach_meter(parts)
    while not parts.tallies:
        time.sleep(0.01)


def test_metrics_join_a_recording_that_is_under_way(tmp_path):
    parts = Totals()
    engine = switched(
        {
            20: lambda the: the.start_recording(tmp_path / "run", None, hash_ids=False),
            40: lambda the: joined(the, parts),
            90: lambda the: (the.stop_recording(), the.attach_meter(None)),
        }
    )
    assert 0 < sum(tally.steps for tally in parts.tallies) <= 70
    assert type(engine.scheduler).__module__.startswith("vllm.")


def test_another_receiver_ends_the_recording_for_the_first_one():
    engine, first, second = Switched(), Totals(), Totals()
    engine.attachment.attach_meter(first)
    writer = RECORDERS[engine.scheduler].writer
    engine.attachment.attach_meter(second)
    assert not writer.working
    engine.add("r0", 40)
    engine.finish()
    engine.attachment.attach_meter(None)
    assert [tally.tokens["prefill"] for tally in second.tallies] == [40]


def test_a_recording_from_the_start_gets_metrics_and_loses_them(recording):
    parts = Totals()
    engine = Driver(traced_class)
    attachment = Attachment(core_of(engine), Now())
    assert attachment.attach_meter(parts) == 0.0
    engine.add("r0", 40)
    engine.finish()
    RECORDERS.look_up(engine.scheduler).close()
    [tally] = parts.tallies
    assert tally.tokens["prefill"] == 40
    assert list(recording.iterdir())


HOSTILE = ['"} 1\nschedtrace_up 1 #', "\x1b]0;owned\x07\u202e", 'x{cause="kv_blocks"}', "a" * 10_000]


def exposed(monkeypatch):
    """Metrics of an engine with metrics alone, on a free port of the loopback interface."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    meter = EngineMeter(
        ("tiny", "0"),
        by_priority=True,
        facts=lambda: EngineFacts(None, 0.0, {"free": 1}),
        health=lambda: Health("busy"),
    )
    meter.serve(Address("127.0.0.1", 0, asked=True), 0)
    return meter


def test_hostile_ids_adapters_priorities_and_headers_reach_no_label(monkeypatch):
    meter = exposed(monkeypatch)
    engine = Switched(
        enable_lora=True, max_loras=1, max_lora_rank=8, max_num_seqs=2, scheduling_policy="priority"
    )
    engine.attachment.attach_meter(meter)
    for number, text in enumerate(HOSTILE * 5):
        adapter = LoRARequest(text + str(number), 1 + number % 3, "/secret/place")
        engine.add(
            f"{text}{number}", lora_request=adapter, priority=(-1) ** number * 2 ** (60 + number),
            max_tokens=2, trace_headers={"traceparent": text, text: text}, cache_salt=text,
        )  # fmt: skip
    engine.finish()
    engine.attachment.attach_meter(None)
    with urlopen(meter.published_on) as page:
        text = page.read().decode()
    meter.close()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len(samples) <= MOST_SERIES
    words = {value for sample in samples for name, value in sample.labels.items() if name == "cause"}
    assert "lora_cap" in words
    assert words <= {*CAUSES, NEXT_STEP, MORE}
    assert {sample.labels["model_name"] for sample in samples} == {"tiny"}
    assert [part for part in (*HOSTILE, "secret", "owned", "schedtrace_up") if part in text] == []


def test_metrics_of_an_engine_leave_those_of_its_process_alone(monkeypatch):
    """Until they are asked for, and while they are on: vLLM's ``/metrics`` is the global registry."""
    before = generate_latest(REGISTRY).decode()
    meter = exposed(monkeypatch)
    engine = Switched()
    engine.attachment.attach_meter(meter)
    engine.add("r0", 40)
    engine.finish()
    engine.attachment.attach_meter(None)
    meter.close()
    after = generate_latest(REGISTRY).decode()
    assert "schedtrace" not in after
    assert [line.split()[0] for line in after.splitlines()] == [
        line.split()[0] for line in before.splitlines()
    ]
