"""Blocks per request and KV cache group, on vLLM's own hybrid cache managers."""

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.kv_cache import group_use
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.timeline.timeline import make_timeline
from tests.contract.facts.told import Traced
from tests.contract.test_hybrid_models import engine

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("model", "kind", "per_request"), [("mamba", "Mamba", 1.5), ("sliding_window", "SlidingWindow", 3.0)]
)
def test_a_state_is_as_large_for_a_short_request(model, kind, per_request, recording):
    """A request of 151 tokens and three of 40: ten and three blocks of 16 of full attention."""
    refused = engine(model, traced_class, Traced, max_num_batched_tokens=64)
    refused.add("holder", prompt=150, max_tokens=30)
    for _ in range(4):
        refused.step()
    for name in ("a", "b", "c"):
        refused.add(name, prompt=40, max_tokens=30)
    refused.step()
    refused.add("head", prompt=250, max_tokens=2)
    refused.finish()
    [trace] = read_run(recording).traces
    timeline = make_timeline(trace)
    needed = timeline.lists["refusals"].collect()["blocks_needed"]
    assert {*needed.list.first().drop_nulls()} == {16}
    full, other = group_use(timeline)
    assert (full.kind, full.block_size) == ("FullAttention", 16)
    assert (full.blocks_per_request, full.tokens_need_blocks) == (4.75, 4.75)
    assert (other.kind, other.blocks_per_request) == (kind, per_request)
    assert other.tokens_need_blocks == full.tokens_need_blocks
    assert full.share_of_pool == 19 / 40
