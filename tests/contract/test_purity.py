"""Which cache managers may be asked as they are, and which only as copies."""

import pytest

pytest.importorskip("vllm")

from schedtrace.record import allocation
from tests.contract.test_hybrid_models import MODELS, engine

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _asked_anew():
    allocation._only_computes.cache_clear()
    yield
    allocation._only_computes.cache_clear()


@pytest.mark.parametrize("model", MODELS)
def test_of_vllm_those_of_mamba_are_copied(model):
    managers = map(type, engine(model).scheduler.kv_cache_manager.coordinator.single_type_managers)
    assert [kind.__name__ for kind in managers if not allocation._only_computes(kind)] == [
        "MambaManager" for _ in range("mamba" in model)
    ]


def test_in_a_release_that_was_not_tried_all_are(monkeypatch):
    monkeypatch.setattr(allocation, "vllm_version", lambda: "0.99.0")
    [window, *_] = engine("sliding_window").scheduler.kv_cache_manager.coordinator.single_type_managers
    assert not allocation._only_computes(type(window))
