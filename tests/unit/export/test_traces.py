"""Traces for viewers, read back: Perfetto's by its own classes."""

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from schedtrace.export import ExportKind
from schedtrace.export.exports import write_exports
from schedtrace.export.scene import process_tracks
from schedtrace.model.trace import Events, Exit, Preemption, ScheduledRequest
from schedtrace.model.trace_facts import DummyBatch, RankSync
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests import makers
from tests.makers import arrival, finish, step
from tests.unit.present.test_goldens import check

WALL_US = 1_795_357_068_232_773
MONOTONIC_US = 23_630_827_665
TORCH_BASE_NS = 1_790_857_026_000_000_000
"""As a torch profile had it that was made in the same minute as the trace with this anchor."""
FOUND = Path(__file__).parents[2] / "data" / "findings"
HOSTILE = "<script>alert(1)</script>\"'\u202e\x1b\n" + "x" * 10_000


def lines(victim):
    """Two steps that overlap, a preemption, a dummy batch; nothing is left to do between 9 and 20 ms."""
    new = [ScheduledRequest("a", 0, 600, "new"), ScheduledRequest(victim, 0, 300, "new")]
    refused = Exit("waiting", "break", "kv_blocks", victim, budget_left=999)
    ran = {"update_us": 200, "execute_after_us": 300, "execute_us": 2000}
    arrivals = [arrival("a", 400, 600, prompt_tokens=600), arrival(victim, 300, 700, prompt_tokens=300)]
    return [
        step(
            0,
            start=1000,
            back=3000,
            requests=new,
            total_requests=2,
            running=2,
            remaining_budget=100,
            prefill_tokens=900,
            kv_blocks_free_after=10,
            arrived=arrivals,
            **ran,
        ),
        step(
            1,
            start=2000,
            back=4000,
            requests=[ScheduledRequest("a", 600, 1), ScheduledRequest(victim, 300, 1)],
            total_requests=2,
            running=2,
            decode_tokens=2,
            remaining_budget=998,
            kv_blocks_free_after=5,
            **ran,
        ),
        step(
            2,
            start=7000,
            back=1000,
            requests=[ScheduledRequest("a", 601, 1)],
            total_requests=1,
            running=1,
            decode_tokens=1,
            waiting=1,
            remaining_budget=999,
            ended=refused,
            preempted=[Preemption(victim, 301, "a")],
            kv_blocks_free_after=8,
        ),
        Events(at_us=9000, finished=[finish("a", finished_us=8100), finish(victim, finished_us=9000)]),
        step(
            3,
            start=20_000,
            back=None,
            kv_blocks_free_after=100,
            dummies=[DummyBatch(15_000, 402, 0, 7)],
            syncs=[RankSync(15_401, 50, 0, 7)],
        ),
    ]


@pytest.fixture
def folder(tmp_path):
    for rank, victim in enumerate(["v", HOSTILE]):
        anchors = {
            "wall_anchor_us": WALL_US,
            "monotonic_anchor_us": MONOTONIC_US + 500 * rank,
            "clock_id": "c",
        }
        path = makers.run_folder(tmp_path / "run", *lines(victim), engine_rank=rank, **anchors)
    return path


def perfetto(folder, out):
    [(file, count)] = write_exports(read_run(folder), out, kind=ExportKind.PERFETTO).items()
    assert file.name == "trace.pftrace"
    return Read(pb.Trace.FromString(file.read_bytes())), count


def chrome(folder, out):
    [(file, count)] = write_exports(read_run(folder), out, kind=ExportKind.CHROME).items()
    assert file.name == "trace.json.gz"
    return json.loads(gzip.decompress(file.read_bytes())), count


