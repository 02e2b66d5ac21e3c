import pytest

from schedtrace.diagnose.kv_cache import GroupUse, group_use
from schedtrace.model.trace import ScheduledRequest
from schedtrace.model.trace_facts import CacheGroup, HeadRefusal
from tests.makers import step

GROUPS = [CacheGroup("FullAttention", 10, 4), CacheGroup("Mamba", 100, 2)]


def got(name, computed, scheduled, phase="running"):
    return ScheduledRequest(name, computed, scheduled, phase)


def use(*values):
    return GroupUse(**dict(zip(GroupUse.__struct_fields__, values, strict=True)))


def lines(*refusals):
    """a has 38 tokens when step 2 is over (25, then 12, then 1), b 12."""
    return [
        step(0, requests=[got("a", 0, 25, "new")]),
        step(1, requests=[got("a", 25, 12)]),
        step(2, requests=[got("a", 37, 1), got("b", 0, 12, "new")], refusals=list(refusals)),
        step(3, requests=[got("a", 38, 1), got("b", 12, 1)]),
    ]


def test_what_they_hold_and_what_their_tokens_fill(view_of):
    refusal = HeadRefusal("c", [5, 9], 3, ["a", "b"], [[4, 2], [30, 32]])
    assert group_use(view_of(*lines(refusal), cache_groups=GROUPS)) == [
        use("FullAttention", 10, 3.0, 3.0, 0.06),
        use("Mamba", 100, 31.0, 1.0, 0.62),
    ]


def test_those_that_are_not_named_hold_a_share_of_the_pool_too(view_of):
    refusal = HeadRefusal("c", [], 3, ["a"], [[4], [30]], other_holders=2, other_held=[6, 20])
    assert group_use(view_of(*lines(refusal), cache_groups=GROUPS)) == [
        use("FullAttention", 10, 4.0, 4.0, 0.1),
        use("Mamba", 100, 30.0, 1.0, 0.5),
    ]


def test_means_over_refusals(view_of):
    first = HeadRefusal("c", [5, 9], 3, ["a"], [[4], [30]])
    second = HeadRefusal("d", [7, 1], 3, ["b"], [[2], []])
    [full, mamba] = group_use(view_of(*lines(first, second), cache_groups=GROUPS))
    assert (full.blocks_per_request, full.tokens_need_blocks) == (3, 3)
    assert full.share_of_pool == pytest.approx(0.03)
    assert (mamba.blocks_per_request, mamba.share_of_pool) == (30, 0.3)


def test_nothing_is_known_without_refusals_or_groups(view_of):
    assert group_use(view_of(*lines(), cache_groups=GROUPS)) == []
    refusal = HeadRefusal("c", [5], 3, ["a"], [[4]])
    assert group_use(view_of(*lines(refusal))) == []
    assert group_use(view_of(*lines(HeadRefusal("c", [5])), cache_groups=GROUPS)) == []
