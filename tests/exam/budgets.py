"""Cases 1, 9 and 11: what one step may compute."""

from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from tests.contract.causes.models import attention_spec, image, mamba_spec, sees_images, with_mamba
from tests.exam.case import Machine, case

SMALL_BUDGET = {"max_num_batched_tokens": 256, "max_model_len": 8192, "num_blocks": 1001}
NO_LARGER_BUDGET = (r"(larger|raise|increase)[^.\n]*max-num-batched-tokens",)
NO_HIGHER_THRESHOLD = (r"(larger|raise|increase|unset|without)[^.\n]*long-prefill-token-threshold",)


@case(
    "01-long-prompt",
    "long-prompt",
    engine=SMALL_BUDGET,
    says=(r"long-prefill-token-threshold", r"\blong\b", r"6,?000"),
    silent=NO_LARGER_BUDGET,
    exits={"token_budget": 15},
)
def long_prompt(engine):
    """One prompt of 6,000 tokens, then ten of 32, with a budget of 256."""
    engine.arrive(0, "long", 6000, 16)
    for number in range(10):
        engine.arrive(1000 + 500 * number, f"short-{number}", 32, 16)
    engine.run()


case(
    "01-long-prompt-threshold",
    engine={**SMALL_BUDGET, "long_prefill_token_threshold": 128},
    silent=(*NO_LARGER_BUDGET, *NO_HIGHER_THRESHOLD),
)(long_prompt)


def prompts_in_chunks(engine):
    """Prompts of 600 tokens come one after the other; beside another request, each takes 19 chunks."""
    for number in range(60):
        engine.arrive(120_000 * number, f"r{number}", 600, 40)
    engine.run()


case(
    "01d-threshold-too-small",
    "capped-prefill",
    engine={**SMALL_BUDGET, "long_prefill_token_threshold": 32, "times": Machine(6000, 5, 30, 0)},
    says=(r"long-prefill-token-threshold 0", r"59 prompts"),
    silent=(r"[Nn]othing (to fix|limits)",),
)(prompts_in_chunks)
case(
    "01e-threshold-on-a-device-that-computes",
    engine={**SMALL_BUDGET, "long_prefill_token_threshold": 32, "times": Machine(100, 50, 30, 0)},
    silent=(r"too small",),
)(prompts_in_chunks)


@case(
    "01f-long-prompts-in-steps-of-fixed-time",
    "long-prompt",
    engine={**SMALL_BUDGET, "times": Machine(6000, 5, 30, 0)},
    says=(r"max-num-batched-tokens 512", r"long-\d"),
    silent=(r"[Nn]othing (to fix|limits)",),
)
def long_prompts_in_steps_of_fixed_time(engine):
    """Eight prompts of 4,000 tokens, each ahead of short ones; four fifths of a step's time is fixed."""
    for number in range(8):
        engine.arrive(400_000 * number, f"long-{number}", 4000 + 70 * number, 2)
        for short in range(9):
            at = 400_000 * number + 9000 * (short + 1)
            engine.arrive(at, f"short-{number}-{short}", 20 + 17 * short, 2)
    engine.run()


@case(
    "01b-two-long-prompts-async",
    "long-prompt",
    engine={"async_scheduling": True},
    says=(r"long-prefill-token-threshold", r"long-[01]"),
    silent=NO_LARGER_BUDGET,
    exits={"token_budget": 10},
)
def two_long_prompts(engine):
    """Two prompts of 15,000 tokens arrive amid short prompts, which an async engine serves with ease."""
    for number in range(60):
        engine.arrive(8000 * number, f"short-{number}", 60, 24)
    engine.arrive(100_000, "long-0", 15_000, 8)
    engine.arrive(140_000, "long-1", 15_000, 8)
    engine.run()


@case(
    "01c-long-prompt-priority",
    "long-prompt",
    engine={"scheduling_policy": "priority", "max_num_batched_tokens": 512},
    says=(r"long-prefill-token-threshold", r"\breport\b"),
    silent=NO_LARGER_BUDGET,
    exits={"token_budget": 10},
)
def long_prompt_first_in_priority(engine):
    """The long prompt is the most urgent request: the order is right, but the rest waits all the same."""
    engine.arrive(0, "report", 12_000, 8, priority=0)
    for number in range(12):
        engine.arrive(2000 * (number + 1), f"chat-{number}", 40, 20, priority=1)
    engine.run()


def state_groups(groups, length):
    """Options for attention and Mamba layers, each of whose groups takes one whole block per request."""
    attention = attention_spec()
    specs = [attention, *(mamba_spec(attention, "none", length) for _ in range(groups))]
    return {"kv_groups": [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]}


ALIGNED = (r"max-num-batched-tokens|block.size",)


@case(
    "09-mamba-alignment",
    "waiting-mamba-alignment",
    engine={**with_mamba(64), "max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 1024},
    says=ALIGNED,
    silent=(r"would have fitted",),
    exits={"mamba_alignment": 20},
)
def one_decode_beside_prompts(engine):
    """The block equals the budget: while one request decodes, no chunk of a prompt is a whole block."""
    engine.arrive(0, "decodes", 40, 60)
    for number in range(5):
        engine.arrive(10_000 + 1000 * number, f"prompt-{number}", 150, 4)
    engine.run()


case(
    "09b-mamba-alignment-large",
    "waiting-mamba-alignment",
    engine={**with_mamba(528), "max_num_batched_tokens": 528, "max_num_seqs": 16, "num_blocks": 201},
    says=ALIGNED,
    silent=(r"would have fitted",),
    exits={"mamba_alignment": 20},
)(
    lambda engine: (
        engine.arrive(0, "chat", 100, 80),
        [engine.arrive(5000, f"document-{number}", 1700, 8) for number in range(4)],
        engine.run(),
    )
)


@case(
    "11-encoder-budget",
    "waiting-encoder-budget",
    engine={**sees_images(), "max_num_batched_tokens": 60, "max_num_seqs": 16, "max_model_len": 512},
    says=(r"encoder", r"\b(60|32)\b"),
    exits={"encoder_budget": 10},
)
def one_image_a_step(engine):
    """The encoder takes 60 embeddings per step, and an image has 32: only one request per step may begin."""
    for number in range(14):
        engine.arrive(0, f"look-{number}", 36, 6, mm_features=[image(f"image-{number}", at=0)])
    engine.run()


@case(
    "11b-image-too-large",
    "never-fits",
    "waiting-encoder-budget",
    engine={**sees_images(), "max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 512},
    says=(r"encoder", r"\bposter\b"),
    exits={"encoder_budget": 50},
)
def image_above_the_encoders_budget(engine):
    """The encoder may take 24 embeddings a step and an image has 32: it never starts."""
    engine.scheduler.max_num_encoder_input_tokens = 24
    engine.arrive(0, "poster", 40, 4, mm_features=[image("poster", at=0)])
    for number in range(6):
        engine.arrive(20_000 * number, f"text-{number}", 20, 10)
    engine.run(until_us=400_000)
