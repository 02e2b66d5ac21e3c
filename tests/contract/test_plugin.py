"""Both ways into vLLM, the plugin and ``--scheduler-cls``, keep the class that vLLM would have chosen."""

from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from schedtrace.read.run import read_run
from schedtrace.record.plugin import register
from schedtrace.record.traced import traced_class, traced_scheduler
from schedtrace.simulate import Driver as Engine
from schedtrace.simulate.driver import engine_config, kv_cache_groups, make_request, scheduler_arguments
from schedtrace.simulate.releases import model_output
from tests.contract.deciding import LOAD, decisions, first_difference, num_steps

pytestmark = pytest.mark.vllm

ASKED = hasattr(SchedulerConfig, "get_scheduler_cls")
"""To vLLM 0.11.0 nobody is asked: the engine looks into the configuration once it has sized its KV cache."""
HOOKED = [
    (SchedulerConfig, "get_scheduler_cls") if ASKED else (EngineCore, "_initialize_kv_caches"),
    (EngineCore, "execute_dummy_batch"),
    (EngineCore, "shutdown"),
]
INITIALIZE = getattr(EngineCore, "_initialize_kv_caches", None)


class UserScheduler(Scheduler):
    """A class that somebody gave with ``scheduler_cls``."""


CHOICES = [
    ({}, Scheduler),
    ({"async_scheduling": True}, AsyncScheduler),
    ({"scheduler_cls": UserScheduler}, UserScheduler),
    ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, Scheduler),
    ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler", "async_scheduling": True}, Scheduler),
]

if not ASKED:  # there, the option for asynchronous scheduling writes its class into the configuration
    CHOICES = [CHOICES[0], ({"scheduler_cls": AsyncScheduler}, AsyncScheduler), *CHOICES[2:4]]
WITHOUT_THE_OPTION = [({}, Scheduler), ({"async_scheduling": True}, AsyncScheduler)]


def chosen_class(config):
    """What ``EngineCore`` would build its scheduler from."""
    if ASKED:
        return config.scheduler_config.get_scheduler_cls()
    EngineCore._initialize_kv_caches(None, config)
    given = config.scheduler_config.scheduler_cls
    return resolve_name(given) if isinstance(given, str) else given


@pytest.fixture(autouse=True)
def _no_kv_cache_to_size():
    with pytest.MonkeyPatch.context() as patch:
        if not ASKED:
            patch.setattr(EngineCore, "_initialize_kv_caches", lambda *_: None)
        yield


def hooks():
    return [getattr(owner, name) for owner, name in HOOKED]


def test_without_the_environment_variables_nothing_is_hooked_or_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = hooks()
    register()
    assert hooks() == before
    assert chosen_class(engine_config()) is Scheduler
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("recording")
def test_registering_again_changes_nothing():
    before = hooks()
    register()
    once = hooks()
    register()
    assert hooks() == once
    assert not set(before) & set(once)


@pytest.mark.parametrize(("options", "expected"), CHOICES)
def test_the_plugin_wraps_what_vllm_chose(options, expected, recording):
    register()
    config = engine_config(**options)
    chosen = chosen_class(config)
    assert chosen is traced_class(expected)
    assert [c for c in chosen.__mro__ if not c.__module__.startswith("schedtrace.")] == [*expected.__mro__]
    chosen(**scheduler_arguments(config, kv_cache_groups(config))).shutdown()
    [trace] = read_run(recording).traces
    assert trace.header.scheduler_class == f"{expected.__module__}.{expected.__qualname__}"


class Executor:
    """A device that answers what vLLM 0.10.0 to 0.11.0 asks it, and gives every request the same token."""

    max_concurrent_batches = 1

    def __init__(self, vllm_config):
        self.groups = kv_cache_groups(vllm_config)

    def get_kv_cache_specs(self):
        return [{"layer": self.groups[0].kv_cache_spec}]

    def determine_available_memory(self):
        return [1 << 26]

    def initialize_from_config(self, _):
        pass

    def collective_rpc(self, *_, **__):
        return [None]

    def execute_model(self, output):
        ids = list(output.num_scheduled_tokens)
        return model_output({name: [7] for name in ids}, None)

    def shutdown(self):
        pass


