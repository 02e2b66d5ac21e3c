"""Patterns of client behaviour: loads that are closed loops, and how long their clients think."""

import random

import pytest

from schedtrace.workloads.clients import Clients, as_closed_loop, clients_of
from schedtrace.workloads.workload import LoadRequest, make_workload


def served(clients, think_us, requests, *, seed=1, took=(800, 1200)):
    """Times of a closed loop: each client sends, waits for its answer, thinks."""
    draw = random.Random(seed)  # noqa: S311  # repeatable
    free = sorted(100.0 * client for client in range(clients))
    arrived, answered = [], []
    for _ in range(requests):
        sent = free.pop(0)
        done = sent + draw.uniform(*took)
        arrived.append(sent)
        answered.append(done)
        free = sorted([*free, done + think_us])
    return arrived, answered


@pytest.mark.parametrize("think_us", [5.0, 700.0])
def test_each_client_sends_its_next_request_at_once_or_after_a_while(think_us):
    assert clients_of(*served(4, think_us, 40)) == Clients("loop", 4, pytest.approx((think_us,) * 36))


def test_a_pause_of_a_benchmark_between_its_first_request_and_the_others_does_not_hide_it():
    arrived, answered = served(4, 5, 40)
    loop = clients_of([-9000.0, *arrived], [-8000.0, *answered])
    assert loop.clients == 4
    assert loop.think_us[0] == pytest.approx(8300)


def test_random_arrivals_are_no_clients_of():
    draw = random.Random(2)  # noqa: S311  # repeatable
    for load in (0.2, 0.8, 2.0):
        us, arrived = 0.0, []
        for _ in range(60):
            us += draw.expovariate(load / 1000)
            arrived.append(us)
        free, answered = 0.0, []
        for one in arrived:
            free = max(free, one) + draw.uniform(800, 1200)
            answered.append(free)
        assert clients_of(arrived, answered) is None


def test_arrivals_by_the_clock_are_no_clients_of():
    draw = random.Random(3)  # noqa: S311  # repeatable
    arrived = [1500.0 * number for number in range(40)]
    assert clients_of(arrived, [us + draw.uniform(800, 1200) for us in arrived]) is None
    assert clients_of(arrived, [us + 1000 for us in arrived]) is None  # nor where all take the same time


