"""What a load asks of an engine: rates, the backlog, and who sets the pace."""

import random

import pytest

from schedtrace.diagnose.offered_load import OfferedLoad, load_of_all, offered_load
from schedtrace.diagnose.rules import RULES
from tests.makers import arrival, finish, step


def one_by_one(view_of, *, every_us, took_us, requests=24, late_us=0, given_up=0):
    """A request every so often, every second one late; each is a step, as soon as the one before is done.

    Clients give up the last requests.
    """
    lines, free = [], 0
    came = [every_us * number + late_us * (number % 2) for number in range(requests)]
    for number, us in enumerate(came):
        start = max(free, us + 10)
        free = start + took_us
        waiting = sum(one < start for one in came) - number - 1
        lines.append(
            step(
                number,
                start=start,
                took=10,
                back=took_us,
                got={f"r{number}": 100},
                new=[f"r{number}"],
                running=1,
                waiting=waiting,
                arrived=[arrival(f"r{number}", us)],
                finished=[
                    finish(
                        f"r{number}",
                        "ABORTED" if number >= requests - given_up else "LENGTH_CAPPED",
                        finished_us=free,
                        prompt_tokens=100,
                        output_tokens=1,
                    )
                ],
            )
        )
    return view_of(*lines)


def test_more_comes_than_is_served(view_of, recorded_words):
    """One every 1 ms, one served every 2 ms: half of them are there when the last one comes."""
    load = offered_load(one_by_one(view_of, every_us=1000, took_us=2000))
    assert (load.pace, load.grows, load.backlog) == ("clock", True, 12)
    assert load.requests_per_s == pytest.approx(1000)
    assert load.served_requests_per_s == pytest.approx(500, rel=0.01)
    assert load.beyond_frac == pytest.approx(1, rel=0.01)
    recorded_words(load.summary)


def test_an_engine_keeps_up(view_of, recorded_words):
    """One every 10 ms, served in 2 ms."""
    load = offered_load(one_by_one(view_of, every_us=10_000, took_us=2000))
    assert (load.pace, load.grows, load.beyond_frac) == ("clock", False, 0)
    assert load.working_frac == pytest.approx(0.2, abs=0.02)
    assert (load.busy_periods, load.requests_per_busy_period) == (24, 1)
    recorded_words(load.summary, load.throughput_note)


@pytest.mark.parametrize(("given_up", "keeps_up"), [(0, True), (2, True), (3, False)])
def test_an_engine_whose_clients_give_up_does_not_keep_up(view_of, given_up, keeps_up, recorded_words):
    """Two of 24 are less than a tenth of the requests, three are more."""
    load = offered_load(one_by_one(view_of, every_us=10_000, took_us=2000, given_up=given_up))
    assert (load.grows, load.keeps_up) == (False, keeps_up)
    recorded_words(load.summary, load.throughput_note)


@pytest.mark.parametrize(("working_frac", "idles"), [(0.94, True), (0.95, False)])
def test_an_engine_that_is_never_idle_may_set_the_throughput_itself(working_frac, idles):
    """Some of its clients may wait for answers, although most requests arrive at times of their own."""
    load = OfferedLoad("clock", working_frac, requests_per_s=5.0, served_requests_per_s=5.0)
    assert (load.throughput_note != load.summary) is idles


@pytest.mark.parametrize(("late_us", "every_us"), [(2000, 12_000), (4000, None)])
def test_arrivals_are_even_if_their_gaps_hardly_differ(view_of, late_us, every_us):
    """The 23 gaps are 12 and 8 ms, or 14 and 6 ms: 21 or 42 % of their mean apart."""
    load = offered_load(one_by_one(view_of, every_us=10_000, took_us=2000, late_us=late_us))
    assert load.every_us == every_us


def test_what_several_engines_are_offered(view_of, recorded_words):
    """Two engines get a request every 10 ms; a third one cannot keep up."""
    even = offered_load(one_by_one(view_of, every_us=10_000, took_us=2000))
    late = offered_load(one_by_one(view_of, every_us=10_000, took_us=2000, late_us=4000))
    recorded_words(load_of_all([even, even]), load_of_all([even, late]))
    assert not load_of_all([even, offered_load(one_by_one(view_of, every_us=1000, took_us=2000))])


