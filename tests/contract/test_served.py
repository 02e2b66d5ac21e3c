"""The executor in real time as vLLM's engine core meets it, and vLLM's defaults for the GPU."""

import json
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from schedtrace.engine.run_spec import RunSpec
from schedtrace.engine.simulated import EXECUTOR, defaults_of_the_gpu, taken
from schedtrace.errors import UsageError
from schedtrace.record.header import device_name
from schedtrace.simulate.clock import MachineClock
from schedtrace.simulate.driver import TINY_MODEL
from schedtrace.simulate.served import ServedExecutor, kv_cache_specs, kv_dtype
from schedtrace.step_times.roofline import gpu, kv_cache_blocks
from schedtrace.step_times.shapes import SHAPES, shape_folder

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not hasattr(Scheduler, "_update_after_schedule"), reason="no engine core of today"),
]


@pytest.fixture
def config(tmp_path):
    """``config(max_num_seqs=4, ...)`` for the tiny model, or another that ``model`` names or describes."""

    def make(model=None, device=None, **args):
        folder = model
        if not isinstance(model, str):
            folder = tmp_path / "model"
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps({**TINY_MODEL, **(model or {})}))
        given = {
            "max_model_len": 256,
            "block_size": 16,
            "distributed_executor_backend": ServedExecutor,
            **args,
        }
        if device is not None:
            given["additional_config"] = {"schedtrace": device}
        engine_args = EngineArgs(model=str(folder), skip_tokenizer_init=True, **given)
        return engine_args.create_engine_config(UsageContext.LLM_CLASS)

    return make


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda name: str(shape_folder(SHAPES[name]))


def test_each_layer_of_a_dense_model_keeps_keys_and_values_of_all_tokens(config, cached):
    [specs] = kv_cache_specs(config(cached("Qwen3-32B"), tensor_parallel_size=2))
    assert len(specs) == 64
    assert {
        (type(s).__name__, s.block_size, s.num_kv_heads, s.head_size, s.dtype) for s in specs.values()
    } == {("FullAttentionSpec", 16, 4, 128, torch.bfloat16)}
    assert {spec.page_size_bytes for spec in specs.values()} == {16 * 2 * 4 * 128 * 2}


def test_a_pipelines_stages_share_the_layers(config, cached):
    stages = kv_cache_specs(config(cached("Llama-3.1-8B"), pipeline_parallel_size=2))
    assert [len(specs) for specs in stages] == [16, 16]
    assert not stages[0].keys() & stages[1].keys()


def test_layers_with_a_window_keep_that(config):
    layers = ["full_attention", "sliding_attention"]
    model = {"sliding_window": 64, "use_sliding_window": True, "layer_types": layers, "max_window_layers": 1}
    [specs] = kv_cache_specs(config(model))
    assert [(type(s).__name__, s.sliding_window) for s in specs.values()] == [
        ("FullAttentionSpec", None),
        ("SlidingWindowSpec", 64),
    ]


def test_latent_attention_keeps_one_vector_a_token(config, cached):
    made = config(cached("DeepSeek-V3"), tensor_parallel_size=8)
    [specs] = kv_cache_specs(made)
    assert len(specs) == 61
    block = made.cache_config.block_size
    assert {spec.page_size_bytes for spec in specs.values()} == {block * (512 + 64) * 2}


def test_eight_bit_caches_take_half(config):
    made = config({}, kv_cache_dtype="fp8")
    [specs] = kv_cache_specs(made)
    assert kv_dtype(made) == "fp8"
    assert {spec.page_size_bytes for spec in specs.values()} == {16 * 2 * 2 * 32}


def model_of(**fields):
    text = SimpleNamespace(layer_types=fields.pop("layer_types", None), num_hidden_layers=2)
    plain = {"is_hybrid": False, "has_inner_state": False, "is_attention_free": False}
    model = SimpleNamespace(
        model="m", hf_text_config=text, get_sliding_window=lambda: None, **{**plain, **fields}
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype=fields.get("cache_dtype", "auto")),
    )


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"is_hybrid": True}, "state-space layers"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear attention"),
    ],
)
def test_other_layers_are_refused_in_one_line(fields, what):
    with pytest.raises(UsageError) as raised:
        kv_cache_specs(model_of(**fields))
    assert str(raised.value) == (
        f"m has {what}: only layers of full attention, sliding attention and latent attention (MLA) can be "
        "simulated"
    )


def test_a_cache_of_an_unknown_type_is_refused():
    with pytest.raises(UsageError, match="--kv-cache-dtype nvfp4 cannot be simulated"):
        kv_dtype(model_of(cache_dtype="nvfp4"))


def test_the_cache_is_as_large_as_the_gpu_leaves_it(config, cached):
    made = config(cached("Qwen3-8B"), {"gpu": "a100"}, max_num_seqs=8, max_num_batched_tokens=512)
    executor = ServedExecutor(made)
    blocks = kv_cache_blocks(
        SHAPES["Qwen3-8B"], gpu("a100"), gpu_memory_utilization=made.cache_config.gpu_memory_utilization,
        max_num_batched_tokens=512, max_num_seqs=8,
    )  # fmt: skip
    assert executor.determine_available_memory() == [blocks * 36 * 16 * 2 * 8 * 128 * 2]
    assert device_name(made) == "simulated NVIDIA A100 SXM 80GB"


