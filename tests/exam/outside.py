"""Cases 13, 27 and 31, and others of the kind: adapters, grammars, front ends and clients."""

import random
from dataclasses import dataclass

from vllm.lora.request import LoRARequest

from tests.contract.loads import compiled, structured_outputs
from tests.exam.case import Machine, case


def adapter(number):
    return LoRARequest(f"adapter-{number}", number, "unused")


LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}


@case(
    "13-lora-cap",
    "waiting-lora-cap",
    "lora-bound",
    engine=LORA,
    says=(r"max-loras", r"adapter-[12]"),
    exits={"lora_cap": 100},
)
def alternating_adapters(engine):
    """One slot, two adapters in turn: requests for the resident adapter overtake those for the other."""
    for number in range(40):
        engine.arrive(4000 * number, f"r{number}", 60, 20, lora_request=adapter(1 if number % 4 else 2))
    engine.run()


@case(
    "13b-lora-cap-three-of-six",
    "waiting-lora-cap",
    "lora-bound",
    engine={**LORA, "max_loras": 3, "async_scheduling": True},
    says=(r"max-loras",),
    exits={"lora_cap": 100},
)
def more_adapters_than_slots(engine):
    """Six adapters in turn with three slots, some requests without any."""
    for number in range(48):
        wants = number % 7
        lora = {"lora_request": adapter(wants)} if wants else {}
        engine.arrive(3000 * number, f"r{number}", 50, 24, **lora)
    engine.run()


@case(
    "13c-grammars-compile-slowly",
    "waiting-grammar-pending",
    says=(r"grammar",),
    exits={"grammar_pending": 100},
)
def grammars_compile_slowly(engine):
    """Every second request waits 400 ms for its grammar."""
    for number in range(24):
        us, request_id = 15_000 * number, f"r{number}"
        if number % 2:
            engine.arrive(us, request_id, 50, 16, structured_outputs=structured_outputs(json="{}"))
            engine.at(us + 400_000, lambda request_id=request_id: compiled(engine, request_id))
        else:
            engine.arrive(us, request_id, 50, 16)
    engine.run()


@dataclass(frozen=True)
class FillsBitmasks(Machine):
    """A worker that samples once the engine has filled the bitmasks, 0.6 ms for each JSON request."""

    def device_us(self, batch):
        return max(super().device_us(batch), 600 * sum(name.startswith("json") for name in batch.tokens))


@case(
    "123-grammars-beside-the-forward-pass",
    "slow-steps",
    engine={"times": FillsBitmasks(9000, 20, 30, 0.01), "num_blocks": 8001},
    says=(r"structured output", r"beyond 1\d\b", r"\b0\.[56]\d? ms"),
    silent=(r"[Dd]evice is (the limit|full)", r"(larger|raise|increase)[^.\n]*max-num-seqs"),
)
def grammars_beside_the_forward_pass(engine):
    """Three of four requests want JSON; their bitmasks are filled while the device computes."""
    chance, us = random.Random(5), 0.0  # noqa: S311  # a load, no secret
    for number in range(260):
        us += chance.expovariate(1 / (40_000 if 60 <= number < 200 else 90_000))
        prompt, outputs = chance.randint(100, 600), chance.randint(40, 160)
        if chance.random() < 0.75:
            engine.arrive(
                us, f"json-{number}", prompt, outputs, structured_outputs=structured_outputs(json="{}")
            )
            engine.at(us + 2000, lambda number=number: compiled(engine, f"json-{number}"))
        else:
            engine.arrive(us, f"chat-{number}", prompt, outputs)
    engine.run()


@dataclass(frozen=True)
class Drafts(Machine):
    """A worker that looks for n-grams in all texts after each step."""

    def device_us(self, batch):
        return super().device_us(batch) + 0.045 * batch.decode_context_tokens


