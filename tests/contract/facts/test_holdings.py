"""Who holds what when another head of the queue is refused, against vLLM's own block tables."""

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from schedtrace.record import allocation
from schedtrace.record.traced import traced_class
from tests.contract.facts.told import Traced, events, steps
from tests.contract.loads import make_script, play, under_load
from tests.contract.test_hybrid_models import FAMILY, MODELS, engine

pytestmark = pytest.mark.vllm

NULL = 0
"""vLLM's null block."""


def tables(scheduler):
    """Blocks of every request by group, null blocks aside, of those that have some."""
    asked = scheduler.kv_cache_manager.get_block_ids
    held = {one: [sum(block != NULL for block in ids) for ids in asked(one)] for one in scheduler.requests}
    return {one: blocks for one, blocks in held.items() if sum(blocks)}


def watched(base):
    """Remembers the tables after each ``schedule()``: nothing is allocated after the refusal of the head."""

    class Watched(base):
        def schedule(self, *args):
            output = super().schedule(*args)
            self.tables = [*getattr(self, "tables", []), tables(self.scheduler)]
            return output

    return Watched


def in_full(refusal):
    """Requests to blocks by group; number and sum of those that are not named."""
    named = dict(zip(refusal["holders"], map(list, zip(*refusal["held"], strict=True)), strict=True))
    return named, refusal.get("other_holders", 0), refusal.get("other_held", [])


@pytest.mark.parametrize("model", MODELS)
def test_holders(model, recording):
    load = replace(FAMILY, resets=0.0)
    played = play(
        engine(model, traced_class, watched(Traced), max_num_batched_tokens=64), make_script(load, 2)
    )
    seen = 0
    for step, held in zip(steps(recording), played.tables, strict=True):
        last = step["exits"][-1] if step["exits"] else {}
        for refusal in step["refusals"]:
            assert last["cause"] == "kv_blocks"
            named, others, other_held = in_full(refusal)
            assert refusal["request_id"] == last["request_id"]
            assert refusal["blocks_free"] == last["blocks_free"]
            assert {one: held[one] for one in named} == named
            rest = {one: blocks for one, blocks in held.items() if one not in named}
            assert (others, other_held) == (
                len(rest),
                [sum(group) for group in zip(*rest.values(), strict=True)] or other_held,
            )
            sizes = list(map(sum, named.values()))
            assert sizes == sorted(sizes, reverse=True)
            seen += 1
    assert seen > 5


def test_a_head_is_told_once_until_another_one_is_refused(recording):
    engine = under_load(Traced, "tight_kv")
    heads = [
        exits[-1]["request_id"]
        for step in steps(recording)
        if (exits := step["exits"]) and (exits[-1]["loop"], exits[-1]["cause"]) == ("waiting", "kv_blocks")
    ]
    told = [entry["request_id"] for entry in events(recording, "refusals")]
    changes = [one for one, before in zip(heads, [None, *heads], strict=False) if one != before]
    assert told == changes
    assert len(heads) > len(told) > 5
    assert engine.scheduler.requests == {}


def refused_head(recording):
    """An engine with full attention and a window that refused its third request, and that refusal."""
    refused = engine("sliding_window", traced_class, Traced, max_num_batched_tokens=64)
    refused.add("holder", prompt=250, max_tokens=3)
    for _ in range(4):
        refused.step()
    refused.add("other", prompt=40, max_tokens=30)
    refused.step()
    refused.add("head", prompt=250, max_tokens=2)
    refused.step()
    refused.finish()
    [told] = events(recording, "refusals")
    return refused, told


def test_need_by_group(recording):
    """Full attention wants the whole prompt, the window its cap, counted by hand."""
    refused, told = refused_head(recording)
    _, window = refused.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert told["blocks_needed"] == [16, min(16, window.max_admission_blocks_per_request)]
    assert told["holders"] == ["holder", "other"]


def test_that_many_more_blocks_would_have_done(recording):
    """The head gets in with just the blocks that its refusal says are missing, and not with one less."""

    def refused(num_blocks):
        engine = Traced(num_blocks=num_blocks, max_num_batched_tokens=512)
        engine.add("holder", prompt=100, max_tokens=2)
        engine.step()
        engine.add("head", prompt=150, max_tokens=2)
        output = engine.step()
        engine.finish()
        return "head" not in output.num_scheduled_tokens

    assert refused(12)
    [told] = events(recording, "refusals")
    missing = sum(told["blocks_needed"]) - told["blocks_free"]
    assert missing == 6
    assert not refused(12 + missing)
    assert refused(12 + missing - 1)


def test_of_many_holders_the_largest_are_named(recording):
    engine = Traced(num_blocks=70, max_num_seqs=64, max_num_batched_tokens=2048)
    for number in range(20):
        engine.add(f"r{number}", prompt=17 + 2 * number, max_tokens=40)
    engine.step()
    engine.add("head", prompt=250)
    engine.step()
    held = tables(engine.scheduler)
    engine.finish()
    told = events(recording, "refusals")[0]
    sizes = sorted((blocks for [blocks] in held.values()), reverse=True)
    assert [sorted(told["held"][0], reverse=True), told["other_holders"], told["other_held"]] == [
        sizes[:16], 4, [sum(sizes[16:])]
    ]  # fmt: skip


def test_a_group_with_too_many_blocks_to_look_at_is_left_out(recording, monkeypatch):
    monkeypatch.setattr(allocation, "MOST_BLOCKS_LOOKED_AT", 5)
    _, told = refused_head(recording)
    assert [told["held"][0] != [], told["held"][1]] == [True, []]


def test_finished_requests_whose_blocks_a_transfer_keeps_are_marked(recording, monkeypatch):
    from tests.contract.causes.toy_connectors import KV, ToyKV

    monkeypatch.setattr(ToyKV, "request_finished_all_groups", lambda *_: (True, None))
    engine = Traced(kv_transfer_config=KV, num_blocks=10)
    engine.add("sends", prompt=100, max_tokens=1)
    engine.step()
    engine.add("head", prompt=100, max_tokens=1)
    engine.step()
    engine.scheduler.shutdown()
    [told] = events(recording, "refusals")
    assert (told["request_id"], told["holders"], told["finished_holders"]) == ("head", ["sends"], ["sends"])


def test_ids_are_hashed_where_all_are(recording, monkeypatch):
    monkeypatch.setenv("SCHEDTRACE_HASH_IDS", "1")
    engine = Traced(num_blocks=14, max_num_seqs=4, enable_prefix_caching=True)
    for number in range(8):
        engine.add(f"{number}_secret", prompt=40, max_tokens=60)
    engine.finish()
    assert not [file for file in recording.rglob("*") if b"secret" in file.read_bytes()]
    arrived = {entry["request_id"] for entry in events(recording, "arrived")}
    told = events(recording, "refusals")
    assert {one for entry in told for one in (entry["request_id"], *entry["holders"])} <= arrived
    assert {entry["request_id"] for entry in events(recording, "admitted")} == arrived
    assert told
