"""Exports lie on the clock of a torch profile of the same run."""

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from schedtrace.export import ExportKind
from schedtrace.export.exports import export
from schedtrace.read.run import read_run
from tests.e2e.conftest import MODEL, Command

NEAR_US = 1000
EXECUTED = re.compile(r"execute_context_\d+\((\d+)\)_generation_\d+\((\d+)\)")
"""What vLLM names a step in the profile: tokens of prompts, and of generation."""


@pytest.fixture(scope="module")
def profiled(workplace):
    """A recorded run, and the torch profile of its last steps."""
    variables = {"SCHEDTRACE_DIR": str(workplace / "recorded"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    script = Path(__file__).with_name("profiled.py")
    ended = Command(script, MODEL, workplace / "profile", cwd=workplace, **variables).ended()
    assert ended.code == 0, ended.err
    [folder] = (workplace / "recorded").iterdir()
    [file] = (workplace / "profile").glob("*.json.gz")
    return read_run(folder), json.loads(gzip.decompress(file.read_bytes()))


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


def test_chrome_json_has_the_times_of_a_torch_profile(profiled, tmp_path):
    run, profile = profiled
    [file] = export(run, tmp_path, kind=ExportKind.CHROME)
    document = json.loads(gzip.decompress(file.read_bytes()))
    assert document["baseTimeNanoseconds"] == profile["baseTimeNanoseconds"]
    slices = [
        (event["ts"], event["ts"] + event["dur"], args["prefill_tokens"], args["decode_tokens"])
        for event in document["traceEvents"]
        if event["name"] == "execute" and (args := event["args"])
    ]
    assert_on_one_clock(slices, executed(profile))


def test_a_perfetto_trace_has_the_times_of_a_torch_profile(profiled, tmp_path):
    run, profile = profiled
    [file] = export(run, tmp_path, kind=ExportKind.PERFETTO)
    packets = pb.Trace.FromString(file.read_bytes()).packet
    names = {name.iid: name.name for one in packets for name in one.interned_data.debug_annotation_names}
    slices = []
    for begin, end in pairwise(packets):
        if begin.track_event.name == "execute":
            told = {names[one.name_iid]: one.int_value for one in begin.track_event.debug_annotations}
            times = [(one.timestamp - profile["baseTimeNanoseconds"]) / 1000 for one in (begin, end)]
            slices.append((*times, told["prefill_tokens"], told["decode_tokens"]))
    assert_on_one_clock(slices, executed(profile))
