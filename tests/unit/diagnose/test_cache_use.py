import random

import pytest

from schedtrace.diagnose.kv_cache import cache_use, shared_blocks
from schedtrace.model.trace import ScheduledRequest
from schedtrace.model.trace_facts import Admission
from tests.makers import arrival, step


@pytest.mark.parametrize(
    ("hashes", "expected"),
    [
        ([], []),
        (["aaaabbbb"], [0]),
        (["aaaabbbb", "aaaabbbb", "aaaacccc", "ddddbbbb"], [0, 2, 1, 0]),
        (["aaaaccccdddd", "aaaab", "aaaacccceeee", ""], [0, 1, 2, 0]),
        (["aaaabbbbcccc", "aaaabbbb", "aaaabbbbcccc"], [0, 2, 3]),
    ],
)
def test_blocks_shared_with_an_earlier_prompt(hashes, expected):
    assert shared_blocks(hashes) == expected


def plainly(hashes):
    def alike(one, other):
        blocks = min(len(one), len(other)) // 4
        return max(n for n in range(blocks + 1) if one[: 4 * n] == other[: 4 * n])

    return [
        max((alike(text, other) for other in hashes[:place]), default=0) for place, text in enumerate(hashes)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_the_same_as_comparing_all_of_them(seed):
    chance = random.Random(seed)  # noqa: S311  # cases, no secrets
    hashes = ["".join(4 * chance.choice("ab") for _ in range(chance.randrange(6))) for _ in range(40)]
    assert shared_blocks(hashes) == plainly(hashes)


def admitted(number, name, cached, hashes, prompt=35, miss=None, trial=None):
    return step(
        number,
        trial=trial,
        requests=[ScheduledRequest(name, cached, prompt - cached, "new")],
        arrived=[arrival(name, 0, prompt_tokens=prompt, prefix_hashes=hashes)],
        admitted=[Admission(name, cached, 0, len(hashes) // 4, miss=miss)],
    )


def test_what_was_found_and_could_have_been(view_of):
    view = view_of(
        admitted(0, "a", 0, "aaaabbbbcccc", miss="not_cached"),
        admitted(1, "b", 20, "aaaabbbbcccc"),
        admitted(2, "c", 0, "aaaabbbb", prompt=20, miss="not_cached"),
    )
    assert cache_use(view).drop("longest_tokens").rows() == [
        (0, None, "a", 35, 0, 0, 0, "not_cached", False),
        (1, None, "b", 35, 20, 30, 10, None, False),
        (2, None, "c", 20, 0, 10, 10, "not_cached", False),  # of two blocks vLLM computes the last one's end
    ]


def test_trials_are_apart(view_of):
    view = view_of(
        admitted(0, "t1-a", 0, "aaaa", trial=1), admitted(1, "t2-a", 0, "aaaa", trial=2), trial_ids=True
    )
    assert cache_use(view)["shareable_tokens"].to_list() == [0, 0]


def test_what_is_not_recorded_is_not_known(view_of):
    view = view_of(
        step(
            0,
            requests=[ScheduledRequest("a", 10, 25, "new")],
            arrived=[arrival("a", 0, prompt_tokens=35)],
        )
    )
    assert cache_use(view).drop("longest_tokens").rows() == [(0, None, "a", 35, 10, None, None, None, None)]
