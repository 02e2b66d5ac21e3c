"""The header's facts of the engine, against its own configuration."""

from dataclasses import dataclass, field, fields
from enum import Enum
from types import SimpleNamespace
from typing import Literal

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from schedtrace.record.header import MOST_ENTRIES, all_settings, device_memory_bytes
from schedtrace.record.header import settings as header_settings
from tests.contract.causes.models import sees_images
from tests.contract.facts.told import Traced, header
from tests.contract.families import DRAFTS, LORA
from tests.contract.test_hybrid_models import ATTENTION, MODELS

pytestmark = pytest.mark.vllm


def closed(**options):
    engine = Traced(**options)
    engine.scheduler.shutdown()
    return engine


def test_one_group_of_attention(recording):
    closed()
    assert header(recording)["cache_groups"] == [{"kind": "FullAttention", "block_size": 16, "layers": 1}]


def test_groups_of_hybrid_models(recording):
    (_, window), (_, mamba) = MODELS["sliding_window"][0], MODELS["mamba"][0]
    layers = [["a", "b"], ["c"], ["d"] * 3]
    groups = [KVCacheGroupSpec(*of) for of in zip(layers, (ATTENTION, window, mamba), strict=True)]
    engine = closed(kv_groups=groups, mamba_cache_mode="align", enable_prefix_caching=True)
    _, windowed, _ = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    cap = windowed.max_admission_blocks_per_request
    assert header(recording)["cache_groups"] == [
        {"kind": "FullAttention", "block_size": 16, "layers": 2},
        {"kind": "SlidingWindow", "block_size": 16, "layers": 1, "window": 32, "admission_cap": cap},
        {
            "kind": "Mamba",
            "block_size": 16,
            "layers": 3,
            "speculative_blocks": 0,
            "cache_mode": "align",
            "checkpoint_blocks": 0,
        },
    ]
    assert cap > 0


@pytest.mark.parametrize(
    ("options", "batches", "stages"),
    [({}, 1, 1), ({"async_scheduling": True}, 2, 1), ({"pipeline_parallel_size": 3}, 3, 3)],
)
def test_batches_in_flight(recording, options, batches, stages):
    engine = closed(**options)
    told = header(recording)
    assert (told["batches_in_flight"], told["pipeline_parallel_size"]) == (batches, stages)
    assert engine.depth == batches
    assert told["data_parallel_size"] == 1


def test_settings_are_those_of_vllm(recording):
    engine = closed(**(LORA | DRAFTS))
    settings, config = header(recording)["settings"], engine.config
    expected = {
        "lora_config.max_loras": config.lora_config.max_loras,
        "speculative_config.method": "ngram",
        "speculative_config.num_speculative_tokens": 3,
        "num_speculative_tokens": 3,
        "scheduler.num_spec_tokens": 3,
        "parallel_config.tensor_parallel_size": 1,
        "speculative_config.max_num_new_slots_for_drafting": 0,
        "cache_config.cache_dtype": "auto",
        "cache_config.block_size": config.cache_config.block_size,
        "cache_config.gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "model_config.renderer_num_workers": 1,
        "model_config.enforce_eager": config.model_config.enforce_eager,
        "model_config.dtype": "bfloat16",
        "compilation_config.cudagraph_mode": config.compilation_config.cudagraph_mode.name,
    }
    assert {name: settings[name] for name in expected} == expected
    assert not [name for name in settings if name.startswith("kv_transfer_config")]


@pytest.mark.parametrize("part", ["cache_config", "parallel_config"])
def test_every_public_argument_of_a_configuration_is_recorded_that_is_a_number_or_a_choice(recording, part):
    engine = closed()
    settings, config = header(recording)["settings"], getattr(engine.config, part)
    plain = {
        f"{part}.{field.name}": getattr(config, field.name)
        for field in fields(config)
        if field.init and not field.name.startswith("_") and not field.name.endswith("_port")
    }
    numbers = {
        name: value for name, value in plain.items() if value is None or type(value) in {bool, int, float}
    }
    assert numbers
    assert {name: settings[name] for name in numbers} == numbers
    assert not [name for name in settings if name.startswith(part) and name not in plain]


@pytest.mark.parametrize("interval", [None, 0, 64])
def test_the_interval_at_which_a_window_stays_cached_is_recorded(recording, interval):
    groups = [
        KVCacheGroupSpec(["full"], ATTENTION),
        KVCacheGroupSpec(["window"], MODELS["sliding_window"][0][1]),
    ]
    closed(kv_groups=groups, enable_prefix_caching=True, prefix_cache_retention_interval=interval)
    assert header(recording)["settings"]["cache_config.prefix_cache_retention_interval"] == interval


class Mode(Enum):
    FULL = 1


@dataclass
class Invented:
    """A configuration with one setting of each kind."""

    number: int | None = None
    choice: Literal["a", "b"] | None = "b"
    mode: Mode = Mode.FULL
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    pairs: list[tuple[int, int]] = field(default_factory=lambda: [(1, 2)])
    long_list: list[int] = field(default_factory=lambda: [0] * (MOST_ENTRIES + 1))
    address: str = "127.0.0.1"
    master_port: int = 29500
    nested: dict = field(default_factory=dict)
    _private: int = 1
    derived: int = field(default=3, init=False)


def test_names_paths_addresses_and_what_vllm_derives_are_left_out():
    expected = {"number": None, "choice": "b", "mode": "FULL", "sizes": [1, 2], "pairs": [[1, 2]]}
    assert all_settings(Invented()) == expected
    assert all_settings(None) == {}


def test_no_path_or_host_is_among_them(recording):
    engine = closed()
    told = str(header(recording)["settings"])
    assert "/" not in told
    assert engine.config.model_config.model not in told


def test_grammar_threads(recording):
    engine = closed(**sees_images())  # a model with a tokenizer
    executor = engine.scheduler.structured_output_manager.executor
    assert header(recording)["grammar_threads"] == executor._max_workers > 0


def test_no_grammar_threads_without_a_tokenizer(recording):
    closed()
    assert "grammar_threads" not in header(recording)


def test_a_variable_by_which_vllm_overrules_an_option_is_among_them(recording, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    closed()
    assert header(recording)["settings"]["environment.VLLM_CPU_KVCACHE_SPACE"] == "1"


@pytest.mark.parametrize(("kind", "memory"), [("cuda", 80 << 30), ("cpu", None)])
def test_a_gpus_memory_is_recorded(monkeypatch, kind, memory):
    from vllm import platforms

    platform = SimpleNamespace(device_type=kind, get_device_total_memory=lambda: 80 << 30)
    monkeypatch.setattr(platforms, "_current_platform", platform)
    assert device_memory_bytes(SimpleNamespace(additional_config={})) == memory
    assert device_memory_bytes(SimpleNamespace(additional_config={"schedtrace": {}})) is None


@pytest.mark.parametrize(("on", "interval"), [(False, None), (True, 3000)])
def test_how_often_experts_are_rearranged_is_recorded_if_they_are(on, interval):
    config = Traced().config
    config.parallel_config.enable_eplb = on
    recorded = header_settings(SimpleNamespace(vllm_config=config))
    assert recorded.get("eplb_config.step_interval") == interval
    assert recorded.get("eplb_config.policy") == (None if interval is None else "default")