class Read:
    """A Perfetto trace: slices, marks, values and arrows by the names of their tracks, in microseconds."""

    def __init__(self, trace):
        self.packets = trace.packet
        described = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
        self.tracks = {one.uuid: one for one in described}
        assert len(self.tracks) == len(described)
        self.facts = {
            name.iid: name.name for p in trace.packet for name in p.interned_data.debug_annotation_names
        }
        self.slices, self.marks, self.values = defaultdict(list), defaultdict(list), defaultdict(list)
        self.flows = defaultdict(list)
        open_at = {}
        for packet in trace.packet:
            if packet.HasField("track_event"):
                self._event(packet, packet.track_event, open_at)
        assert open_at == {}

    def _event(self, packet, event, open_at):
        us = packet.timestamp / 1000 - WALL_US
        name = self.name(event.track_uuid)
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_at
            open_at[event.track_uuid] = (us, event)
        elif event.type == pb.TrackEvent.TYPE_SLICE_END:
            begin, opened = open_at.pop(event.track_uuid)
            self.slices[name].append((begin, us, opened.name, self.told(opened)))
        elif event.type == pb.TrackEvent.TYPE_COUNTER:
            self.values[name].append((us, event.counter_value))
        else:
            self.marks[name].append((us, event.name, self.told(event)))
            for flow in (*event.flow_ids, *event.terminating_flow_ids):
                self.flows[flow].append((us, name))

    def name(self, uuid):
        """From the process down."""
        one = self.tracks[uuid]
        return (
            *(self.name(one.parent_uuid) if one.parent_uuid else ()),
            one.name or one.process.process_name,
        )

    def told(self, event):
        return {
            self.facts[note.name_iid]: note.string_value if note.HasField("string_value") else note.int_value
            for note in event.debug_annotations
        }


def described(read, process):
    """A line for all that one process has, below the name of its track."""
    for kind in (read.slices, read.values, read.marks):
        for name, told in kind.items():
            if name[0] == process:
                yield "/".join(name)
                yield from (
                    "  " + " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in one)
                    for one in told
                )
    for arrow in read.flows.values():
        if arrow[0][1][0] == process:
            yield "arrow " + " -> ".join(f"{us:g} {'/'.join(name)}" for us, name in arrow)


def test_all_of_a_run_by_hand(folder, tmp_path):
    """UPDATE_GOLDENS=1 writes it again (then read it)."""
    read, count = perfetto(folder, tmp_path / "out")
    check("perfetto", "".join(f"{line}\n" for line in described(read, "run, rank 0")))
    assert len([name for name in read.slices if name[0] == "run, rank 1"]) == 7
    events = (read.slices, read.marks, read.values)
    assert count == sum(len(told) for kind in events for told in kind.values())


def test_ranks_are_on_one_clock_which_is_a_torch_profiles(folder, tmp_path):
    read, _ = perfetto(folder, tmp_path / "out")
    first = [read.slices[f"run, rank {rank}", "scheduler", "steps"][0][0] for rank in (0, 1)]
    assert first == [1000, 1500]
    [snapshot] = [p.clock_snapshot for p in read.packets if p.HasField("clock_snapshot")]
    assert {one.clock_id: one.timestamp for one in snapshot.clocks} == {
        pb.BUILTIN_CLOCK_REALTIME: WALL_US * 1000,
        pb.BUILTIN_CLOCK_MONOTONIC: MONOTONIC_US * 1000,
        pb.BUILTIN_CLOCK_TRACE_FILE: WALL_US * 1000 - TORCH_BASE_NS,
    }
    assert snapshot.primary_trace_clock == pb.BUILTIN_CLOCK_TRACE_FILE
    assert read.packets[0].trace_packet_defaults.timestamp_clock_id == pb.BUILTIN_CLOCK_REALTIME
    document, _ = chrome(folder, tmp_path / "out")
    assert document["baseTimeNanoseconds"] == TORCH_BASE_NS
    assert document["otherData"]["monotonic_ns"] == MONOTONIC_US * 1000
    steps = [event for event in document["traceEvents"] if event["name"] == "step 0"]
    assert [event["ts"] * 1000 for event in steps] == [
        WALL_US * 1000 + us * 1000 - TORCH_BASE_NS for us in (1000, 1500)
    ]


