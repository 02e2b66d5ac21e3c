"""Ids that a client chose to do harm: the trace is the same but for what is written of them, and small."""

import json
import os
from functools import cache, partial
from itertools import zip_longest
from stat import S_IMODE

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from schedtrace.explain.request import find_request
from schedtrace.model.printable import capped, hashed
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from tests.contract.loads import SHORT_STEPS, under_load
from tests.fuzz.hostile import unsafe

pytestmark = pytest.mark.vllm

HUGE = "\x1b]0;owned\x07\u202e" * 100_000
"""Of a megabyte."""
TIMES = {
    "at_us",
    "start_us",
    "schedule_us",
    "output_us",
    "update_us",
    "arrived_us",
    "queued_us",
    "finished_us",
}
TIMES |= {"scheduled_us", "first_token_us", "last_token_us", "output_tokens"}
"""And what is in a line only if the output was back when it was written."""
SALT = "schedtrace.record.written_ids.os.urandom"
"""Else each trace has its own."""
SHAPES = {
    "huge": lambda name: HUGE + name,
    "controls": lambda name: f"\r\x1b[2J\x9b[red]{name}\u202e\u2028",
    "lone surrogate": lambda name: f"\ud800{name}\udfff",
    "not a string": lambda name: (7, name),
    "looks cut": lambda name: f"{name}...blake2b-{'0' * 32}",
}


class Renamed(Driver):
    """Its clients choose other ids than the load says."""

    def __init__(self, rename, **options):
        super().__init__(traced_class, **options)
        self.rename = rename

    def add(self, request_id, *arguments, **options):
        return super().add(self.rename(request_id), *arguments, **options)

    def abort(self, request_id):
        super().abort([self.rename(request_id)])


def recorded(load, rename, monkeypatch, folder):
    """The lines of a load without times, in which every id is replaced by the one that the load says."""
    monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
    monkeypatch.setenv("SCHEDTRACE_LINES", "full")
    engine = under_load(partial(Renamed, rename), load, steps=SHORT_STEPS)
    assert engine.requests
    content = (folder / "engine-0.jsonl").read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    assert lines[-1]["type"] == "end"
    assert not [line for line in lines if line["type"] == "notice"]
    return content, [untimed(line) for line in lines if line["type"] in {"step", "events"}]


def untimed(value):
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key not in TIMES}
    return [untimed(item) for item in value] if isinstance(value, list) else value


def merged(lines):
    """Whether events came with a step or by themselves is a matter of time: they stand behind all steps."""
    gone = ("arrived", "finished")
    events = [(kind, event) for kind in gone for line in lines for event in line.get(kind, [])]
    steps = [line for line in lines if line["type"] == "step"]
    return [{k: v for k, v in step.items() if k not in gone} for step in steps] + events


def first_difference(told, expected):
    """In a few words, since an id may have a megabyte."""
    for one, other in zip_longest(told, expected):
        if one != other:
            return f"{ascii(one)[:500]} != {ascii(other)[:500]}"
    return ""


def renamed(value, names):
    if isinstance(value, dict):
        return {key: renamed_field(key, item, names) for key, item in value.items()}
    return [renamed(item, names) for item in value] if isinstance(value, list) else value


def renamed_field(key, value, names):
    if key.endswith("request_id") and value is not None:
        return names.get(value, value)
    if key.endswith("holders") and isinstance(value, list):
        return [names.get(one, one) for one in value]
    if key == "also":  # requests that took the same exit, each with its budget
        return [[names.get(request_id, request_id), budget] for request_id, budget in value]
    return renamed(value, names)


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    """What is recorded of a load with its own ids."""

    @cache
    def of(load):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SALT, bytes)
            return recorded(load, str, patch, tmp_path_factory.mktemp(load) / "run")[1]

    return of


