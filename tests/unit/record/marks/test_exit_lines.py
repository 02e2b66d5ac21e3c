"""From events to exits and caps, on sites made by hand."""

from types import SimpleNamespace

import pytest

from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import AlsoSkipped, ChunkCap, Exit, one_by_one
from schedtrace.record.marks import exits, guards
from schedtrace.record.marks.exits import Event, Site, ended_loops, latest_preemption, to_lines


@pytest.fixture
def sites(monkeypatch):
    """Marked places of this test, by number."""

    def made(*every):
        monkeypatch.setattr(exits, "SITES", list(every))

    return made


def site(kind, *causes, loop="waiting", guard="guard"):
    return Site(loop, kind, causes, guard, "scheduler.py:7")


def exit_of(event, remaining=5):
    [line], caps = to_lines([event], remaining, 0)
    assert caps == []
    return line


def test_an_exit_has_what_was_noted_there(sites):
    sites(site("break", Cause.MAX_NUM_SEQS))
    expected = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "a", 3, location="scheduler.py:7", via="source")
    assert exit_of(Event(0, 3, request_id="a")) == expected


def test_where_no_budget_is_in_sight_it_is_what_was_left(sites):
    sites(site("break", Cause.MAX_NUM_SEQS))
    assert exit_of(Event(0, None, request_id="a"), remaining=9).budget_left == 9


def test_only_an_unknown_guard_is_quoted(sites):
    sites(site("break", Cause.OTHER, guard="self.odd"), site("break", Cause.LORA_CAP, guard="loras"))
    exits, _ = to_lines([Event(0, 3, request_id="a"), Event(1, 3, request_id="a")], 5, 0)
    assert [line.guard for line in exits] == ["self.odd", None]


@pytest.mark.parametrize(
    ("cause", "pause", "expected"),
    [
        (Cause.PAUSED, "PAUSED_NEW", (Cause.PAUSED, "PAUSED_NEW")),
        (Cause.TOKEN_BUDGET, "PAUSED_ALL", (Cause.PAUSED, "PAUSED_ALL")),
        (Cause.TOKEN_BUDGET, "PAUSED_NEW", (Cause.TOKEN_BUDGET, None)),
        (Cause.TOKEN_BUDGET, "UNPAUSED", (Cause.TOKEN_BUDGET, None)),
    ],
)
def test_a_pause_takes_the_whole_budget(sites, cause, pause, expected):
    sites(site("condition", cause))
    line = exit_of(Event(0, 0, pause=SimpleNamespace(name=pause)))
    assert (line.cause, line.detail) == expected


@pytest.mark.parametrize(
    ("queued", "pause", "request_id", "expected"),
    [
        (3, "UNPAUSED", None, (Cause.OTHER, None)),
        (0, "UNPAUSED", None, (Cause.QUEUE_EMPTY, None)),
        (0, "PAUSED_NEW", "a", (Cause.PAUSED, "PAUSED_NEW")),
        (3, "PAUSED_NEW", None, (Cause.PAUSED, "PAUSED_NEW")),
        (0, "PAUSED_NEW", None, (Cause.QUEUE_EMPTY, None)),
    ],
)
@pytest.mark.parametrize("cause", [guards.QUEUE_OR_INPUT_BUDGET, Cause.QUEUE_EMPTY])
def test_a_queue_that_says_it_holds_nobody(sites, cause, queued, pause, request_id, expected):
    sites(site("break", cause))
    line = exit_of(Event(0, 3, request_id=request_id, queued=queued, pause=SimpleNamespace(name=pause)))
    assert (line.cause, line.detail) == expected


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (0, (Cause.PP_STAGGER, None)),
        (1, (Cause.OUTPUT_IN_FLIGHT, "diffusion_read_only")),
        (2, (Cause.OTHER, None)),
    ],
)
def test_the_part_of_a_condition_that_was_false(sites, part, expected):
    sites(site("continue", guards.NOT_ELIGIBLE), site("condition", Cause.LORA_CAP, Cause.PREFILL_THROTTLED))
    line = exit_of(Event(0, 3, part, request_id="a"))
    assert (line.cause, line.detail) == expected
    assert exit_of(Event(1, 3, 1, request_id="a")).cause == Cause.PREFILL_THROTTLED


