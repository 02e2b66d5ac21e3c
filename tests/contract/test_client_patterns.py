"""What decides when a client sends its next request: seven loads on vLLM's scheduler, and on two ranks."""

import random
from collections import deque

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze
from schedtrace.diagnose.offered_load import offered_load
from schedtrace.timeline.timeline import make_timeline
from tests.simulated import simulated

pytestmark = pytest.mark.vllm

REQUESTS = 96


class Client:
    """Sends requests of random lengths to an engine.

    Args:
        engine: A simulation, or ranks.
    """

    def __init__(self, engine):
        self.engine, self.chance = engine, random.Random(7)  # noqa: S311  # repeatable
        self.sent = self.open = 0
        engine.finished = self._finished
        self.answered = lambda: None

    def _finished(self, request_id):
        self.open -= 1
        self.engine.drop_request(request_id)
        self.answered()

    @property
    def now_us(self):
        return self.engine.clock.now_us

    def send(self, us):
        """Send a request then; returns its id, or None when all were sent."""
        if self.sent == REQUESTS:
            return None
        self.sent, self.open = self.sent + 1, self.open + 1
        request_id = f"r{self.sent}"
        self.engine.arrive(us, request_id, self.chance.randint(20, 200), self.chance.randint(5, 60))
        return request_id


def loop(client):
    client.answered = lambda: client.send(client.now_us + 5000)
    for _ in range(6):
        client.send(0)


def barrier(client):
    def next_round(us):
        for number in range(12):
            client.send(us + 20 * number)

    client.answered = lambda: client.open or next_round(client.now_us + 3000)
    next_round(0)


def sessions(client):
    client.answered = lambda: client.send(client.now_us + client.chance.expovariate(1 / 60_000))
    for _ in range(6):
        client.send(client.chance.expovariate(1 / 60_000))


def limit(client):
    """Bursts of ten at random times, in front of which a queue keeps at most six open."""
    queue = deque()

    def enter():
        while queue and client.open < 6:
            client.send(client.now_us + queue.popleft())

    def come():
        queue.append(100)
        enter()

    client.answered = enter
    us = 0.0
    for number in range(REQUESTS):
        us += client.chance.expovariate(1 / 600_000) if number % 10 == 0 else 500
        client.engine.at(us, come)


def retries(client):
    """Random times; who has no answer after 150 ms asks again at once."""
    waiting = {}

    def ask(us):
        request_id = client.send(us)
        if request_id is not None:
            waiting[request_id] = True
            client.engine.at(us + 150_000, lambda: give_up(request_id))

    def give_up(request_id):
        if request_id in client.engine.scheduler.requests:
            client.engine.abort(request_id)
            ask(client.now_us + 2000)

    us = 0.0
    for _ in range(REQUESTS - 30):
        us += client.chance.expovariate(1 / 14_000)
        client.engine.at(us, lambda us=us: ask(us))


def random_times(client):
    us = 0.0
    for _ in range(REQUESTS):
        us += client.chance.expovariate(1 / 20_000)
        client.send(us)


def by_the_clock(client):
    for number in range(REQUESTS):
        client.send(20_000.0 * number)


LOADS = {
    loop: ("loop", 6),
    barrier: ("barrier", 12),
    sessions: ("sessions", None),
    limit: ("limit", 6),
    retries: ("retries", None),
    random_times: (None, None),
    by_the_clock: (None, None),
}


@pytest.fixture
def played(tmp_path):
    """A function that gives the run of a load, on one engine or on ranks."""

    def of(load, ranks=1):
        def send(engine):
            load(Client(engine))
            engine.run()

        options = {} if ranks == 1 else {"data_parallel_size": ranks, "lockstep": False}
        return simulated(tmp_path, send, max_num_seqs=32, **options)

    return of


@pytest.mark.parametrize("load", LOADS)
def test_the_pattern_that_predicts_the_next_arrival_is_recognized(played, load):
    pattern, number = LOADS[load]
    clients = offered_load(make_timeline(played(load).traces[0])).clients
    assert (clients and clients.pattern) == pattern
    assert number is None or clients.clients == number


def client_limited(run):
    [report] = analyze([run]).runs
    return [finding for finding in report.every_finding() if finding.code == "client-limited"]


def test_a_barrier_is_reported_by_the_places_that_it_leaves_empty(played):
    [finding] = client_limited(played(barrier))
    assert (finding.evidence.pattern, finding.evidence.clients, finding.evidence.rounds) == ("barrier", 12, 8)
    assert 0.3 < finding.evidence.empty_frac < 0.6
    assert finding.cost_of == "run"
    assert finding.cost_frac == pytest.approx(
        finding.evidence.working_frac - finding.evidence.at_fullest_frac
    )


@pytest.mark.parametrize(("load", "pattern"), [(loop, "loop"), (barrier, "barrier"), (random_times, None)])
def test_a_clients_next_request_may_go_to_another_rank(played, load, pattern):
    findings = client_limited(played(load, ranks=2))
    assert [finding.evidence.pattern for finding in findings] == ([pattern] if pattern else [])
    for finding in findings:
        assert finding.engine_ranks == [0, 1]
        assert finding.evidence.engines == 2
        assert finding.evidence.clients == LOADS[load][1]