@pytest.mark.parametrize(
    ("load", "shape", "hash_ids"),
    [
        *(("async_aborts", shape, False) for shape in SHAPES),
        *(("priority_tight", "huge", hash_ids) for hash_ids in (False, True)),
        ("async_aborts", "lone surrogate", True),
        ("lora_cap", "controls", False),
    ],
)
def test_the_trace_is_that_of_harmless_ids_but_for_the_ids(
    load, shape, hash_ids, harmless, monkeypatch, tmp_path
):  # fmt: skip
    rename, write = SHAPES[shape], hashed if hash_ids else capped
    expected = harmless(load)
    monkeypatch.setattr(SALT, bytes)
    if hash_ids:
        monkeypatch.setenv("SCHEDTRACE_HASH_IDS", "1")
    content, lines = recorded(load, rename, monkeypatch, tmp_path / "hostile")
    ids = {event["request_id"] for line in expected for event in line.get("arrived", [])}
    names = {write(rename(name)): name for name in ids}
    assert len(names) == len(ids) > 20
    assert first_difference(merged(renamed(lines, names)), merged(expected)) == ""
    assert unsafe(content.decode()) == set()
    assert (content.count(b"for_request_id") > 3) == (load != "lora_cap")


def test_a_megabyte_of_an_id_costs_no_more_than_the_longest_that_is_kept(monkeypatch, tmp_path):
    sizes = []
    for name in ("i" * len(capped(HUGE)), HUGE):
        folder = tmp_path / str(len(sizes))
        monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
        engine = Driver(traced_class)
        engine.add(name, prompt=20, max_tokens=60)
        engine.finish()
        sizes.append((folder / "engine-0.jsonl").stat().st_size)
        trace, found = find_request(read_run(folder), name)
        assert found == capped(name)
        assert trace.requests().collect().height == 60
    assert len(HUGE) > 10**6
    assert sizes[1] < sizes[0] * 5  # every control character of the beginning takes 6 bytes in JSON
    assert sizes[1] < 80_000


def test_what_else_a_client_chooses_is_bounded_as_well(recording):
    engine = Driver(traced_class, enable_lora=True, max_loras=2, max_lora_rank=8)
    adapter = LoRARequest("l" * 10**6, 1, "/secret/place")
    engine.add("a", lora_request=adapter, priority=2**63, max_tokens=2)
    engine.add("b", priority=-(2**70), max_tokens=2)
    engine.finish()
    arrivals = read_run(recording).traces[0].arrivals
    assert arrivals["lora"].to_list() == [capped("l" * 10**6), None]
    assert arrivals["priority"].to_list() == [10**18 - 1, 1 - 10**18]
    assert b"/secret" not in (recording / "engine-0.jsonl").read_bytes()


@pytest.mark.usefixtures("recording")
def test_ids_of_those_who_left_are_forgotten():
    engine = Driver(traced_class)
    for n in range(5):
        engine.add(HUGE + str(n), max_tokens=2)
    engine.finish()
    assert engine.scheduler._schedtrace_recorder.writer._assembler._ids == {}


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_the_owner_may_read_what_is_recorded(umask, recording):
    before = os.umask(umask)
    try:
        engine = Driver(traced_class)
        engine.add("a")
        engine.finish()
    finally:
        os.umask(before)
    assert S_IMODE(recording.stat().st_mode) == 0o700
    modes = {file.name: S_IMODE(file.stat().st_mode) for file in recording.iterdir()}
    assert modes == {"engine-0.jsonl": 0o600, "run.json": 0o600}


def test_an_error_that_quotes_an_id_makes_a_short_notice(recording, warnings, monkeypatch):
    engine = Driver(traced_class)
    engine.add("a")

    def fails(*_):
        raise KeyError(HUGE)

    monkeypatch.setattr(engine.scheduler._schedtrace_recorder, "count_waiting", fails)
    engine.finish()
    [warning] = warnings
    assert len(warning) < 700
    assert unsafe(warning) == set()
    [trace] = read_run(recording).traces
    assert [len(notice) < 700 for notice in trace.notices] == [True]
    assert msgspec.json.encode(trace.notices)