def test_bursts_are_no_clients_of():
    draw = random.Random(4)  # noqa: S311  # repeatable
    arrived = [20_000.0 * (number // 12) + 5 * (number % 12) for number in range(72)]
    assert clients_of(arrived, [us + draw.uniform(800, 12_000) for us in arrived]) is None


def test_requests_that_came_at_once_are_no_clients_of():
    assert clients_of([0.0] * 40, [1000.0 * number for number in range(40)]) is None


def test_what_the_user_says_is_believed():
    arrived = [0.0, 0.0, 50.0, 2000.0]
    assert as_closed_loop(arrived, [100.0, 300.0, 900.0, None], clients=2) == Clients(
        "loop", 2, (0.0, 1700.0)
    )


def rounds(size, think_us, requests, *, seed=5):
    """Times of a barrier: ``size`` requests at once, and the next when all are done."""
    draw, begin, arrived, answered = random.Random(seed), 0.0, [], []  # noqa: S311  # repeatable
    for number in range(requests):
        if number and number % size == 0:
            begin = max(answered) + think_us
        arrived.append(begin + 2 * (number % size))
        answered.append(arrived[-1] + draw.uniform(500, 2000))
    return arrived, answered


@pytest.mark.parametrize("think_us", [10.0, 5000.0])
def test_rounds_are_a_barrier(think_us):
    clients = clients_of(*rounds(8, think_us, 64))
    assert (clients.pattern, clients.clients) == ("barrier", 8)
    assert clients.think_us == pytest.approx((think_us,) * 7)


@pytest.mark.parametrize(
    ("thinks", "pattern"), [(lambda draw: draw.uniform(2000, 8000), "barrier"), (lambda _: 5000, "loop")]
)
def test_rounds_that_are_answered_in_one_step(thinks, pattern):
    """Eight requests are sent and answered together; with equal think times they may be eight clients."""
    draw, begin, arrived, answered = random.Random(7), 0.0, [], []  # noqa: S311  # repeatable
    for _ in range(20):
        arrived += [begin + 2 * number for number in range(8)]
        took = draw.uniform(500, 20_000)
        answered += [begin + took] * 8
        begin += took + thinks(draw)
    clients = clients_of(arrived, answered)
    assert (clients.pattern, clients.clients) == (pattern, 8)


def test_clients_whose_requests_share_steps_are_a_loop():
    """Three clients with think times of their own, answered at multiples of 1 ms."""
    draw, sent, gone = random.Random(8), [], []  # noqa: S311  # repeatable
    for _ in range(3):
        us = 0.0
        for _ in range(40):
            us += draw.uniform(5000, 9000)
            sent.append(us)
            us = (us // 1000 + 2) * 1000
            gone.append(us)
    assert clients_of(sent, gone).pattern in ("loop", "sessions")


def test_sessions_have_a_number_and_a_mean_think_time():
    """Six users think 20 ms on average, at random, and wait about as long for each answer."""
    draw, sent, gone, thinks = random.Random(9), [], [], []  # noqa: S311  # repeatable
    for _ in range(6):
        us = 0.0
        while us < 2_000_000:
            thinks.append(draw.expovariate(1 / 20_000))
            us += thinks[-1]
            sent.append(us)
            us += draw.uniform(15_000, 25_000)
            gone.append(us)
    clients = clients_of(sent, gone)
    assert (clients.pattern, clients.clients) == ("sessions", 6)
    assert clients.think_us == (pytest.approx(sum(thinks) / len(thinks), rel=0.05),)


def test_three_rounds_show_no_pattern():
    assert clients_of(*rounds(8, 10.0, 24)) is None


def test_requests_after_aborts_are_retries():
    """Random times; one in four is given up after 900 us and sent again at once."""
    draw, us, sent, gone, aborted = random.Random(6), 0.0, [], [], []  # noqa: S311  # repeatable
    for number in range(80):
        us += draw.expovariate(1 / 2000)
        sent.append(us)
        aborted.append(number % 4 == 0)
        gone.append(us + (900 if aborted[-1] else draw.uniform(200, 600)))
        if aborted[-1]:
            sent.append(us + 905)
            gone.append(us + 1300)
            aborted.append(False)
    assert clients_of(sent, gone, aborted).pattern == "retries"
    assert clients_of(sent, gone) is None


@pytest.mark.parametrize("seed", range(5))
def test_random_and_bursty_arrivals_have_none_of_these(seed):
    draw = random.Random(seed)  # noqa: S311  # repeatable
    for gap_us in (lambda: draw.expovariate(1 / 700), lambda: draw.gammavariate(0.3, 2000)):
        us, sent = 0.0, []
        for _ in range(120):
            us += gap_us()
            sent.append(us)
        assert clients_of(sent, [sent_us + draw.uniform(500, 2500) for sent_us in sent]) is None


@pytest.mark.parametrize(
    ("clients", "thinks_us"), [(8, (5.0, 6.0)), (1, (5.0, 6.0, 7.0, 5.0, 6.0, 7.0, 5.0, 6.0, 7.0))]
)
def test_another_number_of_clients_thinks_as_those_recorded(clients, thinks_us):
    """Ten requests: of eight clients two follow an answer, of one client nine."""
    loop = Clients("loop", 7, (5.0, 6.0, 7.0))
    requests = [
        LoadRequest(request_id=f"r{number}", arrived_us=0.0, prompt_tokens=1, output_tokens=1)
        for number in range(10)
    ]
    load = make_workload("load", "jsonl", lambda: iter(requests), clients=loop)
    assert load.with_concurrency(clients).clients == Clients("loop", clients, thinks_us)
