"""Which cache managers may be asked as they are, and which only as copies."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from schedtrace.record.allocation import only_computes
from tests.contract.test_hybrid_models import MODELS, engine

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("model", MODELS)
def test_of_vllm_those_of_mamba_are_copied(model):
    managers = engine(model).scheduler.kv_cache_manager.coordinator.single_type_managers
    assert {type(one).__name__: only_computes(one) for one in managers} == {
        name: name != "MambaManager" for name in (type(one).__name__ for one in managers)
    }


class Pure:
    block_size = 16

    def __init__(self):
        self.tables = defaultdict(list)

    def get_num_blocks_to_allocate(self, request_id, tokens):
        return max(self.of(tokens) - len(self.tables.get(request_id, ())), 0)

    def of(self, tokens):
        return len(tokens[1:]) // self.block_size


class Stores(Pure):
    def of(self, tokens):
        self.last = tokens
        return 0


class Appends(Pure):
    def of(self, tokens):
        self.tables.get(1, []).append(tokens)
        return 0


class Subscripts(Pure):
    def of(self, tokens):
        return len(self.tables[tokens[0]])


class WithinAGenerator(Pure):
    def of(self, tokens):
        return sum(self.tables.pop(one) for one in tokens)


class CallsOut(Pure):
    def of(self, tokens):
        return print(tokens)


class CallsSuper(Stores):
    def of(self, tokens):
        return super().of(tokens)


class Property(Pure):
    @property
    def of(self):
        self.tables = {}
        return len


class Decorated(Pure):
    get_num_blocks_to_allocate = SimpleNamespace()


def test_a_method_that_only_reads():
    assert only_computes(Pure())


@pytest.mark.parametrize(
    "kind", [Stores, Appends, Subscripts, WithinAGenerator, CallsOut, CallsSuper, Property, Decorated]
)
def test_whatever_else_it_does_counts_as_an_effect(kind):
    assert not only_computes(kind())


def test_a_method_put_on_the_object():
    manager = Pure()
    manager.of = len
    assert not only_computes(manager)
