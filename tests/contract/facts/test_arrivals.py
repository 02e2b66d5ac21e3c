"""What a request asks for, and which prompts begin alike."""

import json
from itertools import combinations

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from schedtrace.record.arrival_facts import MOST_BLOCKS
from tests.contract.facts.told import Traced, events, lines, trace_file

pytestmark = pytest.mark.vllm

ASKED = ["client_index", "logprobs", "prompt_logprobs", "structured", "min_tokens", "logit_bias"]
NOTHING = {"client_index": 0}


def arrived(engine, recording, **options):
    """The fields of the one arrival that say what it asks for."""
    sampling = options.pop("sampling", None)
    request = engine.make_request("r", **options)
    if sampling is not None:
        request.sampling_params = sampling
    engine.requests["r"] = request
    engine.scheduler.add_request(request)
    engine.abort("r")
    engine.step()
    engine.scheduler.shutdown()
    [arrival] = events(recording, "arrived")
    return {name: arrival[name] for name in ASKED if name in arrival}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, NOTHING),
        ({"client_index": 3}, {"client_index": 3}),
        ({"structured_outputs": StructuredOutputsParams(json="{}")}, NOTHING | {"structured": True}),
        ({"sampling": SamplingParams(logprobs=5)}, NOTHING | {"logprobs": 5}),
        ({"sampling": SamplingParams(prompt_logprobs=0)}, NOTHING | {"prompt_logprobs": 0}),
        ({"sampling": SamplingParams(min_tokens=7)}, NOTHING | {"min_tokens": 7}),
        ({"sampling": SamplingParams(logit_bias={1: 0.5, 9: -1.0})}, NOTHING | {"logit_bias": 2}),
    ],
)
def test_what_it_asks_for(options, expected, recording):
    assert arrived(Traced(), recording, **options) == expected


def test_children_of_one_request_are_told_by_their_ids(recording):
    engine = Traced()
    for request_id in ("0_chatcmpl-a", "1_chatcmpl-a", "0_chatcmpl-b", "plain", "9", "x_chatcmpl-a"):
        engine.add(request_id, max_tokens=1)
    engine.finish()
    told = {entry["request_id"]: entry for entry in events(recording, "arrived")}
    parents = {name: entry.get("parent") for name, entry in told.items()}
    assert parents["0_chatcmpl-a"] == parents["1_chatcmpl-a"] != parents["0_chatcmpl-b"]
    assert [told[name].get("sibling_index") for name in told] == [0, 1, 0, None, None, None]
    assert [parents[name] for name in ("plain", "9", "x_chatcmpl-a")] == [None] * 3
    assert "chatcmpl" not in parents["0_chatcmpl-a"]


def alike(one, other):
    """Leading items that two sequences share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def by_fours(text):
    return [text[place : place + 4] for place in range(0, len(text), 4)]


def test_prompts_that_begin_alike_are_told_by_their_hashes(recording):
    """For every pair of prompts, the shared leading blocks are those that the tokens themselves share."""
    engine = Traced(enable_prefix_caching=True)
    for number in range(40):
        engine.add(
            f"r{number}", prompt=20 + 5 * number, shared=min(7 * number, 15 + 5 * number), max_tokens=2
        )
    engine.finish()
    told = {entry["request_id"]: entry.get("prefix_hashes", "") for entry in events(recording, "arrived")}
    tokens = {request_id: request.prompt_token_ids for request_id, request in engine.requests.items()}
    assert {one: len(text) // 4 for one, text in told.items()} == {
        one: len(tokens[one]) // 16 for one in told
    }
    shared = set()
    for one, other in combinations(told, 2):
        blocks = alike(tokens[one], tokens[other]) // 16
        assert alike(by_fours(told[one]), by_fours(told[other])) == blocks
        shared.add(blocks)
    assert shared == set(range(13))


def test_a_long_prompt_has_hashes_of_its_first_blocks_only(recording):
    engine = Traced(enable_prefix_caching=True, max_model_len=8192)
    engine.add("long", prompt=5000, max_tokens=1)
    engine.finish()
    [entry] = events(recording, "arrived")
    assert len(entry["prefix_hashes"]) == 4 * MOST_BLOCKS


def test_the_same_prompt_has_other_hashes_in_another_trace(tmp_path, monkeypatch):
    texts = []
    for name in ("one", "other"):
        monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(tmp_path / name))
        engine = Traced(enable_prefix_caching=True)
        engine.add("0_r", prompt=64, max_tokens=1)
        engine.finish()
        [entry] = events(tmp_path / name, "arrived")
        texts.append((entry["prefix_hashes"], entry["parent"]))
    assert texts[0][0] != texts[1][0]
    assert texts[0][1] != texts[1][1]


def test_no_hash_of_vllm_and_no_salt_is_written(recording):
    engine = Traced(enable_prefix_caching=True)
    request = engine.add("0_secret", prompt=64, max_tokens=1)
    prefixes = engine.scheduler._schedtrace_recorder._writer.prefixes
    keys = [prefixes._salt._key, engine.scheduler._schedtrace_recorder.facts._salt._key]
    hashes = list(request.block_hashes)
    engine.finish()
    written = trace_file(recording).read_bytes()
    for secret in (*keys, *hashes):
        assert secret not in written
        assert secret.hex().encode() not in written
        assert json.dumps(list(secret)).encode() not in written
    assert len({*keys}) == 2


def test_without_prefix_caching_there_are_no_hashes(recording):
    engine = Traced()
    engine.add("r", prompt=64, max_tokens=1)
    engine.finish()
    [entry] = events(recording, "arrived")
    assert "prefix_hashes" not in entry
    assert {"received_us", "input_queue_us"}.isdisjoint(entry)  # no engine around this scheduler
    assert lines(recording)[-1]["type"] == "end"