def test_a_long_latency_is_no_backlog(view_of):
    """One every 1 ms, each done after ten steps of 1 ms: the last ones end 10 ms after the last arrival."""
    lines = []
    for at in range(33):
        there = [f"r{number}" for number in range(max(0, at - 9), min(at, 23) + 1)]
        lines.append(
            step(
                at,
                start=1000 * at,
                took=10,
                back=990,
                got=dict.fromkeys(there, 1),
                new=there[-1:] if at < 24 else [],
                arrived=[arrival(f"r{at}", 1000 * at - 7)] if at < 24 else [],
                finished=[finish(f"r{at - 9}", finished_us=1000 * at + 995)] if at >= 9 else [],
            )
        )
    load = offered_load(view_of(*lines))
    assert (load.grows, load.requests_per_s, load.served_requests_per_s) == (False, 1000, 1000)


def test_few_requests_show_no_rate(view_of):
    assert offered_load(one_by_one(view_of, every_us=10_000, took_us=2000, requests=7)).pace == "unknown"


def closed(view_of, *, think_us, clients=2, turns=12, trial=False):
    """Clients that send their next request so long after an answer, of one step of 1 to 1.6 ms."""
    lines, at = [], 0
    for turn in range(turns):
        took_us = 1000 + 200 * (turn % 4)
        names = [f"r{turn}-{client}" for client in range(clients)]
        lines.append(
            step(
                turn,
                trial=turn + 1 if trial else None,
                start=at,
                took=10,
                back=took_us - 10,
                got=dict.fromkeys(names, 1),
                new=names,
                arrived=[arrival(name, at - 3, at - 3) for name in names],
                finished=[finish(name, finished_us=at + took_us - 3) for name in names],
            )
        )
        at += took_us + think_us
    return view_of(*lines)


def test_clients_that_think(view_of, recorded_words):
    load = offered_load(closed(view_of, think_us=4000))
    assert (load.pace, load.clients.clients, load.think_ms) == ("answers", 2, pytest.approx(4))
    recorded_words(load.client_words)


def test_trials_whose_requests_were_sent_at_once_are_no_clients(view_of):
    load = offered_load(closed(view_of, think_us=0, trial=True))
    assert (load.pace, load.clients, bool(load.summary)) == ("at_once", None, False)


def test_requests_that_the_trace_does_not_hold_leave_it_unknown(view_of):
    timeline = one_by_one(view_of, every_us=1000, took_us=2000)
    timeline.requests_missing = True
    assert offered_load(timeline).pace == "unknown"


def rounds_of_eight(outputs):
    """Eight requests at once, done in one step of 1 to 20 ms; the next eight 2 to 8 ms later."""
    draw, lines, at, done, ended = random.Random(7), [], 1000, [], 0  # noqa: S311  # repeatable
    for number in range(20):
        names = [f"r{number}{one}" for one in "abcdefgh"]
        took = int(draw.uniform(1000, 20_000))
        lines.append(
            step(
                number,
                start=at + 20,
                took=10,
                back=took,
                got=dict.fromkeys(names, 1),
                new=names,
                arrived=[arrival(name, at + 2 * place, at + 18) for place, name in enumerate(names)],
                finished=[finish(name, finished_us=ended, output_tokens=outputs) for name in done],
            )
        )
        done, ended = names, at + 20 + took
        at = ended + int(draw.uniform(2000, 8000))
    return lines


@pytest.mark.parametrize("outputs", [1, 5])
def test_rounds_of_requests_for_one_token(view_of, outputs, recorded_words):
    view = view_of(*rounds_of_eight(outputs), max_num_running_reqs=16)
    load = offered_load(view)
    assert (load.clients.pattern, load.one_token) == ("barrier", outputs == 1)
    [finding] = RULES["client-limited"](view)
    recorded_words(load.summary, *finding.advice)


def test_requests_of_a_round_that_come_during_a_step(view_of, recorded_words):
    """The first four of a round are computed in a step of their own."""
    lines = []
    for line in rounds_of_eight(1):
        first, second = line.arrived[:4], line.arrived[4:]
        ids = [[one.request_id for one in part] for part in (first, second)]
        begin, took = line.start_us, line.output_us - line.start_us
        for part, (names, arrived) in enumerate(zip(ids, (first, second), strict=True)):
            lines.append(
                step(
                    2 * line.step + part,
                    start=begin + part * took // 2,
                    took=10,
                    back=took // 2 - 20,
                    got=dict.fromkeys(names, 1),
                    new=names,
                    arrived=[
                        arrival(one.request_id, one.arrived_us + part * 20, one.queued_us + part * 30)
                        for one in arrived
                    ],
                    finished=[] if part else line.finished,
                )
            )
    [finding] = RULES["arrival-limited"](view_of(*lines, max_num_running_reqs=16))
    recorded_words(finding.advice)


def test_an_engine_that_only_prefills_has_no_choice(view_of):
    settings = {"kv_transfer_config.kv_role": "kv_producer"}
    assert not offered_load(view_of(*rounds_of_eight(1), settings=settings)).one_token