@case(
    "125-drafts-that-may-not-pay",
    "spec-decode",
    engine={
        "times": Drafts(9000, 20, 20, 0.01),
        "num_blocks": 8001,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
        "drafts": 4,
        "accepted": lambda request_id, _: int(request_id[1:]) % 2,
        "max_num_batched_tokens": 8192,
    },
    says=(r"may slow|may cost", r"--speculative-config", r"draft"),
    silent=(r"(larger|raise|increase)[^.\n]*max-num-seqs",),
)
def drafts_that_may_not_pay(engine):
    """Forty clients with one request open each; few drafts are accepted, and long texts are searched."""
    chance = random.Random(5)  # noqa: S311  # a load, no secret
    sent = iter(range(40, 160))

    def send(number, us):
        engine.arrive(us, f"q{number}", chance.randint(800, 2600), chance.randint(60, 200))

    def next_one(_):
        if (number := next(sent, None)) is not None:
            send(number, engine.clock.now_us + 5000)

    engine.finished = next_one
    for number in range(40):
        send(number, 12_000 * number)
    engine.run()


@case(
    "27-front-end",
    "front-end",
    says=(r"front end", r"[Nn]ot the scheduler|before (it|they|a request|requests) reach"),
    silent=(r"max-num-seqs", r"max-num-batched-tokens"),
)
def slow_tokenizer(engine):
    """A tokenizer thread that needs 2 s for each of a few prompts, and an engine with nothing to do."""
    for number in range(20):
        engine.arrive(200_000 * number, f"r{number}", 800, 20, front_end_us=2_000_000)
    engine.run()


@case(
    "27b-front-end-backs-up",
    "front-end",
    engine={"async_scheduling": True, "enable_prefix_caching": True},
    says=(r"front end",),
)
def front_end_that_backs_up(engine):
    """Forty images at once; the front end processes them in turn, for 80 ms each."""
    for number in range(40):
        us = 80_000 * (number + 1)
        engine.arrive(us, f"image-{number}", 600, 10, front_end_us=us)
    engine.run()


@case(
    "31-arrivals",
    "arrival-limited",
    "client-limited",
    engine={"max_num_batched_tokens": 16_384, "max_num_seqs": 256},
    says=(r"\b1 of 16\b|\b1 request\b|\b15\b", r"arriv"),
    silent=(r"(larger|raise|increase)[^.\n]*max-num-(seqs|batched-tokens)",),
)
def first_step_comes_too_early(engine):
    """16 prompts of 1,024 tokens arrive within 3 ms, and the engine begins with the first."""
    for number in range(16):
        engine.arrive(200 * number, f"r{number}", 1024, 64)
    engine.run()


@case(
    "31b-closed-loop-of-four",
    "client-limited",
    "arrival-limited",
    engine={"max_num_batched_tokens": 8192, "max_num_seqs": 128},
    says=(r"\b4\b", r"client|connection|concurren"),
    silent=(r"(larger|raise|increase)[^.\n]*max-num-(seqs|batched-tokens)",),
)
def closed_loop(engine):
    """A client with four connections: each sends its next request when the last one is done."""
    sent = iter(range(4, 60))

    def next_one(_):
        if (number := next(sent, None)) is not None:
            engine.arrive(engine.clock.now_us + 2000, f"r{number}", 300, 30)

    engine.finished = next_one
    for number in range(4):
        engine.arrive(500 * number, f"r{number}", 300, 30)
    engine.run()


@case(
    "31c-bursts",
    "arrival-limited",
    "client-limited",
    engine={"async_scheduling": True},
    says=(r"arriv|burst|client|[Nn]othing limits",),
    silent=(r"(larger|raise|increase)[^.\n]*max-num-(seqs|batched-tokens)",),
)
def bursts(engine):
    """Eight requests every half second, each burst within 4 ms."""
    for number in range(48):
        burst, place = divmod(number, 8)
        engine.arrive(500_000 * burst + 500 * place, f"r{number}", 200, 30)
    engine.run()
