"""Cases 17, 19, 21, 23, 25, 153 and others of the kind: ranks, defaults, pipelines, caches, hosts."""

import math
from dataclasses import replace
from functools import partial

from schedtrace.step_times.constants import HostTimes
from tests.contract.causes.models import with_mamba
from tests.contract.causes.test_budgets import NGRAM
from tests.exam.case import MACHINE, Machine, case


def together(engine, *, requests, prompt, outputs, every_us=0.0, **options):
    """Requests of one kind, one after the other."""
    for number in range(requests):
        engine.arrive(every_us * number, f"r{number}", prompt, outputs, **options)
    engine.run()


@case("17-uneven-ranks", "rank-imbalance", ranks=2, says=(r"rank 1|rank 0",))
def uneven_ranks(engine):
    """Rank 0 gets every long prompt, rank 1 the short ones."""
    rank = engine.config.parallel_config.data_parallel_index
    together(engine, requests=24, prompt=100 if rank else 3000, outputs=40, every_us=15_000)


DEFAULTS = {"max_num_seqs": None, "max_num_batched_tokens": None}
batch = partial(together, requests=256, prompt=15, outputs=60)
case(
    "19-defaults-server",
    "max-num-seqs-bound",
    engine={**DEFAULTS, "usage_context": "OPENAI_API_SERVER"},
    says=(r"max-num-seqs", r"\b128\b"),
    exits={"max_num_seqs": 30},
)(batch)
case("19-defaults-offline", engine={**DEFAULTS, "usage_context": "LLM_CLASS"})(batch)
case(
    "19b-seats-async",
    "max-num-seqs-bound",
    engine={"max_num_seqs": 8, "async_scheduling": True},
    says=(r"max-num-seqs", r"\b8\b"),
    exits={"max_num_seqs": 100},
)(partial(together, requests=60, prompt=60, outputs=40, every_us=3000))
case(
    "19c-small-budget",
    "token-budget-bound",
    engine={"max_num_batched_tokens": 64, "max_num_seqs": 64},
    says=(r"max-num-batched-tokens", r"\b64\b"),
    exits={"token_budget": 50},
)(partial(together, requests=60, prompt=100, outputs=12, every_us=2000))
case(
    "19d-full-device",
    "token-budget-bound",
    engine={"max_num_batched_tokens": 2048, "times": Machine(500, 100, 100)},
    says=(r"device|compute|GPU",),
    silent=(r"(larger|raise|increase)[^.\n]*max-num-batched-tokens",),
    exits={"token_budget": 20},
)(partial(together, requests=80, prompt=1000, outputs=6, every_us=50_000))

PIPELINE = {"pipeline_parallel_size": 4, "times": Machine(400, 20, 600, host=HostTimes(50, 0, 0, 0, 10, 0))}


def uneven_stages(engine, *, sizes, outputs):
    """Each batch in flight begins with as many requests as arrive before its first step, and keeps them."""
    for batch_number, size in enumerate(sizes):
        for number in range(size):
            engine.arrive(45.0 * batch_number, f"b{batch_number}-{number}", 24, outputs)
    engine.run()


case(
    "21-pipeline-bubbles",
    "pipeline-bubbles",
    engine=PIPELINE,
    says=(r"\b13\b", r"\b2\b", r"batch|stage"),
)(partial(uneven_stages, sizes=(7, 13, 2, 10), outputs=80))
case(
    "21b-pipeline-of-two",
    "pipeline-bubbles",
    engine={**PIPELINE, "pipeline_parallel_size": 2},
    says=(r"\b20\b", r"batch|stage"),
)(partial(uneven_stages, sizes=(20, 3), outputs=100))
case("21c-even-pipeline", engine=PIPELINE)(partial(uneven_stages, sizes=(8, 8, 8, 8), outputs=80))

CACHED = {"enable_prefix_caching": True}
case(
    "23-prefix-shorter-than-a-block",
    "prefix-cache",
    engine={**CACHED, "block_size": 128, "num_blocks": 501},
    says=(r"\b128\b", r"block"),
)(partial(together, requests=40, prompt=120, outputs=16, every_us=20_000, shared=100))


@case(
    "23d-batch-of-prompts-shorter-than-a-block",
    "token-budget-bound",
    engine={**CACHED, "block_size": 784, "num_blocks": 501, "times": Machine(24_000, 430, 180)},
    says=(r"Prefill takes 9\d %", r"block of 784 tokens", r"If prompts begin alike"),
    silent=(r"(larger|raise|increase)[^.\n]*max-num-(seqs|batched-tokens)",),
    exits={"token_budget": 20},
)
def batch_of_short_prompts(engine):
    """A batch of prompts with the same 320 tokens at their beginning; a hybrid model's block has 784."""
    for number in range(240):
        engine.arrive(60.0 * number, f"row-{number}", 340 + 37 * number % 70, 5 + number % 7, shared=320)
    engine.run()


