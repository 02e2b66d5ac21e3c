"""Who would be looked at next, in older releases; the contract tests see the one that is installed."""

from types import SimpleNamespace

import pytest

from schedtrace.record.queues import head


class Queue(list):
    def peek_request(self):
        return self[0]


@pytest.mark.parametrize(
    ("policy", "waiting", "skipped", "first"),
    [
        ("fcfs", [1], [2], 2),
        ("fcfs", [1], [], 1),
        ("fcfs", [], [2], 2),
        ("fcfs", [], [], None),
        ("priority", [1], [2], 1),
        ("priority", [2], [1], 1),
        ("priority", [2], [], 2),
    ],
)
def test_vllm_0_18_to_0_30(policy, waiting, skipped, first):
    queues = {"waiting": Queue(waiting), "skipped_waiting": Queue(skipped)}
    assert head(SimpleNamespace(policy=SimpleNamespace(value=policy), **queues)) == first


def test_before_vllm_0_18():
    assert head(SimpleNamespace(waiting=Queue([1, 2]))) == 1
