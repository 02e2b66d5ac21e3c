"""Turns of a session on vLLM's scheduler: each is sent its delay after the answer to the turn before."""

import json

import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.simulate.replay import play_loads
from schedtrace.step_times.constants import Constants
from schedtrace.workloads import open_workload

pytestmark = pytest.mark.vllm

ENGINE = {"num_blocks": 200, "max_model_len": 512, "enable_prefix_caching": True}
ROWS = [
    {"session_id": "a", "timestamp": 0, "input_length": 64, "output_length": 5},
    {"session_id": "a", "delay": 200, "input_length": 40, "output_length": 6},
    {"session_id": "a", "delay": 0, "input_length": 16, "output_length": 3},
    {"session_id": "b", "timestamp": 30, "input_length": 600, "output_length": 9},
    {"session_id": "b", "delay": 10, "input_length": 20, "output_length": 2, "context_mode": None},
    {"session_id": "c", "timestamp": 40, "input_length": 20, "output_length": 2},
    {"session_id": "c", "timestamp": 5000, "input_length": 20, "output_length": 2},
]


@pytest.fixture
def played(tmp_path):
    """The load of these rows and its trace."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    load = open_workload(path)
    result = play_loads([load], ENGINE, Constants(), tmp_path / "run", trial_ids=True)
    [trace] = read_run(tmp_path / "run").traces
    return load, result, trace


def test_a_turn_follows_the_answer_to_the_turn_before(played):
    load, result, trace = played
    names = {request.request_id: f"t1-{number}" for number, request in enumerate(load)}
    arrived = dict(trace.arrivals.select("request_id", "arrived_us").iter_rows())
    ended = dict(trace.finishes.select("request_id", "finished_us").iter_rows())
    refused = [request.request_id for request in load if request.prompt_tokens >= 512]
    assert len(refused) == 2  # the long prompt, and the turn with it before its own
    assert result.refused == [names[name] for name in refused]
    waited = 0
    for request in load:
        if request.after is None or request.request_id in refused:
            continue
        after_answer = ended[names[request.after]] + request.delay_us
        assert arrived[names[request.request_id]] == pytest.approx(
            max(after_answer, request.arrived_us), abs=2
        )
        waited += after_answer > request.arrived_us
    assert waited == 2  # those of session a; that of c has a later time of its own


def test_a_turn_finds_the_prompt_of_the_turn_before_in_the_cache(played):
    load, _, trace = played
    names = {request.request_id: f"t1-{number}" for number, request in enumerate(load)}
    rows = trace.requests().select("request_id", "computed_tokens").collect()
    first_seen = dict(reversed(rows.rows()))
    by_id = {request.request_id: request for request in load}
    hits = {
        request.prompt_tokens: first_seen[names[request.request_id]]
        for request in load
        if request.after is not None and names[request.request_id] in first_seen
    }
    before = {
        request.prompt_tokens: by_id[request.after].prompt_tokens // 16 * 16
        for request in load
        if request.after is not None and names[request.request_id] in first_seen
    }
    assert hits == before
    assert hits[64 + 5 + 40] == 64
