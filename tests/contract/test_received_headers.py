"""A trace may be anyone's: what its header says never decides which code is run."""

import dataclasses
import json

import pytest

pytest.importorskip("vllm")

from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs

from schedtrace.errors import UsageError
from schedtrace.model.trace_facts import CacheGroup
from schedtrace.simulate import Driver, Simulation, VirtualClock
from schedtrace.simulate.engine_options import engine_options
from tests.makers import header

pytestmark = pytest.mark.vllm


def test_only_fields_of_the_scheduler_are_taken_from_a_header():
    every = {field.name: "evil" for field in dataclasses.fields(EngineArgs)}
    own = {"max_num_seqs": 4, "policy": "fcfs", "scheduler_cls": "evil.Scheduler"}
    options = engine_options(header(scheduler_config={**every, **own}))
    evil = {name for name, value in options.items() if value == "evil"}
    assert evil <= {field.name for field in dataclasses.fields(SchedulerConfig)} - {"scheduler_cls"}
    assert {"model", "tokenizer", "worker_cls", "trust_remote_code", "scheduler_cls"}.isdisjoint(evil)
    assert options["scheduling_policy"] == "fcfs"


def test_what_is_recorded_as_the_text_of_a_list_is_left_out():
    assert engine_options(header(scheduler_config={"policy": "fcfs"}))["scheduling_policy"] == "fcfs"
    assert "scheduling_policy" not in engine_options(header(scheduler_config={"policy": "[4]"}))


def test_the_settings_of_the_kv_cache_are_those_of_the_trace():
    settings = {
        "cache_config.prefix_cache_retention_interval": 64,
        "cache_config.swa_bounded_replay": False,
        "cache_config.kv_cache_memory_bytes": 1 << 40,
        "cache_config.unheard_of": 1,
        "parallel_config.worker_cls": "evil",
    }
    options = engine_options(header(settings=settings))
    assert (options["prefix_cache_retention_interval"], options["swa_bounded_replay"]) == (64, False)
    assert {"kv_cache_memory_bytes", "unheard_of", "worker_cls"}.isdisjoint(options)
    without = engine_options(header())
    assert without["prefix_cache_retention_interval"] is None  # as vLLM was before it had this setting
    changed = engine_options(header(settings=settings), {"prefix_cache_retention_interval": 0})
    assert changed["prefix_cache_retention_interval"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parallel_config.decode_context_parallel_size", 2),
        ("parallel_config.prefill_context_parallel_size", 4),
        ("speculative_config.num_speculative_tokens_per_batch_size", [[1, 8, 3], [9, 64, 1]]),
    ],
)
def test_a_setting_that_a_replay_cannot_have_is_refused_by_name(name, value):
    with pytest.raises(UsageError, match=name.rpartition(".")[2]):
        engine_options(header(settings={name: value}))
    engine_options(header(settings={name: None}))


@pytest.mark.parametrize("interval", [None, 0, 64])
@pytest.mark.parametrize("made_as", [Driver, Simulation])
def test_an_engine_keeps_a_window_cached_as_its_configuration_says(made_as, interval):
    window = CacheGroup("SlidingWindow", 16, 1, window=32)
    options = engine_options(
        header(
            cache_groups=[CacheGroup("FullAttention", 16, 1), window],
            block_size=16,
            enable_prefix_caching=True,
            settings={"cache_config.prefix_cache_retention_interval": interval},
        )
    )
    with VirtualClock() as clock:
        engine = Driver(**options) if made_as is Driver else Simulation(clock, **options)
        assert engine.scheduler.kv_cache_manager.coordinator.retention_interval == interval


def test_the_engine_of_a_replay_runs_no_code_of_a_received_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = tmp_path / "ran"
    evil = tmp_path / "evil"
    evil.mkdir()
    code = "from transformers import PretrainedConfig\nclass Config(PretrainedConfig): pass\n"
    (evil / "code.py").write_text(f"open({str(ran)!r}, 'w')\n{code}")
    auto = {"AutoConfig": "code.Config"}
    (evil / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    settings = {"model": str(evil), "trust_remote_code": True, "scheduler_cls": "evil.code.Scheduler"}
    Driver(**engine_options(header(scheduler_config=settings, scheduler_class="evil.code.Scheduler")))
    assert not ran.exists()
