"""The page of ``schedtrace queue``: what stands on it at 80 columns."""

import pytest

from schedtrace.model.live import EngineQueue, EngineQueues, QueueEntry
from schedtrace.model.trace import Exit
from schedtrace.present.pages.queue import queue_page
from schedtrace.present.renderers import Format, renderer


def entry(name, state="waiting", **fields):
    defaults = {"age_s": 1.5, "prompt_tokens": 100, "computed_tokens": 0, "output_tokens": 0, "blocks": 0}
    return QueueEntry(request_id=name, state=state, **{**defaults, **fields})


def queue(**fields):
    defaults = {
        "rank": 0,
        "pid": 12345,
        "model": "tiny",
        "unix_s": 1.0,
        "held_us": 20.0,
        "between_steps": True,
        "policy": "fcfs",
        "seats": 2,
        "token_budget": 256,
        "blocks_usable": 1023,
        "blocks_free": 1000,
        "running": [],
        "waiting": [],
        "exits": [],
    }
    return EngineQueue(**{**defaults, **fields})


def text(*queues, most=20):
    return renderer(Format.TEXT)(queue_page(EngineQueues(engines=list(queues)), most=most), width=80)


def test_who_waits_for_what_and_who_holds_it():
    running = [
        entry("r0", "running", computed_tokens=120, output_tokens=21, blocks=8),
        entry("r1", "running", computed_tokens=230, output_tokens=131, blocks=15, num_preemptions=1),
    ]
    waiting = [
        entry("r2", "preempted", refused_for="kv_blocks"),
        entry("r3", refused_for="kv_blocks"),
        entry("r4", "waiting_for_remote_kvs", refused_for="remote_kv_pending", age_s=0.25),
    ]
    assert (
        text(queue(running=running, waiting=waiting), most=2)
        == """\
Engine 0 (pid 12345): tiny
  2 of 2 seats taken, 3 waiting (fcfs); 23 of 1,023 KV blocks held
  waiting for kv_blocks (2), remote_kv_pending (1)

Waiting, next first

#  request  state        age  prompt  for
1  r2       preempted  1.5 s     100  kv_blocks
2  r3       waiting    1.5 s     100  kv_blocks
1 more: --limit shows more

Running, most KV blocks first

request    age  prompt  computed  output  blocks  preempted
r1       1.5 s     100       230     131      15          1
r0       1.5 s     100       120      21       8          -
"""
    )


def test_an_idle_engine():
    assert (
        text(queue(policy=None, blocks_usable=None, blocks_free=None))
        == """\
Engine 0 (pid 12345): tiny
  0 of 2 seats taken, 0 waiting
"""
    )


@pytest.mark.parametrize(
    ("state", "causes", "says"),
    [
        (
            "waiting",
            ["queue_empty"],
            "the latest step that is known left nobody waiting: they have arrived since",
        ),
        ("waiting", ["max_loras", "queue_empty"], "what they wait for is not known"),
        ("preempted", ["queue_empty"], "what they wait for is not known"),
        ("waiting", [], "what they wait for is not known"),
    ],
)
def test_who_has_arrived_since_the_latest_step_waits_for_nothing_yet(state, causes, says):
    exits = [Exit("waiting", "condition", cause) for cause in causes]
    assert f"  {says}" in text(queue(waiting=[entry("r1", state)], exits=exits))


def test_what_is_not_known_and_what_holds_all_up():
    shown = text(queue(waiting=[entry("r1")], pause="PAUSED_ALL", between_steps=False))
    assert "#  request    age  prompt  for\n1  r1       1.5 s     100\n" in shown
    assert "  waiting until somebody resumes the scheduler\n" in shown
    assert "The scheduler is paused (PAUSED_ALL)." in shown
    assert "The engine has been within one step for 5 s and was read meanwhile." in shown


def test_a_pause_comes_before_the_limit_that_refused_them():
    waiting = [entry("r1", refused_for="max_num_seqs")]
    shown = " ".join(text(queue(waiting=waiting, pause="PAUSED_NEW")).split())
    assert (
        "waiting until somebody resumes the scheduler; the latest step refused them for max_num_seqs" in shown
    )


def test_requests_that_are_left_out_are_counted():
    shown = text(queue(waiting=[entry("r2", refused_for="kv_blocks")], more_waiting=299_999), most=1)
    assert "0 of 2 seats taken, 300,000 waiting (fcfs)" in shown
    assert "the first 1 wait for kv_blocks (1)" in shown
    assert "299,999 more waiting requests are left out: an answer has 10,000 at most." in shown
