"""What ``prefix-cache`` says of vLLM's own cache."""

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.kv_cache import cache_use
from schedtrace.diagnose.rules import RULES
from schedtrace.model.message import Count
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.contract.facts.told import Traced

pytestmark = pytest.mark.vllm

LARGE = {"block_size": 128, "max_num_batched_tokens": 512, "max_model_len": 512}


@pytest.fixture
def timeline(recording):
    """``timeline(prompt, others=..., ...)``: twelve prompts that begin alike, one after the other."""

    def run(prompt, *, shared=100, others=0, **options):
        engine = Traced(enable_prefix_caching=True, **options)
        for number in range(12):
            engine.add(f"r{number}", prompt=prompt, shared=shared, max_tokens=2)
            if others:
                engine.add(f"other{number}", prompt=others, max_tokens=2)
            for _ in range(6):
                engine.step()
        engine.finish()
        [trace] = read_run(recording).traces
        return make_timeline(trace)

    return run


@pytest.mark.parametrize(
    ("prompt", "without_hit", "shareable"), [(110, {"short": 12}, None), (200, {"not_cached": 12}, 0)]
)
def test_a_shared_beginning_of_100_tokens_and_blocks_of_128(timeline, prompt, without_hit, shareable):
    [finding] = RULES["prefix-cache"](timeline(prompt, **LARGE))
    assert (finding.evidence.without_hit, finding.evidence.shareable_tokens) == (without_hit, shareable)
    assert [(advice.setting, advice.value) for advice in finding.advice] == [("block_size", None)]


def test_with_blocks_of_16_it_is_found(timeline):
    view = timeline(200)
    assert RULES["prefix-cache"](view) == []
    assert cache_use(view)["cached_tokens"].to_list() == [0, *[96] * 11]


def test_what_other_prompts_take_is_missed(timeline):
    """A pool of 16 blocks: each other prompt of 240 tokens takes 15 of them."""
    view = timeline(110, shared=96, others=240, num_blocks=17)
    [finding] = RULES["prefix-cache"](view)
    assert (finding.evidence.missed_tokens, finding.evidence.cached_tokens) == (11 * 96, 0)
    assert (finding.evidence.resets, finding.evidence.evicted_blocks) == (0, 12)
    [larger] = finding.advice
    assert larger.message.arguments["total"] == Count(17, "block")


def test_it_could_have_found_what_it_finds_in_a_large_cache(timeline):
    use = cache_use(timeline(110, shared=96, others=240, num_blocks=1000))
    assert use["shareable_tokens"].to_list() == use["cached_tokens"].to_list()
    assert use["cached_tokens"].sum() == 11 * 96