if not ASKED:

    def test_the_engine_core_itself_builds_the_traced_class(recording, monkeypatch):
        """With its own ``_initialize_kv_caches``; by then the class has taken its place."""
        monkeypatch.setattr(EngineCore, "_initialize_kv_caches", INITIALIZE)
        register()
        config = engine_config()
        config.cache_config.num_gpu_blocks = None
        core = EngineCore(config, Executor, log_stats=True)
        assert type(core.scheduler) is traced_class(Scheduler)
        core.scheduler.add_request(make_request("one", [1, 2, 3], 4, 8, None))
        for _ in range(6):
            core.step()
        core.shutdown()
        [trace] = read_run(recording).traces
        assert (trace.header.exits_via, trace.end.steps) == ("source", trace.steps.height)
        assert trace.finishes.select("request_id", "status", "output_tokens").rows() == [
            ("one", "LENGTH_CAPPED", 4)
        ]


@pytest.mark.parametrize(("options", "expected"), WITHOUT_THE_OPTION)
def test_traced_scheduler_chooses_as_vllm_does_without_the_option(options, expected, recording):
    given = "schedtrace.record.traced.traced_scheduler"
    config = engine_config(scheduler_cls=given, **options)
    made = chosen_class(config)(**scheduler_arguments(config, kv_cache_groups(config)))
    made.shutdown()
    assert type(made) is traced_class(expected)
    assert config.scheduler_config.scheduler_cls == given
    [trace] = read_run(recording).traces
    assert trace.header.scheduler_class == f"{expected.__module__}.{expected.__qualname__}"


def test_traced_scheduler_beside_the_plugin_records_once_and_without_a_warning(recording, warnings):
    register()
    config = engine_config(scheduler_cls="schedtrace.record.traced.traced_scheduler")
    chosen_class(config)(**scheduler_arguments(config, kv_cache_groups(config))).shutdown()
    assert [path.name for path in recording.parent.iterdir()] == ["run"]
    assert warnings == []


def test_traced_scheduler_decides_as_the_plain_one(plain, recording):
    traced = decisions(*LOAD, lambda _: traced_scheduler)
    assert first_difference(plain, traced) is None
    assert read_run(recording).traces[0].steps.height == num_steps(traced)


def test_traced_scheduler_records_to_logs_where_no_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Engine(lambda _: traced_scheduler).finish()
    [run] = (tmp_path / "logs").iterdir()
    assert read_run(run).traces[0].end.steps == 0


def test_two_schedulers_of_one_process_record_apart(recording):
    engines = [Engine(traced_class), Engine(traced_class)]
    for number, engine in enumerate(engines):
        engine.add(f"of engine {number}")
        engine.finish()
    folders = [recording, recording.with_name("run-2")]
    ids = [read_run(folder).traces[0].arrivals["request_id"].to_list() for folder in folders]
    assert ids == [["of engine 0"], ["of engine 1"]]


def test_dummy_batches_are_counted_with_the_next_step(recording):
    register()
    engine = Engine(traced_class)
    executed = []
    executor = SimpleNamespace(execute_dummy_batch=lambda: executed.append("dummy"))
    executor.collective_rpc = lambda name: getattr(executor, name)()  # vLLM 0.10.0
    core = SimpleNamespace(scheduler=engine.scheduler, model_executor=executor)
    for _ in range(3):
        EngineCore.execute_dummy_batch(core)
    engine.step()
    engine.finish()
    assert executed == ["dummy"] * 3
    assert read_run(recording).traces[0].steps["dummy_batches"].to_list() == [3]


def test_the_trace_is_closed_before_the_workers_are_stopped(recording, monkeypatch):
    register()
    core = "vllm.v1.engine.core"
    monkeypatch.setattr(f"{core}.cleanup_dist_env_and_memory", lambda: None, raising=False)
    engine = Engine(traced_class)
    closed = []

    def stop_workers():
        closed.append(read_run(recording).traces[0].end is not None)

    EngineCore.shutdown(
        SimpleNamespace(
            structured_output_manager=engine.scheduler.structured_output_manager,
            model_executor=SimpleNamespace(shutdown=stop_workers),
            scheduler=engine.scheduler,
        )
    )
    assert closed == [True]
