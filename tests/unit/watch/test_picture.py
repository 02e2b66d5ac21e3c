"""What counts as a change in kind, case by case."""

import pytest

from schedtrace.watch.judge import Picture

CALM = Picture(idle=False, waiting_for={}, kv_frac=0.5, preempting=False)
IDLE = Picture(idle=True, waiting_for={}, kv_frac=0.0, preempting=False)
FULL = Picture(idle=False, waiting_for={}, kv_frac=0.96, preempting=False)
NEARLY = Picture(idle=False, waiting_for={}, kv_frac=0.92, preempting=False)
PREEMPTING = Picture(idle=False, waiting_for={}, kv_frac=0.5, preempting=True)


def waits(**causes):
    return Picture(idle=False, waiting_for=causes, kv_frac=0.5, preempting=False)


@pytest.mark.parametrize(
    ("then", "now", "changed"),
    [
        (CALM, CALM, ""),
        (CALM, IDLE, "the engine ran empty"),
        (IDLE, CALM, "requests ran"),
        (CALM, waits(kv_blocks=1), "requests waited"),
        (waits(kv_blocks=1), CALM, "the queue emptied"),
        (waits(kv_blocks=4, max_num_seqs=3), waits(kv_blocks=3, max_num_seqs=4), ""),
        (waits(kv_blocks=4), waits(kv_blocks=2, max_num_seqs=4), "they waited for max_num_seqs"),
        (waits(kv_blocks=4), waits(max_num_seqs=1), "they waited for max_num_seqs"),
        (CALM, FULL, "95 % of the KV blocks were in use"),
        (FULL, NEARLY, ""),
        (FULL, CALM, "KV blocks became free"),
        (CALM, PREEMPTING, "preemptions began"),
        (PREEMPTING, CALM, ""),
    ],
)
def test_changes(then, now, changed):
    assert now.changed(then) == changed
