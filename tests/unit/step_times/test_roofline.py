"""Bytes and times of a shape small enough to count by hand."""

import pytest

from schedtrace.errors import UsageError
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.constants import Constants, HostTimes
from schedtrace.step_times.roofline import (
    Efficiency,
    Gpu,
    Roofline,
    activation_bytes,
    gpu,
    kv_bytes_per_token,
    kv_cache_blocks,
    weight_bytes,
)
from schedtrace.step_times.shapes import Shape, shape

SHAPE = Shape(
    name="tiny", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=3, intermediate=16, vocab=100
)  # fmt: skip
LAYERS, EMBEDDING = 2 * (288 + 384), 800  # parameters
LATENT = shape("DeepSeek-V3")
GPU = Gpu("toy", 1e12, 2e12, 1e9, 10**6, 1e9)
FAST_MEMORY = Gpu("toy", 1e9, 2e9, 1e18, 10**6, 1e9)
FREE = Efficiency(compute=1, memory=1, step_us=0, layer_us=0, all_reduce_us=0)
DECODE = Batch({"a": 1, "b": 1}, 0, 2, 40, decode_requests=2, decode_context_tokens=40)
PREFILL = Batch({"a": 10}, 10, 0, 5, prefill_requests=1, prefill_attention=10 * (5 + 5))


def us(batch, gpus=1, of=SHAPE, on=GPU, efficiency=FREE, **options):
    return Roofline(of, on, gpus, efficiency=efficiency, **options).device_us(batch)


def test_bytes():
    assert weight_bytes(SHAPE) == 2 * (LAYERS + 2 * EMBEDDING)
    assert weight_bytes(SHAPE, 2) == LAYERS + 2 * EMBEDDING
    assert kv_bytes_per_token(SHAPE) == 2 * 2 * 2 * 3 * 2
    assert kv_bytes_per_token(SHAPE, "fp8") == 24
    assert [kv_bytes_per_token(SHAPE, None, gpus) for gpus in (2, 4)] == [24, 24]  # one head at least
    assert [kv_bytes_per_token(LATENT, None, gpus) for gpus in (1, 8)] == [61 * 576 * 2] * 2
    fp8 = Shape(**{**vars(SHAPE), "quantization": "fp8"})
    assert weight_bytes(fp8) == LAYERS + 2 * 2 * EMBEDDING


def test_an_unknown_type_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"unknown data type 'fp3': known are bfloat16"):
        kv_bytes_per_token(SHAPE, "fp3")
    with pytest.raises(UsageError, match="fp3"):
        Roofline(SHAPE, GPU, kv_dtype="fp3")


def test_decode_reads_weights_and_context():
    weights = 2 * (LAYERS + EMBEDDING)  # the output embedding too, of the other a row
    assert us(DECODE) == pytest.approx((weights + 48 * (40 + 2)) / 1e3)


def test_prefill_computes():
    flops = 2 * LAYERS * 10 + 2 * EMBEDDING * 1 + 4 * 2 * 12 * 100
    assert us(PREFILL, on=FAST_MEMORY) == pytest.approx(flops / 1e3)
    fp8 = Shape(**{**vars(SHAPE), "quantization": "fp8"})
    assert us(PREFILL, of=fp8, on=FAST_MEMORY) == pytest.approx((flops - LAYERS * 10) / 1e3)


def test_drafts_attend_over_the_context_each():
    drafts = Batch({"a": 3, "b": 3}, 0, 6, 40, decode_requests=2, decode_context_tokens=40)
    assert us(drafts, on=FAST_MEMORY) == pytest.approx((2 * (LAYERS + EMBEDDING) * 6 + 96 * 3 * 40) / 1e3)


def test_two_gpus_halve_it_and_send_activations():
    sent = 2 * (1 / 2) * 2 * 8 * 2  # bytes of an all-reduce of two tokens
    halves = us(DECODE) / 2
    assert us(DECODE, 2) == pytest.approx(halves + 4 * sent / 1e3)
    slow = Efficiency(1, 1, 0, 0, all_reduce_us=7)
    assert us(DECODE, 2, efficiency=slow) == pytest.approx(us(DECODE, 2) + 4 * 7)


def test_efficiency_and_launches():
    slower = Efficiency(compute=0.5, memory=0.5, step_us=100, layer_us=10, all_reduce_us=0)
    assert us(DECODE, efficiency=slower) == pytest.approx(2 * us(DECODE) + 100 + 2 * 10)


