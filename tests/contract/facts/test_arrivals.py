"""What a request asks for, and which prompts begin alike."""

import json
from itertools import combinations

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from schedtrace.model.trace_facts import MARKED_BLOCKS, marks_within
from schedtrace.record.facts import Prefixes
from schedtrace.simulate import Driver
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


@pytest.mark.parametrize("caching", [True, False])
def test_prompts_that_begin_alike_are_told_by_their_hashes(recording, caching):
    """For every pair of prompts, the shared leading blocks are those that the tokens themselves share."""
    engine = Traced(enable_prefix_caching=caching)
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


@pytest.mark.parametrize("caching", [True, False])
def test_what_long_prompts_share_is_known_to_a_mark(recording, caching):
    """Two prompts differ within a block: their texts are equal up to the last mark before it."""
    engine = Traced(
        enable_prefix_caching=caching, max_model_len=32768, num_blocks=4000, max_num_batched_tokens=8192
    )
    tokens, shared = list(range(100, 1900)) * 17, 16 * 1500 + 5
    other = [*tokens[:shared], 99, *tokens[shared + 1 :]]
    engine.add("long", prompt=tokens[:30000], max_tokens=1)
    engine.add("other", prompt=other[:28000], max_tokens=1)
    engine.finish()
    texts = [entry["prefix_hashes"] for entry in events(recording, "arrived")]
    assert [len(text) // 4 for text in texts] == [marks_within(30000 // 16), marks_within(28000 // 16)]
    assert len(texts[0]) // 4 == 256 + 128 + 128 + 106  # to 512, 1,024, and by 8 blocks to 1,872
    alike_marks = alike(*map(by_fours, texts))
    assert alike_marks == marks_within(1500)
    assert 1500 - 8 < MARKED_BLOCKS[alike_marks - 1] <= 1500


@pytest.mark.parametrize("caching", [True, False])
def test_the_same_prompt_has_other_hashes_in_another_trace(tmp_path, monkeypatch, caching):
    texts = []
    for name in ("one", "other"):
        monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(tmp_path / name))
        engine = Traced(enable_prefix_caching=caching)
        engine.add("0_r", prompt=64, max_tokens=1)
        engine.finish()
        [entry] = events(tmp_path / name, "arrived")
        texts.append((entry["prefix_hashes"], entry["parent"]))
    assert texts[0][0] != texts[1][0]
    assert texts[0][1] != texts[1][1]


def test_no_hash_of_vllm_and_no_salt_is_written(recording):
    engine = Traced(enable_prefix_caching=True)
    request = engine.add("0_secret", prompt=64, max_tokens=1)
    prefixes = engine.scheduler._schedtrace_recorder.writer.prefixes
    keys = [prefixes._salt._key, engine.scheduler._schedtrace_recorder.facts.salt._key]
    hashes = list(request.block_hashes)
    engine.finish()
    written = trace_file(recording).read_bytes()
    for secret in (*keys, *hashes):
        assert secret not in written
        assert secret.hex().encode() not in written
        assert json.dumps(list(secret)).encode() not in written
    assert len({*keys}) == 2


def test_without_prefix_caching_salts_and_images_tell_prompts_apart_as_vllm_does():
    """Equal tokens under another salt are another prompt; of an image the tokens tell nothing."""
    engine = Driver(lambda cls: cls)
    requests = [engine.make_request(name, prompt=64, max_tokens=1) for name in ("plain", "salted", "image")]
    for request in requests[1:]:
        request.prompt_token_ids = requests[0].prompt_token_ids
    requests[1].cache_salt = "s"
    requests[2].mm_features = [object()]
    prefixes = Prefixes(block_size=16)
    for request in requests:
        prefixes.keep_prompt(request)
    plain, salted, image = (prefixes.hashes(request.request_id) for request in requests)
    assert len(plain) == len(salted) == 4 * 4
    assert plain[:4] != salted[:4]
    assert image is None


def test_tokens_that_are_no_integers_have_no_hashes():
    request = Driver(lambda cls: cls).make_request("r", prompt=64, max_tokens=1)
    prefixes = Prefixes(block_size=16)
    for odd in (1.5, None, 2**70):
        request.prompt_token_ids = [odd] * 64
        prefixes.keep_prompt(request)
        assert prefixes.hashes("r") is None


@pytest.mark.parametrize("caching", [True, False])
def test_a_session_keeps_the_hashes_of_its_first_part(recording, caching):
    """The next part may come before the first one is written."""
    engine = Traced(enable_prefix_caching=caching)
    for text in (1, 2):
        engine.add(f"s{text}", prompt=64, max_tokens=1, text=text, resumable=True)
    for text in (1, 2):
        engine.scheduler.add_request(
            engine.make_request(f"s{text}", prompt=64, max_tokens=1, text=3, resumable=True)
        )
    engine.step()
    engine.abort("s1")
    engine.abort("s2")
    engine.scheduler.shutdown()
    first, second, *updates = events(recording, "arrived")
    assert len(first["prefix_hashes"]) == 4 * 4
    assert first["prefix_hashes"] != second["prefix_hashes"]
    assert [update.get("prefix_hashes") for update in updates] == [None, None]


def test_a_prompt_shorter_than_a_block_has_no_hashes(recording):
    engine = Traced()
    engine.add("r", prompt=15, max_tokens=1)
    engine.finish()
    [entry] = events(recording, "arrived")
    assert "prefix_hashes" not in entry
    assert {"received_us", "input_queue_us"}.isdisjoint(entry)  # no engine around this scheduler
    assert lines(recording)[-1]["type"] == "end"