def test_a_status_that_is_not_ready(sites):
    sites(site("continue", guards.BLOCKED_STATUS))
    line = exit_of(Event(0, 3, request_id="a", status=SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")))
    assert (line.cause, line.detail) == (Cause.REMOTE_KV_PENDING, "WAITING_FOR_REMOTE_KVS")
    assert (
        exit_of(Event(0, 3, request_id="a", status=SimpleNamespace(name="WAITING_FOR_GODOT"))).cause
        == Cause.OTHER
    )


def test_zero_tokens_are_explained_by_the_cap_before_of_the_same_request(sites):
    sites(site(None, Cap.ENCODER_BUDGET), site("break", guards.ZERO_TOKENS))
    capped = Event(0, 3, request_id="a", tokens_before=9, tokens_after=0)
    exits, caps = to_lines([capped, Event(1, 3, request_id="a"), Event(1, 3, request_id="b")], 5, 0)
    assert caps == [ChunkCap("a", Cap.ENCODER_BUDGET, 9, 0, "scheduler.py:7")]
    assert [(line.cause, line.detail) for line in exits] == [
        (Cause.ENCODER_BUDGET, Cap.ENCODER_BUDGET),
        (Cause.NO_NEW_TOKENS, None),
    ]


@pytest.mark.parametrize(
    ("cap", "budget", "now", "threshold", "expected"),
    [
        (Cap.TOKEN_BUDGET, 5, 5, 0, (Cap.TOKEN_BUDGET, None)),
        (Cap.TOKEN_BUDGET, 5, 4, 0, (Cap.INPUT_BUDGET, None)),
        (Cap.TOKEN_BUDGET, None, 4, 0, (Cap.TOKEN_BUDGET, None)),
        (Cap.LONG_PREFILL, 5, 4, 4, (Cap.LONG_PREFILL, None)),
        (Cap.LONG_PREFILL, 5, 5, 4, (Cap.LONG_PREFILL_ADAPTIVE, None)),
        (Cap.OTHER, 5, 4, 0, (Cap.OTHER, "guard")),
    ],
)
def test_a_cap(sites, cap, budget, now, threshold, expected):
    sites(site(None, cap))
    _, [line] = to_lines([Event(0, budget, request_id="a", tokens_before=9, tokens_after=now)], 5, threshold)
    assert (line.cap, line.statement) == expected
    assert (line.wanted_tokens, line.capped_tokens) == (9, now)


def test_after_64_exits_alike_the_65th_stands_for_the_rest(sites):
    sites(site("continue", Cause.LORA_CAP))
    events = [Event(0, 3, request_id=f"r{number}") for number in range(70)]
    exits = one_by_one(to_lines(events, 5, 0)[0])
    assert [line.request_id for line in exits[63:]] == ["r63", None]
    assert [line.count for line in exits[63:]] == [1, 6]


def test_requests_skipped_in_a_row_share_an_entry_and_each_has_its_budget(sites):
    skip = site("continue", Cause.OUTPUT_IN_FLIGHT, loop="running")
    sites(skip, site("continue", Cause.LORA_CAP, loop="running"))
    exits, _ = to_lines(
        [
            Event(site, budget, request_id=name)
            for site, budget, name in [(0, 9, "a"), (0, 9, "b"), (0, 7, "c"), (1, 7, "d"), (0, 6, "e")]
        ],
        5,
        0,
    )
    words = {"location": "scheduler.py:7", "via": "source"}
    in_flight, lora = ("running", "continue", Cause.OUTPUT_IN_FLIGHT), ("running", "continue", Cause.LORA_CAP)
    assert exits == [
        Exit(*in_flight, "a", 9, **words, also=[AlsoSkipped("b", 9), AlsoSkipped("c", 7)]),
        Exit(*lora, "d", 7, **words),
        Exit(*in_flight, "e", 6, **words),
    ]
    assert one_by_one(exits) == [
        Exit(*in_flight, "a", 9, **words),
        Exit(*in_flight, "b", 9, **words),
        Exit(*in_flight, "c", 7, **words),
        Exit(*lora, "d", 7, **words),
        Exit(*in_flight, "e", 6, **words),
    ]


def test_exits_with_facts_of_their_own_share_no_entry(sites):
    sites(site("continue", Cause.KV_BLOCKS), site("continue", Cause.OTHER, guard="self.odd"))
    taken = [(0, "a"), (0, "b"), (1, "c"), (1, "d")]
    exits, _ = to_lines([Event(at, 3, request_id=name) for at, name in taken], 5, 0)
    assert [line.request_id for line in exits] == ["a", "b", "c", "d"]


def test_a_loop_that_looked_at_everybody_has_no_exit(sites):
    sites(site("condition", guards.LOOP_DONE, loop="running"))
    assert to_lines([Event(0, 3)], 5, 0) == ([], [])


def test_what_ends_a_loop(sites):
    sites(
        site("continue", Cause.LORA_CAP),
        site(None, Cap.MAX_MODEL_LEN),
        site("condition", guards.LOOP_DONE, loop="running"),
        site("break", Cause.KV_BLOCKS),
        site(None),
    )
    assert ended_loops([Event(0, 3), Event(1, 3), Event(4, None)]) == set()
    assert ended_loops([Event(2, 3)]) == {"running"}
    assert ended_loops([Event(2, 3), Event(3, 3)]) == {"running", "waiting"}
    noted = [latest_preemption([Event(number, 3)]) for number in range(5)]
    assert noted == [None, None, None, None, Event(4, 3)]
    assert latest_preemption([Event(4, 3), (0, 3, 0, None)]) is None
