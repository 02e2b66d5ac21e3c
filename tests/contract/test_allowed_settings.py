"""Advice names what vLLM accepts: its own configuration, option parser and KV cache are asked."""

import math

import pytest

pytest.importorskip("vllm")

import torch
from vllm.utils.argparse_utils import human_readable_int
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from schedtrace.diagnose.rules.allowed_settings import (
    REFUSED_DRAFTS,
    kv_space,
    smallest_batched_tokens,
    typed_bytes,
    why_no_async_scheduling,
)
from schedtrace.model.message import plain
from schedtrace.read.trace import read_trace
from schedtrace.record.header import kv_block_bytes
from schedtrace.simulate.driver import SMALL, engine_config, tiny_model
from schedtrace.timeline.timeline import make_timeline
from tests.contract.families import NGRAM
from tests.makers import header, step, write_trace

pytestmark = pytest.mark.vllm

LAYERS = 3


@pytest.fixture
def timeline_of(tmp_path):
    """``timeline_of(kv_blocks_total=63)``: an engine with such a header."""

    def made(**fields):
        trace = read_trace(write_trace(tmp_path / "engine-0.jsonl", header(**fields), step(0)))
        return make_timeline(trace)

    return made


@pytest.mark.parametrize(
    ("seats", "chunked", "longest"), [(8, True, 512), (8, False, 512), (600, False, 512), (64, True, 32)]
)
def test_vllm_accepts_it_and_nothing_below(timeline_of, seats, chunked, longest):
    def resolved(tokens):
        given = {"max_num_seqs": seats, "enable_chunked_prefill": chunked, "max_model_len": longest}
        return engine_config(max_num_batched_tokens=tokens, **given).scheduler_config

    config = {name: getattr(resolved(1024), name) for name in ("max_num_seqs", "enable_chunked_prefill")}
    timeline = timeline_of(scheduler_config=config, max_model_len=longest, max_num_running_reqs=seats)
    smallest = smallest_batched_tokens(timeline)
    assert resolved(smallest).max_num_batched_tokens == smallest
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        resolved(smallest - 1)


def configured(**given):
    """As a user's command makes it, on this machine's platform."""
    from vllm.engine.arg_utils import EngineArgs

    options = {**SMALL, "load_format": "dummy", "skip_tokenizer_init": True, **given}
    return EngineArgs(model=tiny_model(), **options).create_engine_config()


def test_async_scheduling_is_no_advice_where_the_platform_switches_it_off(timeline_of):
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("not a CPU")
    assert configured(async_scheduling=True).scheduler_config.async_scheduling is False
    assert plain(why_no_async_scheduling(timeline_of(device="cpu"))) == "vLLM switches it off on a CPU"
    assert not why_no_async_scheduling(timeline_of(device="NVIDIA H100"))


def test_async_scheduling_is_no_advice_with_drafts_that_vllm_refuses_it_with(timeline_of):
    method = NGRAM["method"]
    assert method in REFUSED_DRAFTS
    with pytest.raises(ValueError, match="async scheduling"):
        configured(async_scheduling=True, speculative_config=NGRAM)
    timeline = timeline_of(device="NVIDIA H100", settings={"speculative_config.method": method})
    assert plain(why_no_async_scheduling(timeline)) == f"vLLM refuses it together with {method} drafts"


@pytest.mark.parametrize("count", [1, 999, 16 * 2**10, 31.5 * 2**20, 2**25 + 1, 2**30, 20.2 * 2**30, 2**41])
def test_a_number_of_bytes_is_typed_as_vllm_takes_it_and_never_less(count):
    count = math.ceil(count)
    assert count <= human_readable_int(typed_bytes(count)) <= count * 17 / 16
    assert human_readable_int(typed_bytes(count, exact=True)) == count


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize("wanted", [64, 481, 10_007])
def test_a_kv_cache_of_the_advised_size_has_the_advised_blocks(timeline_of, wanted, layout):
    """What an engine records of its blocks, and what vLLM makes of the value that follows from it."""
    config = engine_config()
    if hasattr(config.cache_config, "kv_cache_layout"):  # vLLM 0.32 and newer
        config.cache_config.kv_cache_layout = layout
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    layers = {f"layers.{number}.attn": spec for number in range(LAYERS)}

    def made(memory):
        config.cache_config.num_gpu_blocks = None
        [cache] = get_kv_cache_configs(config, [layers], [memory])
        return cache

    now = made(63 * LAYERS * spec.page_size_bytes + 5)
    assert now.num_blocks == 63
    each = kv_block_bytes(Has(kv_cache_config=now))
    assert each == LAYERS * spec.page_size_bytes
    given = {"cache_config.kv_cache_memory_bytes": 63 * each}
    timeline = timeline_of(kv_blocks_total=63, kv_block_bytes=each, settings=given)
    words = plain(kv_space(timeline, wanted)).split()
    assert words[0] == "--kv-cache-memory-bytes"
    assert wanted <= made(human_readable_int(words[1])).num_blocks <= wanted * 17 / 16
    older = timeline_of(kv_blocks_total=63, settings={"cache_config.kv_cache_memory_bytes": 63 * each + 5})
    words = plain(kv_space(older, wanted)).split()
    assert made(human_readable_int(words[1])).num_blocks >= wanted


class Has:
    """Something with these attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)
