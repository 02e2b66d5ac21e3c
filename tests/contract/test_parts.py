"""A trace in parts, on vLLM's real scheduler: joined it is the plain trace, and every part stands alone."""

import copy
from types import SimpleNamespace

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.model import trace_bounds
from schedtrace.model.manifest import files_of, trace_of
from schedtrace.model.printable import json_of
from schedtrace.read.run import read_run
from schedtrace.record import trace_files, writer
from schedtrace.record.assemble import Assembler
from schedtrace.record.live.queue_copy import copy_queues, present_entry
from schedtrace.record.traced import traced_class
from tests.contract.deciding import Deciding, decisions, first_difference
from tests.contract.loads import FAMILIES, make_script, play
from tests.contract.test_writing_fails import FullDisk
from tests.unit.read.same import assert_same

pytestmark = pytest.mark.vllm

LOADS = ["priority_tight", "async_resets", "async_mixed", "mixed", "streaming_input"]
LINES = ("step_line", "dropped", "events_line", "output")
"""Methods of an assembler that make lines."""


class Remembered:
    """Hashes of prompts, which are given out once, for two assemblers."""

    def __init__(self, prefixes):
        self.prefixes, self.known = prefixes, {}

    def hashes(self, request_id):
        return self.known.setdefault(request_id, self.prefixes.hashes(request_id))


class Twice:
    """All that is assembled is assembled a second time, into a plain trace."""

    def __init__(self, made, path):
        self.path, self.within = path, False
        mine = made._assembler
        mine._prefixes = Remembered(mine._prefixes)
        self.twin = Assembler(
            mine._clock,
            trial_ids=mine._trial_ids,
            hash_ids=False,
            long_prefill_threshold=mine.latest_exits.long_prefill_threshold,
            prefixes=mine._prefixes,
            drafts=mine._lives._drafts,
        )
        self.lines = [made._header]
        for name in LINES:
            setattr(mine, name, self.twice(name, getattr(mine, name)))
        write = made._write

        def kept(lines):
            self.lines += [line for line in lines if getattr(line, "at_us", None) and hasattr(line, "steps")]
            write(lines)

        made._write = kept

    def twice(self, name, method):
        def both(*args):
            if self.within:
                return method(*args)
            self.within = True
            self.lines.append(getattr(self.twin, name)(*copy.deepcopy(args)))
            made = method(*args)
            self.within = False
            return made

        return both

    def write(self):
        self.path.parent.mkdir()
        self.path.write_bytes(b"".join(json_of(line) + b"\n" for line in self.lines))


class InParts(Deciding):
    """The engine does the writer's work before each step; who is there is compared with the scheduler."""

    def __init__(self, *args, plain, **options):
        super().__init__(*args, **options)
        self.made = self.scheduler._schedtrace_recorder.writer
        self.both = Twice(self.made, plain)
        self.differences = []
        self.async_scheduling = self.made._header.async_scheduling
        begin = self.made._assembler.begin_anew

        def compared():
            first, at_us, there = begin()
            salt = self.scheduler._schedtrace_recorder.facts.salt
            known = {
                one.request.request_id: present_entry(one, salt, self.made.clock)
                for one in copy_queues(self.scheduler, in_flight=bool(self.in_flight)).ordered_requests()
            }
            self.differences += [
                (first, one.request_id, name, getattr(one, name), getattr(known[one.request_id], name))
                for one in there
                if one.request_id in known and not self.preempted_since(one, known[one.request_id])
                for name in COMPARED
                if name != "computed_tokens" or not (self.both.twin._lives._drafts and self.async_scheduling)
                if getattr(one, name) != getattr(known[one.request_id], name)
            ]
            return first, at_us, there

        self.made._assembler.begin_anew = compared

        begins = self.made._output.new_file_reason
        self.made._output.new_file_reason = lambda: begins() if self.all_is_written else None

    def preempted_since(self, one, now):
        """Or set aside, between two steps: the next one tells it."""
        return one.state == "running" and now.state == "preempted"

    def schedule(self, *args):
        for self.all_is_written in (False, True):
            self.made._work(last=False)
        return super().schedule(*args)


