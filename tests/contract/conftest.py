"""Every test here leaves vLLM's classes and the environment as it found them."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

import pytest

from schedtrace.record.writer import Writer

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")


@pytest.fixture(autouse=True, scope="session")
def _plugins_are_loaded() -> None:
    """VLLM loads plugins once a process, with the first configuration: here while recording is off."""
    if find_spec("vllm") is not None:
        from vllm.model_executor.models import registry
        from vllm.plugins import load_general_plugins

        _switch_off()
        load_general_plugins()
        registry._run_in_subprocess = lambda look: look()  # at a model's class: that would import vLLM again


@pytest.fixture(autouse=True, scope="module")
def _no_writer_outlives_its_module() -> Iterator[None]:
    """An engine that a test leaves open would go on writing, and fail with what a later test breaks."""
    opened: WeakSet[Writer] = WeakSet()
    make = Writer.__init__

    def opens(writer: Writer, *args: Any, **kwargs: Any) -> None:
        make(writer, *args, **kwargs)
        opened.add(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "__init__", opens)
        yield
    for writer in opened:
        writer.close()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Plugin hooks are taken out again; nothing else of vLLM may have changed."""
    if find_spec("vllm") is None:
        yield
        return
    before = _vllm_attributes()
    assert not _hooks(before)
    yield
    _switch_off()
    for place in _hooks(_vllm_attributes()):
        if place in before:
            setattr(*place, before[place])
        else:
            delattr(*place)
    assert _vllm_attributes() == before


@pytest.fixture
def recording(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Recording is on; the run folder."""
    monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture(scope="session")
def plain() -> Any:
    """What vLLM's own scheduler decides for ``LOAD``."""
    from tests.contract.deciding import LOAD, decisions

    return decisions(*LOAD)


def _switch_off() -> None:
    for name in [name for name in os.environ if name.startswith("SCHEDTRACE")]:
        del os.environ[name]


def _vllm_attributes() -> dict[tuple[type, str], Any]:
    """Every attribute of the classes that schedtrace knows."""
    from vllm.config import SchedulerConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker import worker_base

    classes = [SchedulerConfig, EngineCore, Scheduler, AsyncScheduler, KVCacheManager, Request]
    classes += [StructuredOutputManager, EngineArgs, AsyncLLM, DPEngineCoreProc]
    if hasattr(worker_base, "WorkerWrapperBase"):  # vLLM 0.12 and newer
        classes.append(worker_base.WorkerWrapperBase)
    return {
        (owner, name): value
        for owner in classes
        for name, value in vars(owner).items()
        if name != "__slotnames__"  # Python keeps it there when an object is copied
    }


def _hooks(attributes: dict[tuple[type, str], Any]) -> list[tuple[type, str]]:
    """Wrappers of ours, but for those of the loops, which let a process be asked: these are there always."""
    loops = {"run_busy_loop", "worker_busy_loop"}
    hooks = [place for place, value in attributes.items() if hasattr(value, "_schedtrace_wrapped")]
    return [place for place in hooks if place[1] not in loops]
