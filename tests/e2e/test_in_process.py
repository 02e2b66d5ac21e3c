"""The in-process engine, recorded through the plugin alone: its preemptions, and a torch profile's clock."""

import gzip
import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from schedtrace.export import ExportKind
from schedtrace.export.exports import write_exports
from schedtrace.read.run import read_run
from tests.e2e.conftest import MODEL, Command, findings

NEAR_US = 1000
EXECUTED = re.compile(r"execute_context_\d+\((\d+)\)_generation_\d+\((\d+)\)")
"""What vLLM names a step in the profile: tokens of prompts, and of generation."""


@dataclass
class InProcess:
    """The run of ``in_process.py``: its folder, the torch profile of its last steps, and what it printed."""

    folder: Path
    profile: dict
    preemptions: int


@pytest.fixture(scope="module")
def in_process(workplace):
    variables = {"SCHEDTRACE_DIR": str(workplace / "recorded"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    script = Path(__file__).with_name("in_process.py")
    ended = Command(script, MODEL, workplace / "profile", cwd=workplace, **variables).ended()
    assert ended.code == 0, ended.err[-3000:]
    [counted] = [json.loads(line) for line in ended.out.splitlines() if line.startswith('{"vllm:')]
    [folder] = (workplace / "recorded").iterdir()
    [file] = (workplace / "profile").glob("*.json.gz")
    profile = json.loads(gzip.decompress(file.read_bytes()))
    return InProcess(folder, profile, counted["vllm:num_preemptions"])


def test_preemptions_equal_vllms_own_counter_with_a_small_kv_cache(in_process, analyzed):
    run = analyzed(in_process.folder)
    assert run["problems"] == []
    (preemption,) = findings(run, "preemption")
    assert preemption["count"] == in_process.preemptions == run["trials"][0]["preemptions"] > 0
    assert preemption["evidence"]["victims"] <= in_process.preemptions
    assert "kv_blocks" in {finding["cause"] for finding in findings(run, "blocked-budget")}
    assert run["trials"][0]["requests_finished"] == 12 + 4


def executed(document):
    """Of a profile: begin and end of each step in microseconds, its tokens of prefill and decode."""
    named = [(event, EXECUTED.match(event["name"])) for event in document["traceEvents"] if "dur" in event]
    return sorted(
        (event["ts"], event["ts"] + event["dur"], *map(int, match.groups()))
        for event, match in named
        if match
    )


def assert_on_one_clock(slices, profile):
    assert len(profile) == 12
    assert [of_step[2:] for of_step in slices[-12:]] == [of_step[2:] for of_step in profile]
    late = [theirs[0] - ours[0] for ours, theirs in zip(slices[-12:], profile, strict=True)]
    early = [ours[1] - theirs[1] for ours, theirs in zip(slices[-12:], profile, strict=True)]
    # The profile's events are the forward pass; ours begin with the worker's call and end with sampling.
    assert min(late + early) > -NEAR_US
    assert abs(median(late)) < NEAR_US


def test_chrome_json_has_the_times_of_a_torch_profile(in_process, tmp_path):
    run, profile = read_run(in_process.folder), in_process.profile
    [file] = write_exports(run, tmp_path, kind=ExportKind.CHROME)
    document = json.loads(gzip.decompress(file.read_bytes()))
    assert document["baseTimeNanoseconds"] == profile["baseTimeNanoseconds"]
    slices = [
        (event["ts"], event["ts"] + event["dur"], args["prefill_tokens"], args["decode_tokens"])
        for event in document["traceEvents"]
        if event["name"] == "execute" and (args := event["args"])
    ]
    assert_on_one_clock(slices, executed(profile))


def test_a_perfetto_trace_has_the_times_of_a_torch_profile(in_process, tmp_path):
    run, profile = read_run(in_process.folder), in_process.profile
    [file] = write_exports(run, tmp_path, kind=ExportKind.PERFETTO)
    packets = pb.Trace.FromString(file.read_bytes()).packet
    names = {name.iid: name.name for one in packets for name in one.interned_data.debug_annotation_names}
    slices = []
    for begin, end in pairwise(packets):
        if begin.track_event.name == "execute":
            told = {names[one.name_iid]: one.int_value for one in begin.track_event.debug_annotations}
            times = [(one.timestamp - profile["baseTimeNanoseconds"]) / 1000 for one in (begin, end)]
            slices.append((*times, told["prefill_tokens"], told["decode_tokens"]))
    assert_on_one_clock(slices, executed(profile))