def _accepted(request_id, drafts):
    """Accept all drafts after short prompts, and hardly any after long ones; the id ends with the length."""
    return drafts * max(0, 9000 - int(request_id.split("-")[1])) // 9000


DRAFTS = {"speculative_config": NGRAM, "drafts": 3, "times": Machine(4300, 9, 28, 0.05)}


@case(
    "163-drafts-after-long-prompts",
    "spec-decode",
    engine={**DRAFTS, "accepted": _accepted, "num_blocks": 8001, "max_num_batched_tokens": 8192},
    says=(r"length of the context", r"prompts of [\d,]+ tokens? and more", r"num_speculative_tokens"),
    silent=(r"over time",),
)
def drafts_after_long_prompts(engine):
    """Three agents with prompts of 500 to 9,000 tokens; the longer one is, the fewer drafts are accepted."""
    sent = iter(range(3, 60))

    def send(number, us):
        prompt = 500 + number * 3557 % 8500
        engine.arrive(us, f"r{number}-{prompt}", prompt, 60)

    engine.finished = lambda _: (
        send(number, engine.clock.now_us + 40_000) if (number := next(sent, None)) is not None else None
    )
    for number in range(3):
        send(number, 50_000 * number)
    engine.run()


case(
    "165-drafts-that-nobody-verifies",
    "spec-decode",
    engine=DRAFTS,
    says=(r"first token", r"no draft was verified", r"without --speculative-config"),
)(partial(together, requests=60, prompt=400, outputs=1, every_us=9000))


@case(
    "139-drafts-are-rejected",
    "spec-decode",
    engine={
        "speculative_config": NGRAM,
        "async_scheduling": True,
        "drafts": 3,
        "accepted": lambda request_id, _: int(request_id == "q7"),
        "times": Machine(4300, 9, 28, 0.01),
    },
    says=(r"\b[0-2] % of its draft tokens", r"without --speculative-config"),
    silent=(r"max-num-seqs \d",),
)
def drafts_are_rejected(engine):
    """Ten clients; with asynchronous scheduling, hardly any token that the drafter proposes is accepted."""
    sent = iter(range(10, 120))

    def send(_=None):
        number = next(sent, None)
        if number is not None:
            engine.arrive(
                engine.clock.now_us + 500 + 137 * number % 2000,
                f"q{number}",
                110 + number % 40,
                80 + number % 60,
            )

    engine.finished = send
    for number in range(10):
        engine.arrive(900.0 * number, f"q{number}", 110 + number % 40, 80 + number % 60)
    engine.run()


case(
    "23b-prefix-evicted",
    "prefix-cache",
    "kv-bound",
    engine={**CACHED, "num_blocks": 70, "max_num_seqs": 4},
    says=(r"prefix", r"evict|KV|block"),
)(
    lambda engine: (
        [engine.arrive(90_000 * number, f"r{number}", 500, 8, text=number % 8) for number in range(24)],
        engine.run(),
    )
)


def resets(engine):
    """A shared prefix of 800 tokens, and a reset of the cache before each request."""
    for number in range(24):
        engine.arrive(150_000 * number, f"r{number}", 900, 12, shared=800)
        engine.at(150_000 * number - 500, engine.reset_prefix_cache)
    engine.run()


@case(
    "153-no-state-where-prompts-part",
    "prefix-cache",
    engine={**with_mamba(64), "max_num_batched_tokens": 2048, "max_model_len": 4096},
    says=(r"Mamba group had no state", r"prefix-cache-retention-interval 64", r"max-num-batched-tokens"),
    silent=(r"kv-cache-memory-bytes", r"gpu-memory-utilization"),
)
def instructions_at_the_end(engine):
    """Two turns of 40 talks, with 200 tokens of instructions at the end; Mamba states lie behind these."""

    def send(talk, turn, us):
        text = [100 + (7919 * talk + 31 * at + at * at % 97) % 1800 for at in range(1200 + 60 * turn)]
        engine.arrive(us, f"talk{talk}-{turn}", text + [100 + 13 * at % 1800 for at in range(200)], 20)

    for talk in range(40):
        send(talk, 0, 60_000 * talk)
        send(talk, 1, 60_000 * talk + 400_000)
    engine.run()