COMPARED = (
    "state",
    "computed_tokens",
    "output_tokens",
    "num_preemptions",
    "prompt_tokens",
    "priority",
    "lora",
)


@pytest.fixture(params=LOADS, scope="module")
def played(request, tmp_path_factory):
    name, seed = request.param, 1
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder / "parts"))
        patch.setenv("SCHEDTRACE_TRACE", "maxsize=1T")
        patch.setattr(trace_bounds, "PART_BYTES", 12_000)
        patch.setattr(trace_files, "FRAME_S", 0)
        patch.setattr(writer, "DRAIN_EVERY_S", 1e6)
        patch.setattr(writer, "WRITE_LATEST_NS", 0)
        patch.setattr(writer.CpuTimes, "line", lambda *_: [])
        path = folder / "plain" / "engine-0.jsonl"
        script = make_script(FAMILIES[name], seed)
        engine = play(InParts(traced_class, plain=path, **FAMILIES[name].engine), script)
        engine.scheduler._schedtrace_recorder.close()
    engine.both.write()
    [trace] = read_run(folder / "parts").traces
    return SimpleNamespace(
        engine=engine, load=(name, seed), trace=trace, plain=read_run(folder / "plain").traces[0]
    )


def test_the_scheduler_decides_as_without(played):
    assert first_difference(decisions(*played.load), played.engine.decisions) is None


def test_joined_they_are_the_plain_trace(played):
    assert len(files_of(played.trace.path)) > 5
    assert_same(played.trace, played.plain)
    assert played.trace.problems == played.plain.problems


def test_who_is_there_is_who_the_scheduler_has(played):
    assert played.engine.differences == []


def test_each_part_can_be_read_alone(played):
    first = 0
    for part in files_of(played.trace.path):
        [alone] = read_run(part).traces
        here = played.plain.steps.filter(pl.col("step").is_between(first, first + alone.steps.height - 1))
        late = {"output_us", "update_us", "output_tokens", "execute_after_us", "execute_us"}
        assert alone.header.first_step == first
        assert alone.steps.drop(late).equals(here.drop(late))
        problems = alone.problems
        assert (problems.garbled_lines, problems.not_rebuilt, problems.refused, problems.gaps) == (
            [],
            [],
            [],
            [],
        )
        first += alone.steps.height
    assert first == played.plain.steps.height


def test_without_the_oldest_parts_it_is_the_tail(played):
    *oldest, _, _ = files_of(played.trace.path)
    for part in oldest:
        part.rename(part.with_suffix(".gone"))
    [tail] = read_run(trace_of(oldest[0])).traces
    for part in oldest:
        part.with_suffix(".gone").rename(part)
    assert 0 < tail.steps.height < played.plain.steps.height
    assert tail.steps.equals(played.plain.steps.tail(tail.steps.height))
    assert tail.problems.first_step == tail.steps["step"][0]


def test_a_disk_that_fills_up_ends_the_parts_with_a_whole_frame(tmp_path, warnings, monkeypatch):
    monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("SCHEDTRACE_TRACE", "maxsize=1G")
    monkeypatch.setattr(trace_bounds, "PART_BYTES", 5000)
    monkeypatch.setattr(trace_files, "FRAME_S", 0)
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)
    monkeypatch.setattr(trace_files, "os", FullDisk(room=15_000))
    assert first_difference(decisions("aborts", 1), decisions("aborts", 1, traced_class)) is None
    [trace] = read_run(tmp_path / "run").traces
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert trace.steps["step"].to_list() == list(range(trace.steps.height))
    assert trace.steps.height > 0
    problems = trace.problems
    assert (problems.truncated, problems.broken_frames, problems.unclosed, problems.gaps) == (
        False,
        0,
        True,
        [],
    )