def test_chrome_json_has_what_perfettos_trace_has(folder, tmp_path):
    read, _ = perfetto(folder, tmp_path / "out")
    document, count = chrome(folder, tmp_path / "out")
    events = document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert not {tid for _, tid in names} & set(processes)

    def us(event):
        return round(event["ts"] - (WALL_US - TORCH_BASE_NS / 1000), 3)

    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            name = (processes[event["pid"]], names[event["pid"], event["tid"]])
            told = (us(event), us(event) + event["dur"], event["name"], event["args"])
            slices[name].append(told)
    assert slices == {(name[0], ": ".join(name[2:])): told for name, told in read.slices.items()}
    phases = Counter(event["ph"] for event in events)
    assert phases["s"] == phases["f"] == len(read.flows) == 2
    assert phases["i"] == sum(map(len, read.marks.values()))
    values = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            for series, value in event["args"].items():
                values[processes[event["pid"]], "scheduler", event["name"], series].append((us(event), value))
    assert values == read.values
    assert count == sum(phases[kind] for kind in "XiC")
    arrows = [(e["ph"], e["id"], names[e["pid"], e["tid"]]) for e in events if e["ph"] in "sf"][:2]
    assert arrows == [("s", arrows[0][1], "requests: a"), ("f", arrows[0][1], "requests: v")]


@pytest.mark.parametrize("name", ["preemption", "rank-imbalance"])
def test_counts_of_a_recorded_run_equal_its_trace(name, tmp_path):
    run = read_run(FOUND / name / "shows")
    read, _ = perfetto(run.path, tmp_path / "out")
    for trace in run.traces:
        timeline = make_timeline(trace, whole=True)
        rank = f"shows, rank {trace.header.engine_rank}"
        slices = Counter()
        for track, told in read.slices.items():
            if track[0] == rank:
                slices[track[2].split()[0]] += len(told)
                assert all(end <= begin for (_, end, *_), (begin, *_) in pairwise(told)), track
        steps = trace.steps
        assert slices["steps"] == steps.height
        calls = steps.height + steps["update_us"].count()
        assert slices["engine"] == calls + trace.dummies.height + trace.syncs.height
        assert slices["execution"] == steps["execute_us"].count()
        assert slices["requests"] == timeline.request_states.height
        budget = read.values[rank, "scheduler", "token budget", "unused"]
        assert [value for _, value in budget if value] == [left for left in steps["remaining_budget"] if left]
        marks = [m for track, told in read.marks.items() if track[0] == rank for m in told]
        assert [what for _, what, _ in marks].count("preempted") == timeline.preemptions.height
    named = [flow for flow in read.flows.values() if len(flow) == 2]
    assert len(named) == len(read.flows)
    assert bool(named) == (name == "preemption")


def test_what_overlaps_on_an_engine_by_more_than_rounding_keeps_its_time(run_of, tmp_path):
    one = step(0, start=9000, dummies=[DummyBatch(100, 500)], syncs=[RankSync(400, 100, 0, 1)])
    run = run_of("r", one, wall_anchor_us=WALL_US)
    read, _ = perfetto(run.path, tmp_path / "out")
    times = {name[2]: [slice_[:2] for slice_ in told] for name, told in read.slices.items()}
    assert times["engine"] == [(100, 600), (9000, 9100)]
    assert times["engine 2"] == [(400, 500)]


@pytest.mark.parametrize("preempter", [None, "a", "unknown"])
def test_there_is_no_arrow_from_nobody_or_itself(run_of, tmp_path, preempter):
    run = run_of(
        "r", step(0, got={"a": 9}, new="a"), step(1, waiting=1, preempted=[Preemption("a", 9, preempter)])
    )
    read, _ = perfetto(run.path, tmp_path / "out")
    assert read.flows == {}
    assert [mark[1] for told in read.marks.values() for mark in told] == ["preempted"]


def test_a_trace_that_lacks_steps_is_labelled_so(run_of):
    [process] = process_tracks(run_of("r", step(0, got={"a": 1}), step(3, start=30_000, got={"a": 1})))
    assert process.labels == [
        "model tiny",
        "host box",
        "clock monotonic",
        "pid 1",
        "incomplete: 2 steps missing",
    ]


def test_ids_are_as_recorded(folder, tmp_path):
    read, _ = perfetto(folder, tmp_path / "out")
    assert ("run, rank 1", "scheduler", "requests", HOSTILE) in read.slices
    document, _ = chrome(folder, tmp_path / "out")
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"]
    assert f"requests: {HOSTILE}" in names


@pytest.mark.parametrize("kind", [ExportKind.PERFETTO, ExportKind.CHROME])
def test_a_trace_without_steps_and_a_name_that_is_no_utf8(kind, tmp_path):
    empty = makers.run_folder(tmp_path / "r\udcff")
    assert list(write_exports(read_run(empty), tmp_path / "out", kind=kind).values()) == [0]
