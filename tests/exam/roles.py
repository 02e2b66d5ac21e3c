"""Variations: another resource in the same role, and the loads that misled before."""

from functools import partial

from tests.contract.causes.models import image, sees_images
from tests.contract.causes.test_budgets import DRAFT_MODEL
from tests.contract.causes.toy_connectors import EC
from tests.exam.case import MACHINE, case
from tests.exam.kv import NOBODY_RUNS
from tests.exam.machine import together


@case(
    "03d-prefilled-again-and-again",
    "no-progress",
    "preemption",
    "kv-bound",
    engine={
        "num_blocks": 61,
        "max_num_batched_tokens": 64,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "scheduler_reserve_full_isl": False,
    },
    says=(r"\bagain\b", r"comput|prefill"),
    preemptions=3,
)
def prefilled_again_and_again(engine):
    """The second prompt is admitted in chunks, never fits beside the first, and loses them all each time."""
    engine.arrive(0, "first", 500, 120)
    engine.arrive(1000, "again", 600, 8)
    engine.run()


@case(
    "03e-group-never-fits",
    "never-fits",
    engine={"num_blocks": 31, "max_model_len": 4096, "max_num_seqs": 8, "watermark": 0.1},
    says=(r"\bbook\b", r"\b30\b"),
    silent=NOBODY_RUNS,
    exits={"kv_blocks": 50},
)
def never_fits_behind_a_stream(engine):
    """A prompt of 40 blocks arrives after some chats were served; later requests wait for ever."""
    for number in range(10):
        engine.arrive(15_000 * number, f"chat-{number}", 40, 10)
    engine.arrive(100_000, "book", 640, 4)
    engine.run(until_us=900_000)


@case(
    "13d-paused",
    "interruption",
    says=(r"paus",),
    exits={"paused": 10},
)
def paused_for_a_while(engine):
    """Weights are updated: for 400 ms no new request is admitted."""
    for number in range(40):
        engine.arrive(20_000 * number, f"r{number}", 80, 16)
    engine.at(200_000, lambda: engine.pause("PAUSED_NEW"))
    engine.at(600_000, lambda: engine.pause("UNPAUSED"))
    engine.run()


@case(
    "15d-encoder-outputs-from-elsewhere",
    "waiting-encoder-transfer-pending",
    engine={**sees_images(), "ec_transfer_config": EC, "max_model_len": 512},
    says=(r"encoder",),
    exits={"encoder_transfer_pending": 50},
)
def encoder_outputs_are_late(engine):
    """Another node encodes the images; for 300 ms none arrives."""
    engine.scheduler.ec_connector.arrived = False

    def arrive():
        engine.scheduler.ec_connector.arrived = True

    engine.at(300_000, arrive)
    for number in range(10):
        engine.arrive(10_000 * number, f"look-{number}", 60, 10, mm_features=[image(f"image-{number}", at=0)])
    for number in range(10):
        engine.arrive(10_000 * number + 500, f"text-{number}", 60, 10)
    engine.run()


case(
    "19e-active-seats",
    "max-num-seqs-bound",
    engine={"max_num_seqs": 64, "max_num_active_seqs": 6},
    says=(r"max-num-active-seqs", r"\b6\b"),
    silent=(r"(larger|raise|increase)[^.\n]*--max-num-seqs",),
    exits={"max_num_seqs": 50},
)(partial(together, requests=50, prompt=60, outputs=30, every_us=3000))
case(
    "19f-draft-slots",
    "waiting-input-budget",
    "token-budget-bound",
    engine={
        "speculative_config": DRAFT_MODEL,
        "drafts": 3,
        "accepted": lambda _, drafts: drafts // 2,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
    },
    says=(r"max-num-batched-tokens|num-speculative-tokens|draft",),
    exits={"input_budget": 20},
)(partial(together, requests=30, prompt=60, outputs=30, every_us=3000))


@case(
    "25f-sessions-hold-the-seats",
    "max-num-seqs-bound",
    engine={"max_num_seqs": 8},
    says=(r"session|paused|streaming", r"seat|max-num-seqs"),
    exits={"max_num_seqs": 50},
)
def sessions_hold_the_seats(engine):
    """Six streaming sessions wait for their clients and keep their seats; two seats are left."""
    for number in range(6):
        engine.arrive(0, f"session-{number}", 40, 4, resumable=True)
        engine.at(1_000_000, partial(engine.abort, f"session-{number}"))
    for number in range(24):
        engine.arrive(60_000 + 5000 * number, f"r{number}", 60, 20)
    engine.run()


@case(
    "25g-mixed-steps",
    "long-prompt",
    "token-budget-bound",
    "prefill-starves-decode",
    engine={"max_num_batched_tokens": 8192, "max_num_seqs": 64},
    says=(r"document|prefill",),
)
def large_chunks_slow_the_decodes(engine):
    """While chats decode, each of eight documents of 8,000 tokens takes one step of 170 ms."""
    for number in range(20):
        engine.arrive(1000 * number, f"chat-{number}", 60, 150)
    for number in range(8):
        engine.arrive(100_000 + 200_000 * number, f"document-{number}", 8000, 4)
    engine.run()


@case(
    "issue-budget-of-10",
    "token-budget-bound",
    engine={"max_num_batched_tokens": 10, "max_num_seqs": 8},
    says=(r"max-num-batched-tokens", r"\b10\b"),
    silent=(r"(lower|smaller|reduce)[^.\n]*max-num-batched-tokens", r"as it should be"),
    exits={"token_budget": 100},
)
def budget_of_ten(engine):
    """Eight prompts of 100 tokens, ten tokens a step."""
    together(engine, requests=12, prompt=100, outputs=20)


@case(
    "issue-idle-after-the-load",
    "kv-bound",
    engine={"num_blocks": 46, "max_num_seqs": 256, "max_model_len": 1024},
    says=(r"\b4[56]\b",),
    exits={"kv_blocks": 100},
)
def idle_after_the_load(engine):
    """The cache is too small for the load; after it the server idles for 35 s, then answers once."""
    for number in range(24):
        engine.arrive(0, f"r{number}", 200, 60)
    engine.arrive(40_000_000, "late", 20, 4)
    engine.run()


case(
    "issue-chunked-prefill-off",
    "token-budget-bound",
    "long-prompt",
    "waiting-chunked-prefill-off",
    engine={
        "enable_chunked_prefill": False,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 32,
    },
    silent=(r"(lower|smaller|reduce)[^.\n]*max-num-batched-tokens",),
)(partial(together, requests=40, prompt=700, outputs=12))
case(
    "issue-256-running",
    engine={"max_num_seqs": 256, "async_scheduling": True, "times": MACHINE},
    silent=(r"larger batch",),
)(partial(together, requests=200, prompt=8, outputs=40))
case(
    "issue-45-blocks-enough",
    engine={"num_blocks": 601, "max_num_seqs": 256, "max_model_len": 1024, "max_num_batched_tokens": 8192},
)(partial(together, requests=24, prompt=200, outputs=60))


@case("17b-uneven-lengths", "rank-imbalance", ranks=2, says=(r"rank 0",))
def equal_counts_of_unequal_lengths(engine):
    """Both ranks get as many requests; those of rank 0 generate eight times as much."""
    rank = engine.config.parallel_config.data_parallel_index
    together(engine, requests=40, prompt=100, outputs=15 if rank else 120, every_us=10_000)