case(
    "23c-prefix-cache-reset",
    "prefix-cache",
    engine=CACHED,
    says=(r"reset",),
)(resets)


def cliff(above, factor):
    """Batches of more than ``above`` requests take ``factor`` times as long."""
    return replace(MACHINE, slower=lambda batch: factor if batch.requests > above else 1)


class GrowingCliff(Machine):
    """A device without captured graphs for more than 48 requests, each of which then costs more."""

    def device_us(self, batch):
        """Return the time, which varies by 3 % with the batch."""
        beyond = batch.requests - 48
        slower = 2500 + 150 * beyond if beyond > 0 else 0
        return (super().device_us(batch) + slower) * (1 + 0.03 * math.sin(batch.context_tokens))


@case(
    "167-cliff-that-grows",
    "slow-steps",
    engine={
        "times": GrowingCliff(4000, 9, 32, 0.002),
        "max_num_seqs": 96,
        "num_blocks": 8001,
    },
    says=(r"more than 48 requests", r"--max-num-seqs 48"),
    silent=(r"Steps \d+ to \d+ take",),
)
def cliff_that_grows(engine):
    """A benchmark of 96 clients; beyond 48 requests, a step costs more, and more for each further request."""
    lengths = [(100 + number * 37 % 200, 30 + number * 53 % 90) for number in range(240)]
    sent = iter(range(96, 240))

    def send(number, us):
        engine.arrive(us, f"r{number}", *lengths[number])

    def next_one(_):
        if (number := next(sent, None)) is not None:
            send(number, engine.clock.now_us + 3000)

    engine.finished = next_one
    for number in range(96):
        send(number, 8000 * number)
    engine.run()


HIDES = replace(MACHINE, per_prefill_token_us=0.0, slower=lambda batch: max(1, batch.batch_tokens / 100))
"""A device that computes up to 100 tokens while it reads its weights."""

case(
    "19h-budget-beyond-the-knee",
    "token-budget-bound",
    engine={"max_num_batched_tokens": 1024, "times": HIDES},
    says=(r"max-num-batched-tokens 512",),
    exits={"token_budget": 10},
)(partial(together, requests=60, prompt=600, outputs=40, every_us=36_000))


def swelling(engine, *, requests, outputs, every_us):
    """Concurrency that swells and ebbs."""
    for wave in range(3):
        for number in range(requests):
            engine.arrive(wave * 2_500_000 + every_us * number, f"w{wave}-{number}", 40, outputs)
    engine.run()


case(
    "25-batch-size-cliff",
    "slow-steps",
    engine={"times": cliff(32, 5), "max_num_seqs": 128},
    says=(r"\b3[23]\b", r"batch|requests", r"\b(5(\.0)?|4\.9\d?) times"),
)(partial(swelling, requests=44, outputs=50, every_us=6000))
case(
    "25b-batch-size-cliff-async",
    "slow-steps",
    engine={"times": cliff(16, 3), "max_num_seqs": 64, "async_scheduling": True},
    says=(r"\b1[67]\b", r"batch|requests"),
)(partial(swelling, requests=26, outputs=60, every_us=12_000))


@case(
    "25c-one-request-is-slow",
    "slow-steps",
    engine={"times": replace(MACHINE, slower=lambda batch: 4 if "odd" in batch.tokens else 1)},
    says=(r"\bodd\b",),
)
def one_request_is_slow(engine):
    """Steps with one particular request are slow, for instance because of its sampling."""
    for number in range(40):
        engine.arrive(15_000 * number, f"r{number}", 60, 30)
    engine.arrive(150_000, "odd", 60, 30)
    engine.run()


case(
    "25d-host",
    "scheduler-overhead",
    engine={"times": replace(MACHINE, host=HostTimes(2500, 0, 0, 0, 2000, 0))},
    says=(r"host|schedule\(\)|engine", r"async-scheduling"),
)(partial(together, requests=60, prompt=60, outputs=40, every_us=8000))


@case(
    "25e-priority-inversion",
    "priority-inversion",
    engine={"max_num_seqs": 8, "scheduling_policy": "priority"},
    says=(r"priority",),
    exits={"max_num_seqs": 20},
)
def less_urgent_ones_hold_the_seats(engine):
    """Eight long requests of the lowest class hold all seats; urgent ones wait for them."""
    for number in range(8):
        engine.arrive(0, f"batch-{number}", 60, 250, priority=9)
    for number in range(20):
        engine.arrive(100_000 + 20_000 * number, f"urgent-{number}", 60, 10, priority=0)
    engine.run()
