"""Cases 109, 115, 117, 119, 155 and others of the kind: what is asked of an engine, and what it can do."""

import random
from functools import partial

from tests.exam.case import Machine, case

SILENT = (r"\bwarning\b", r"\bcritical\b")
NO_MORE_SEATS = (r"Too few seats", r"max-num-seqs \d")


def stream(engine, *, requests, per_s, prompt=(50, 150), outputs=(20, 40)):
    """Requests at random times, so many a second on average."""
    chance, us = random.Random(109), 0.0  # noqa: S311  # a load, no secret
    for number in range(requests):
        us += chance.expovariate(per_s / 1e6)
        engine.arrive(us, f"r{number}", chance.randint(*prompt), chance.randint(*outputs))
    engine.run()


case(
    "109-more-than-it-can-do",
    "max-num-seqs-bound",
    engine={"max_num_seqs": 16, "times": Machine(500, 20, 300)},
    says=(r"\b1[3-6]\d(\.\d)? requests/s", r"\b(7|8)\d(\.\d)?( requests)?/s", r"grew|grows", r"device"),
    silent=NO_MORE_SEATS,
    exits={"max_num_seqs": 100},
)(partial(stream, requests=400, per_s=149))
case(
    "109b-no-limit-refuses",
    engine={"max_num_seqs": 512, "times": Machine(500, 20, 300)},
    says=(r"\b9\d(\.\d)? requests/s", r"grew|grows"),
    silent=(r"Nothing limits",),
)(partial(stream, requests=400, per_s=149))
case(
    "115-as-fast-with-4-seats-as-with-16",
    "max-num-seqs-bound",
    engine={"max_num_seqs": 4, "times": Machine(300, 15, 4000)},
    says=(r"device",),
    silent=NO_MORE_SEATS,
    exits={"max_num_seqs": 100},
)(partial(stream, requests=60, per_s=60))
case(
    "115b-prompts-fill-it",
    "max-num-seqs-bound",
    "token-budget-bound",
    engine={"max_num_seqs": 4, "times": Machine(500, 100, 100)},
    says=(r"device",),
    silent=NO_MORE_SEATS,
)(partial(stream, requests=120, per_s=40, prompt=(300, 900), outputs=(2, 6)))
case(
    "115c-weights-dominate",
    "max-num-seqs-bound",
    engine={"max_num_seqs": 4, "times": Machine(8000, 15, 60)},
    says=(r"max-num-seqs \d", r"limit this run"),
    silent=(r"The device is the limit",),
    exits={"max_num_seqs": 100},
)(partial(stream, requests=80, per_s=40))


@case(
    "117-bursts-of-a-client",
    "client-limited",
    "arrival-limited",
    says=(r"client|burst", r"work\w* \d+ % of the time|idle"),
    silent=(r"[Tt]oo few seats",),
)
def bursts_of_a_client(engine):
    """Eight requests at once; 2 s after the last of them is done, the next eight."""
    chance = random.Random(117)  # noqa: S311  # a load, no secret
    left = iter(range(10))
    open_ones = set()

    def burst(us):
        if (number := next(left, None)) is None:
            return
        for place in range(8):
            open_ones.add(name := f"b{number}-{place}")
            engine.arrive(us + 100 * place, name, 200, chance.randint(15, 45))

    def done(request_id):
        open_ones.discard(request_id)
        if not open_ones:
            burst(engine.clock.now_us + 2_000_000)

    engine.finished = done
    burst(0)
    engine.run()


@case(
    "117b-two-clients-that-think",
    "client-limited",
    says=(r"\b2 clients", r"work\w* \d+ % of the time"),
)
def two_clients_that_think(engine):
    """Two clients with one request open each, which think for 300 ms after an answer."""
    sent = iter(range(2, 40))

    def next_one(_):
        if (number := next(sent, None)) is not None:
            engine.arrive(engine.clock.now_us + 300_000, f"r{number}", 300, 20 + number % 3)

    engine.finished = next_one
    for number in range(2):
        engine.arrive(5000 * number, f"r{number}", 300, 20)
    engine.run()


@case(
    "155-runs-to-max-tokens",
    "long-tail",
    engine={"enable_prefix_caching": True, "max_model_len": 4096},
    says=(r"\b3 requests ran to max_tokens", r"2,000", r"came again", r"thinking_token_budget"),
    silent=(*SILENT, r"more sessions", r"more connections"),
)
def some_answers_do_not_end(engine):
    """A client sends one request at a time; three of 40 prompts are answered until ``max_tokens``."""
    endless, sent = {9, 10, 25}, iter(range(1, 40))

    def send(number, us):
        text = 9 if number == 10 else number  # the client sends that prompt again
        stops = None if number in endless else 60 + 7 * number % 120
        prompt = [100 + (7919 * text + 31 * at) % 1800 for at in range(300)]
        engine.arrive(us, f"r{number}", prompt, 2000, stop_at=stops)

    def next_one(_):
        if (number := next(sent, None)) is not None:
            send(number, engine.clock.now_us + 50_000)

    engine.finished = next_one
    send(0, 0)
    engine.run()


def stream_with_a_burst(engine, *, texts, retries):
    """250 requests, 80 of them at once; clients whose request is unfinished after 2 s send it again."""
    done, names = set(), iter(range(1000))
    engine.finished = done.add

    def send(number, us, tries):
        name = f"r{next(names)}"
        prompt = [100 + (7919 * (number % texts) + 31 * at) % 1800 for at in range(300)]
        engine.arrive(us, name, prompt, 50 + 7 * number % 40)

        def try_again():
            if name not in done and tries:
                send(number, engine.clock.now_us + 10_000, tries - 1)

        engine.at(us + 2_000_000, try_again)

    for number in range(250):
        late = min(80, max(0, number - 60))  # the burst
        send(number, 65_000 * (number - late), retries)
    engine.run()


@case(
    "161-retries-behind-a-proxy",
    "aborted-requests",
    engine={"max_num_seqs": 8, "enable_prefix_caching": True, "async_scheduling": True},
    says=(r"came again", r"no abort stopped them", r"disconnect"),
)
def retries_without_an_abort(engine):
    """After a burst, clients give up after 2 s and try again, but a proxy keeps the first request open."""
    stream_with_a_burst(engine, texts=1000, retries=3)


@case(
    "161b-prompts-in-turn",
    "max-num-seqs-bound",
    engine={"max_num_seqs": 8, "enable_prefix_caching": True, "async_scheduling": True},
    silent=(r"came again", r"disconnect"),
)
def prompts_in_turn(engine):
    """A benchmark sends 30 prompts in turn, each again before its first answer."""
    stream_with_a_burst(engine, texts=30, retries=0)


case(
    "119-is-it-full",
    says=(r"2\d(\.\d)? requests/s", r"tokens/s", r"keeps up", r"works >?\d+ % of the time", r"fullest"),
    silent=(*SILENT, r"device is the limit"),
)(partial(stream, requests=120, per_s=25, prompt=(100, 400)))
case("119b-all-at-once", silent=(*SILENT, r"closed loop", r"client is the limit"))(
    partial(stream, requests=16, per_s=1e6, outputs=(40, 40))
)