def test_no_tokens_take_no_time():
    assert us(Batch({}, 0, 0, 0), efficiency=Efficiency()) == 0


def test_experts_that_no_token_goes_to_are_not_read():
    experts = Shape(
        name="moe", layers=1, hidden=8, heads=4, kv_heads=2, head_dim=3, intermediate=16, vocab=100,
        experts=4, experts_per_token=1, expert_intermediate=5,
    )  # fmt: skip
    fixed = 288 + 32 + EMBEDDING
    for tokens, distinct in ((1, 1), (2, 4 * (1 - 0.75**2))):
        batch = Batch(dict.fromkeys("abcd"[:tokens], 1), 0, tokens, 0, decode_requests=tokens)
        assert us(batch, of=experts) == pytest.approx((2 * (fixed + distinct * 120) + 24 * tokens) / 1e3)


def test_latent_attention_decodes_on_the_compressed_cache():
    flops_only = Gpu("toy", 1e15, 1e15, 1e30, 10**6, 1e9)
    decodes = [Batch({"a": 1}, 0, 1, n, decode_requests=1, decode_context_tokens=n) for n in (0, 1000)]
    prefills = [Batch({"a": 1}, 1, 0, 0, prefill_requests=1, prefill_attention=n) for n in (0, 1000)]
    for batches, width in ((decodes, 512 + 64 + 512), (prefills, 128 + 64 + 128)):
        one, two = (us(batch, of=LATENT, on=flops_only) for batch in batches)
        assert two - one == pytest.approx(1e6 * 1000 * 2 * 61 * 128 * width / 1e15)


def test_one_request_on_an_h100_reads_its_weights_in_5_ms():
    one = Batch({"a": 1}, 0, 1, 128, decode_requests=1, decode_context_tokens=128)
    assert us(one, of=shape("Llama-3.1-8B"), on=gpu("h100")) == pytest.approx(4486, abs=1)
    default = Roofline(shape("Llama-3.1-8B"), gpu("h100"))
    assert default.device_us(one) == pytest.approx(4486 / 0.8 + 500 + 320, abs=2)
    assert "Llama-3.1-8B (bfloat16 weights) on 1 x H100 SXM" in default.description


def test_gpus_must_divide_the_heads():
    refused = "--tensor-parallel-size 3 does not divide the 4 attention heads of tiny"
    with pytest.raises(UsageError, match=refused):
        Roofline(SHAPE, GPU, 3)


def test_kv_cache_blocks_are_what_is_left():
    llama, h100 = shape("Llama-3.1-8B"), gpu("h100")
    peak = 8192 * (4 * 4096 + 2 * 14_336) * 2 + 256 * 128_256 * 4
    assert activation_bytes(llama, 8192, 256) == peak
    left = 81_559 * 2**20 * 0.9 - 16_059_990_016 - peak - 2**30
    assert kv_cache_blocks(llama, h100) == int(left / (16 * 131_072)) == 28_116
    assert kv_cache_blocks(llama, h100, kv_dtype="fp8", block_size=32) == 28_116


def test_a_tiny_model_has_no_more_blocks_than_vllm_can_make_in_a_second_or_two():
    assert kv_cache_blocks(shape("examples/tiny-qwen3"), gpu("h200")) == 2**18


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match=r"Llama-3.1-70B does not fit: 14\d\.\d GB on each of 1 H100 SXM"):
        kv_cache_blocks(shape("Llama-3.1-70B"), gpu("h100"))


def test_constants():
    times = Constants(1000, 2, 3, 0.5, HostTimes(10, 1, 20, 2, 30, 3))
    mixed = Batch({"a": 10, "b": 1}, 10, 1, 40)
    assert times.device_us(mixed) == 1000 + 20 + 3 + 20
    assert (times.schedule_us(mixed), times.update_us(mixed), times.gap_us(4)) == (12, 24, 42)
    assert Constants().gap_us(4) == 0
    assert times.description.startswith("Constants: 1000 us a step, 2 us a prefill token")


def test_host_times_are_the_measured_ones():
    batches = [Batch(dict.fromkeys(map(str, range(n)), 1), 0, n, 0) for n in (16, 256)]
    assert [HostTimes().schedule_us(batch) for batch in batches] == pytest.approx([131, 1880], rel=1e-3)
    assert [HostTimes().update_us(batch) for batch in batches] == pytest.approx([56, 843], rel=1e-3)
