"""Cases 107, 111 and 113: whose work a request's time passes with, and who keeps what it waits for."""

from functools import partial

from vllm.v1.outputs import KVConnectorOutput

from tests.contract.causes.toy_connectors import KV
from tests.exam.case import MACHINE, Machine, case

FULL = Machine(500, 40, 1500, 0.01)
"""A device whose step time grows with every request: more seats give nothing."""
FULL_CACHE = {"num_blocks": 641, "max_model_len": 2048, "max_num_seqs": 16, "times": FULL}
"""Nor has the KV cache room for more than sixteen of the jobs."""
BEHIND = r"(behind|wait(ed)? for) [^.]*\b{} [^.]*(came|sent|arriv)[^.]*(together|at once)"
NOBODY_BEHIND = (r"\bbehind \d", r"(came|sent) (together|at once)")
NO_SMALLER_BUDGET = (r"(prompts|prefilled) [^.]*in one step", r"smaller[^.\n]*max-num-batched-tokens")


def burst(engine, *, prompts=16, prompt=1024, outputs=4, rounds=4, every_us=2_000_000):
    """Prompts that come at once, some rounds of them."""
    for number in range(rounds * prompts):
        engine.arrive(every_us * (number // prompts), f"r{number}", prompt, outputs)
    engine.run()


@case(
    "107-one-long-step",
    "batched-prefill",
    engine={"max_num_batched_tokens": 16_384, "times": Machine(6000, 48, 30, 0.01)},
    says=(r"16 prompts", r"one step|same step", r"9\d %", r"smaller[^.\n]*max-num-batched-tokens"),
    silent=(r"larger[^.\n]*max-num-batched-tokens",),
)
def one_long_step(engine):
    """Sixteen clients send prompts of 1,024 tokens together; each round is prefilled in one 0.8 s step."""
    waiting, sent = [], iter(range(16, 64))

    def done(request_id):
        waiting.append(request_id)
        if len(waiting) % 16 == 0:
            for _ in range(16):
                if (number := next(sent, None)) is not None:
                    engine.arrive(engine.clock.now_us + 1000, f"r{number}", 1024, 4)

    engine.finished = done
    for number in range(16):
        engine.arrive(0, f"r{number}", 1024, 4)
    engine.run()


case(
    "107b-long-steps-of-bursts",
    "batched-prefill",
    engine={"max_num_batched_tokens": 32_768, "times": MACHINE, "async_scheduling": True},
    says=(r"\b8 prompts", r"one step|same step", r"smaller[^.\n]*max-num-batched-tokens"),
    silent=(r"larger[^.\n]*max-num-batched-tokens",),
)(partial(burst, prompts=8, prompt=3000, outputs=16, rounds=6))
case(
    "107c-one-prompt-in-a-step",
    engine={"max_num_batched_tokens": 16_384, "times": Machine(6000, 48, 30, 0.01)},
    silent=NO_SMALLER_BUDGET,
)(partial(burst, prompts=1, prompt=12_000, outputs=4, rounds=8, every_us=700_000))
case(
    "107d-short-prompts-in-a-step",
    engine={"max_num_batched_tokens": 16_384},
    silent=NO_SMALLER_BUDGET,
)(partial(burst, prompts=16, prompt=8, outputs=4, rounds=8, every_us=100_000))


@case(
    "111-chat-behind-a-batch-job",
    "max-num-seqs-bound",
    engine=FULL_CACHE,
    says=(BEHIND.format("80"), r"priorit|engine of (its|their) own"),
    exits={"max_num_seqs": 100},
)
def chat_behind_a_batch_job(engine):
    """A batch job sends 80 requests at once; with FCFS, chats that arrive later wait behind them."""
    for number in range(80):
        engine.arrive(50_000, f"job-{number}", 500, 100)
    for number in range(24):
        engine.arrive(150_000 + 400_000 * number, f"chat-{number}", 60, 20)
    engine.run()


@case(
    "111b-chat-behind-documents",
    "token-budget-bound",
    says=(BEHIND.format("60"), r"priorit|engine of (its|their) own"),
    exits={"token_budget": 20},
)
def chat_behind_documents(engine):
    """Sixty documents of 1,500 tokens arrive at once and fill every step; chats arrive meanwhile."""
    for number in range(60):
        engine.arrive(20_000, f"document-{number}", 1500, 2)
    for number in range(30):
        engine.arrive(30_000 + 50_000 * number, f"chat-{number}", 40, 10)
    engine.run()


@case(
    "111c-burst-with-nobody-beside",
    "max-num-seqs-bound",
    engine=FULL_CACHE,
    silent=NOBODY_BEHIND,
    exits={"max_num_seqs": 100},
)
def nobody_behind_the_burst(engine):
    """A batch job sends 80 requests at once; chats before and after it find a free engine."""
    for number in range(10):
        engine.arrive(100_000 * number, f"before-{number}", 60, 4)
    for number in range(80):
        engine.arrive(2_000_000, f"job-{number}", 500, 100)
    for number in range(10):
        engine.arrive(40_000_000 + 100_000 * number, f"after-{number}", 60, 4)
    engine.run()


case(
    "111d-all-of-one-kind",
    "max-num-seqs-bound",
    engine={**FULL_CACHE, "num_blocks": 129, "max_num_seqs": 8},
    silent=NOBODY_BEHIND,
    exits={"max_num_seqs": 100},
)(partial(burst, prompts=1, prompt=200, outputs=60, rounds=100, every_us=50_000))


LONG_CONTEXT = {
    "times": Machine(6000, 20, 30, 0.4),
    "num_blocks": 8001,
    "max_model_len": 65_536,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": True,
}


def chats_beside(engine, *, context, turns=5):
    """Chats all the time; an agent sends its context again and again, most of which is cached."""
    text = [100 + number * 31 % 1800 for number in range(context + 300 * turns)]
    turn = iter(range(1, turns))

    def done(request_id):
        if request_id.startswith("agent") and (number := next(turn, None)) is not None:
            us = engine.clock.now_us + 1_500_000
            engine.arrive(us, f"agent-{number}", text[: context + 300 * number], 100)

    engine.finished = done
    engine.arrive(0, "agent-0", text[:context], 100)
    for number in range(100):
        engine.arrive(3_000_000 + 90_000 * number, f"chat-{number}", 100 + number * 37 % 400, 80)
    engine.run()


case(
    "121-long-context",
    "long-context",
    engine=LONG_CONTEXT,
    says=(r"agent-4", r"context", r"engine of its own"),
    silent=(r"max-num-seqs", r"[Nn]othing limits"),
)(partial(chats_beside, context=30_000))
case(
    "121b-long-context-that-costs-little",
    engine={**LONG_CONTEXT, "times": Machine(6000, 20, 30, 0.006)},
    silent=(r"long context", r"engine of its own"),
)(partial(chats_beside, context=30_000))


SESSIONS = {"num_blocks": 101, "max_model_len": 2048, "max_num_seqs": 32}
HOLD = (
    r"session",
    r"(hold|keep)[^.]*blocks",
    r"each other|deadlock|neither|none of them|no request (runs|ran)",
)


def parts(engine, name, begins, *, prompt, every_us, us=0):
    """A streaming session whose client sends a part every so often."""
    for number in range(begins):
        engine.arrive(us + every_us * number, name, prompt, 2, resumable=True)


@case(
    "113-sessions-wait-for-each-other",
    "kv-held-idle",
    engine=SESSIONS,
    says=HOLD,
    exits={"kv_blocks": 100},
)
def sessions_wait_for_each_other(engine):
    """Two realtime sessions grow until neither has blocks for its next part; a client gives up after 4 s."""
    for name in ("voice-1", "voice-2"):
        parts(engine, name, 5, prompt=180, every_us=300_000)
    engine.at(5_200_000, lambda: engine.abort("voice-1"))
    engine.at(6_000_000, lambda: engine.abort("voice-2"))
    engine.run()


@case(
    "113b-sessions-and-chats",
    "kv-held-idle",
    engine={**SESSIONS, "num_blocks": 151, "async_scheduling": True},
    says=HOLD,
    exits={"kv_blocks": 100},
)
def sessions_and_chats(engine):
    """Three sessions keep all blocks, each waiting for more; chats come and wait until a client hangs up."""
    for number in range(3):
        parts(engine, f"voice-{number}", 4, prompt=250, every_us=200_000, us=20_000 * number)
    for number in range(20):
        engine.arrive(1_000_000 + 100_000 * number, f"chat-{number}", 100, 10)
    engine.at(3_500_000, lambda: engine.abort("voice-1"))
    engine.at(5_000_000, lambda: [engine.abort(f"voice-{number}") for number in (0, 2)])
    engine.run()


@case(
    "113d-nobody-fetches",
    "kv-held-idle",
    engine={"num_blocks": 201, "max_model_len": 2048, "kv_transfer_config": KV},
    says=(r"finished request", r"(hold|keep|kept)[^.]*blocks", r"fetch"),
    silent=(r"each other", r"deadlock"),
    exits={"kv_blocks": 100},
)
def nobody_fetches(engine):
    """Eight prompts are done, and their blocks stay until another engine fetches them, 2 s later."""
    done = []

    def keep(request_id):
        done.append(request_id)
        engine.scheduler.connector.keeps = len(done) < 8  # the first eight

    engine.scheduler.connector.keeps = True
    engine.finished = keep
    for number in range(8):
        engine.arrive(0, f"prefill-{number}", 370, 1)
    for number in range(20):
        engine.arrive(100_000 + 20_000 * number, f"r{number}", 300, 8)
    fetched = KVConnectorOutput(finished_sending={f"prefill-{number}" for number in range(8)})
    engine.at(2_000_000, lambda: engine.scheduler._update_from_kv_xfer_finished(fetched))
    engine.run()


@case(
    "113c-sessions-with-room",
    "waiting-streaming-input-pending",
    engine={**SESSIONS, "num_blocks": 301},
    silent=(r"each other", r"deadlock", r"keep[^.]*blocks"),
)
def sessions_with_room(engine):
    """The same sessions in a cache that has room for both, and chats beside them."""
    for name in ("voice-1", "voice-2"):
        parts(engine, name, 5, prompt=180, every_us=300_000)
    for number in range(20):
        engine.arrive(100_000 * number, f"chat-{number}", 100, 10)
    engine.at(2_500_000, lambda: [engine.abort(name) for name in ("voice-1", "voice-2")])
    engine.run()