def test_a_size_that_is_given_is_taken(config):
    plenty = config({}, {"gpu": "h100"}, kv_cache_memory_bytes=1 << 20)
    assert ServedExecutor(plenty).determine_available_memory() == [1 << 20]
    counted = config({}, {"gpu": "h100"}, num_gpu_blocks_override=40)
    assert ServedExecutor(counted).determine_available_memory() == [40 * 2 * 16 * 2 * 2 * 32 * 2]


def test_the_space_of_a_cpus_cache_is_not_a_gpus(config, cached, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made = config(cached("Qwen3-8B"), {"gpu": "a100"}, max_num_seqs=8, max_num_batched_tokens=512)
    [available] = ServedExecutor(made).determine_available_memory()
    assert available > 40 << 30


def test_a_cache_is_begun_without_workers_answers(config, monkeypatch):
    """vLLM 0.24 to 0.26 ask them for times of compilation."""
    executor = ServedExecutor(config({}, {"gpu": "h100"}))
    monkeypatch.setattr(executor, "collective_rpc", lambda *_, **__: pytest.fail("a worker is asked"))
    executor.initialize_from_config([None])


def test_adapters_are_kept_by_their_number(config):
    executor = ServedExecutor(config({}, {"gpu": "h100"}))
    adapter = SimpleNamespace(lora_int_id=3)
    assert [executor.add_lora(adapter), executor.add_lora(adapter)] == [True, False]
    assert (executor.list_loras(), executor.pin_lora(3), executor.pin_lora(4)) == ({3}, True, False)
    assert [executor.remove_lora(3), executor.remove_lora(3)] == [True, False]
    assert executor.list_loras() == set()
    assert executor.collective_rpc("profile", None, (True,), {}, non_block=True).result() == [None]
    executor.reset_mm_cache()
    executor.sleep(1)
    executor.wake_up()


def test_what_needs_a_models_answers_is_refused(config):
    made = config({}, {"gpu": "h100"})
    made.speculative_config = SimpleNamespace()
    with pytest.raises(UsageError, match="does not simulate speculative decoding"):
        ServedExecutor(made)


def test_asynchronous_scheduling_can_be_asked_for_where_vllm_switches_it_off(config):
    made = config({}, {"gpu": "h100", "async_scheduling": True})
    ServedExecutor(made)
    assert made.scheduler_config.async_scheduling is True


def test_the_clock_waits_until_a_moment_and_not_for_one_that_is_over():
    clock = MachineClock()
    now = clock.now_us
    clock.until(now - 1e6)
    clock.until(now + 3000)
    assert clock.now_us >= now + 3000
    assert abs(clock.now_us - time.monotonic() * 1e6) < 1e6


def test_vllms_own_engine_core_starts_with_it(config, monkeypatch):
    from vllm.v1.engine import core as module

    monkeypatch.setattr(module, "freeze_gc_heap", lambda: None, raising=False)
    monkeypatch.setattr(module, "enable_envs_cache", lambda: None, raising=False)
    made = config({}, {"gpu": "h100"}, num_gpu_blocks_override=40)
    core = EngineCore(made, ServedExecutor, log_stats=False)
    assert core.scheduler.kv_cache_config.num_blocks == 40
    assert core.get_supported_tasks() == ("generate",)
    core.shutdown()


@pytest.mark.skipif(not hasattr(EngineArgs, "get_batch_defaults"), reason="defaults are not asked for apart")
@pytest.mark.parametrize(
    ("name", "context", "defaults"),
    [
        ("h100", UsageContext.LLM_CLASS, (16_384, 1024)),
        ("h100", UsageContext.OPENAI_API_SERVER, (8192, 1024)),
        ("a100", UsageContext.OPENAI_API_SERVER, (2048, 256)),
        ("b200", UsageContext.OPENAI_API_SERVER, (16_384, 1024)),
    ],
)
def test_vllms_defaults_are_those_of_the_gpu(name, context, defaults, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY_MODEL, "max_position_embeddings": 32_768}))
    run = RunSpec(engine_args=["--model", str(tmp_path)], executor="simulated", gpu=name)

    def config_now():
        args = EngineArgs(
            model=str(tmp_path), skip_tokenizer_init=True, distributed_executor_backend=EXECUTOR
        )
        return args.create_engine_config(context)

    before = taken(config_now(), {})
    with defaults_of_the_gpu(run):
        config = config_now()
    assert taken(config, {}) == {
        "max_num_batched_tokens": defaults[0],
        "max_num_seqs": defaults[1],
        "async_scheduling": True,
        "block_size": 16,
    }
    assert taken(config, {"block_size": 16, "max_num_seqs": 4}).keys() == {
        "max_num_batched_tokens",
        "async_scheduling",
    }
    assert taken(config_now(), {}) == before  # outside, vLLM is as it was


def test_a_real_device_keeps_its_name():
    assert device_name(SimpleNamespace(additional_config={})) == device_name(None) == "cpu"
