"""What the KV cache managers are asked, on toys of them: no effect, and right at the limits."""

import ast
from types import SimpleNamespace

import pytest

from schedtrace.record import allocation, facts
from schedtrace.record.allocation import Refusal, stand_in, why_refused
from schedtrace.record.header import cache_groups
from schedtrace.record.marks import syntax
from tests.toys import module_of

SOURCE = """
class Group:
    def __init__(self):
        self.asked = []

    def get_num_blocks_to_allocate(self, request):
        self.asked.append(request)
        return request.wants


class Coordinator:
    pass


class Manager:
    def allocate_slots(self, request):
        num_blocks_to_allocate = sum(
            one.get_num_blocks_to_allocate(request) for one in self.coordinator.single_type_managers
        )
        if num_blocks_to_allocate > self.block_pool.get_num_free_blocks():
            return None
        self.taken = request
        return num_blocks_to_allocate
"""


@pytest.fixture
def manager(tmp_path):
    """Of two groups, with 5 of 8 blocks free."""
    with module_of(tmp_path, SOURCE) as module:
        made = module.Manager()
        made.block_pool = SimpleNamespace(num_gpu_blocks=8, get_num_free_blocks=lambda: 5)
        made.coordinator = module.Coordinator()
        made.coordinator.single_type_managers = (module.Group(), module.Group())
        yield made


def wants(blocks):
    return SimpleNamespace(wants=blocks)


def test_the_stand_in_ends_before_anything_is_taken(manager):
    ask = stand_in(type(manager)).ask
    assert ask(manager, wants(2)) is None
    assert "taken" not in vars(manager)


@pytest.mark.parametrize(
    ("each", "refusal"),
    [(3, Refusal("free", 6, 5)), (4, Refusal("free", 8, 5)), (5, Refusal(None, None, 5)), (2, None)],
)
def test_why_refused(manager, each, refusal):
    assert why_refused(manager, ((wants(each),), {})) == refusal
    assert [group.asked for group in manager.coordinator.single_type_managers] == [[], []]


@pytest.mark.parametrize(("each", "needed"), [(3, [3, 3]), (4, [4, 4]), (5, [])])
def test_blocks_needed_by_group(manager, each, needed):
    assert allocation.needed_by_group(manager, ((wants(each),), {})) == needed
    assert [group.asked for group in manager.coordinator.single_type_managers] == [[], []]


def test_null_blocks_are_not_held():
    block, null = SimpleNamespace(is_null=False), SimpleNamespace(is_null=True)
    sliding = SimpleNamespace(req_to_blocks={"a": [null, block], "b": [block]})
    assert allocation._held(sliding) == (["a", "b"], [1, 1])


def test_groups_without_a_manager_are_told_by_their_spec():
    spec = SimpleNamespace(block_size=16, sliding_window=128)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "1"])] * 2
    managed = SimpleNamespace(block_size=32, max_admission_blocks_per_request=4)
    scheduler = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        kv_cache_manager=SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=(managed,))),
    )
    assert [
        (one.block_size, one.layers, one.window, one.admission_cap) for one in cache_groups(scheduler)
    ] == [
        (32, 2, 128, 4),
        (16, 2, 128, None),
    ]


@pytest.mark.parametrize(
    ("tokens", "skips", "miss"),
    [(4, False, "short"), (5, False, "unknown"), (4, True, "skipped")],
)
def test_why_a_lookup_found_nothing(tokens, skips, miss):
    """In blocks of 4 tokens, of which the last one is computed in any case; of a pool that is not vLLM's."""
    manager = SimpleNamespace(block_pool=object(), coordinator=SimpleNamespace(single_type_managers=()))
    scheduler = SimpleNamespace(block_size=4, kv_cache_manager=manager)
    request = SimpleNamespace(num_tokens=tokens, skip_reading_prefix_cache=skips, block_hashes=[b"a"])
    assert facts._miss(scheduler, request) == miss


@pytest.mark.parametrize(
    ("expression", "pure"),
    [
        ("len(self.running) + 1", True),
        ("min(budget, max(left, 1))", True),
        ("self.asks(budget)", False),
        ("asks(budget)", False),
        ("len(self.waiting)", False),
        ("self.waiting", True),
        ("max(a, key=b)", False),
    ],
)
def test_what_can_be_evaluated_again_without_effect(expression, pure):
    assert syntax.is_pure(ast.parse(expression, mode="eval").body) is pure


def test_a_preempted_request_that_is_new_to_the_workers_is_admitted_only_once():
    preempted = SimpleNamespace(num_preemptions=1)
    scheduler = SimpleNamespace(requests={"a": preempted}, kv_cache_manager=SimpleNamespace())
    again = [SimpleNamespace(req_id=name, num_computed_tokens=0) for name in ("a", "gone")]
    assert facts.admissions(scheduler, again) == []
