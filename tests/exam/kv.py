"""Cases 3, 5, 7, 15, 29 and 151: KV cache blocks."""

from vllm.v1.outputs import KVConnectorOutput

from tests.contract.causes.toy_connectors import KV
from tests.exam.budgets import state_groups
from tests.exam.case import case

TWELVE = {"num_blocks": 13, "max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 16}
NOBODY_RUNS = (r"(wait|until)[^.\n]*running requests? (end|finish)",)


@case(
    "03-never-fits",
    "never-fits",
    engine=TWELVE,
    says=(r"\btoo-long\b", r"\b13\b", r"\b12\b", r"19[12]"),
    silent=NOBODY_RUNS,
    exits={"kv_blocks": 100},
)
def never_fits(engine):
    """A prompt of 200 tokens in a cache of 12 blocks of 16; three short prompts wait behind it for ever."""
    engine.arrive(0, "too-long", 200, 8)
    for number in range(3):
        engine.arrive(10_000 * (number + 1), f"short-{number}", 30, 8)
    engine.run(until_us=1_500_000)


@case(
    "03b-outgrows-the-cache",
    "never-fits",
    "no-progress",
    engine=TWELVE,
    says=(r"\bgrows\b", r"\b12\b"),
    silent=NOBODY_RUNS,
    exits={"kv_blocks": 50},
)
def outgrows_the_cache(engine):
    """The prompt fits, but its output does not: alone in the cache, the request preempts itself."""
    engine.arrive(0, "grows", 160, 60)
    engine.run(until_us=1_500_000)


@case(
    "03c-never-fits-beside-a-busy-server",
    "never-fits",
    engine={"num_blocks": 201, "max_num_seqs": 16, "scheduling_policy": "priority"},
    says=(r"\bbook\b", r"\b200\b"),
    exits={"kv_blocks": 20},
)
def never_fits_with_priority(engine):
    """The least urgent request needs 250 of only 200 blocks; more urgent requests overtake it and finish."""
    engine.arrive(50_000, "book", 4000, 8, priority=5)
    for number in range(60):
        engine.arrive(12_000 * number, f"chat-{number}", 80, 30, priority=0)
    engine.run(until_us=1_500_000)


TIGHT = {"num_blocks": 161, "max_num_seqs": 64, "max_model_len": 1024}


@case(
    "05-preemptions",
    "kv-bound",
    "preemption",
    engine=TIGHT,
    says=(r"preempt", r"watermark"),
    exits={"kv_blocks": 50},
    preemptions=30,
)
def many_preemptions(engine):
    """Short prompts with long outputs: the cache is full of requests that then grow."""
    for number in range(64):
        engine.arrive(2000 * number, f"r{number}", 40, 160)
    engine.run()


case(
    "05-preemptions-watermark",
    "kv-bound",
    "preemption",
    engine={**TIGHT, "watermark": 0.05},
    exits={"kv_blocks": 50},
)(many_preemptions)


case(
    "05b-preemptions-async-priority",
    "kv-bound",
    "preemption",
    engine={**TIGHT, "async_scheduling": True, "scheduling_policy": "priority"},
    says=(r"preempt", r"watermark"),
    exits={"kv_blocks": 50},
    preemptions=30,
)(
    lambda engine: (
        [engine.arrive(3000 * number, f"r{number}", 60, 140, priority=number % 2) for number in range(60)],
        engine.run(),
    )
)


@case(
    "05c-kv-bound",
    "kv-bound",
    engine={"num_blocks": 46, "max_num_seqs": 256, "max_model_len": 1024, "scheduler_reserve_full_isl": True},
    says=(r"\b4[56]\b", r"gpu-memory-utilization|kv-cache-memory"),
    exits={"kv_blocks": 100},
)
def long_prompts_in_a_small_cache(engine):
    """24 prompts of 200 tokens with 60 output tokens in 45 blocks: two or three run at a time."""
    for number in range(24):
        engine.arrive(0, f"r{number}", 200, 60)
    engine.run()


HYBRID = {"num_blocks": 20, "max_model_len": 4096, "max_num_seqs": 32}


@case(
    "07-hybrid-groups",
    "kv-bound",
    engine={**HYBRID, **state_groups(4, 4096)},
    says=(r"[Mm]amba|state", r"group"),
    exits={"kv_blocks": 30},
)
def short_prompts_of_a_hybrid_model(engine):
    """Four Mamba groups and attention: a prompt of 12 tokens takes 5 of 19 blocks."""
    for number in range(12):
        engine.arrive(1000 * number, f"r{number}", 12, 24)
    engine.run()


case(
    "07b-hybrid-groups-async",
    "kv-bound",
    engine={**HYBRID, **state_groups(7, 4096), "num_blocks": 41, "async_scheduling": True},
    says=(r"[Mm]amba|state", r"group"),
    exits={"kv_blocks": 30},
)(
    lambda engine: (
        [engine.arrive(500 * number, f"r{number}", 30, 30) for number in range(24)],
        engine.run(),
    )
)


def remote(engine, takes_us):
    """The other side of a P/D pair: a load arrives so long after it has begun."""

    def begins(request, *_):
        loaded = KVConnectorOutput(finished_recving={request.request_id})
        if request.request_id in engine.scheduler.connector.has and request.request_id not in begun:
            begun.add(request.request_id)
            arrives_us = engine.clock.now_us + takes_us
            engine.at(arrives_us, lambda: engine.scheduler._update_from_kv_xfer_finished(loaded))

    begun = set()
    engine.scheduler.connector.update_state_after_alloc = begins


def loaded(engine, us, request_id, prompt, outputs):
    """A request whose prompt was computed on the other side."""
    engine.scheduler.connector.has[request_id] = (prompt // 16 * 16, True)
    engine.arrive(us, request_id, prompt, outputs)


@case(
    "15-parked-loads",
    "kv-held-idle",
    engine={"num_blocks": 101, "kv_transfer_config": KV},
    says=(r"load|remote", r"block"),
    exits={"kv_blocks": 20, "remote_kv_pending": 100},
)
def parked_loads_hold_the_cache(engine):
    """Twelve KV loads of 8 blocks take half a second each; requests that need no load find no free blocks."""
    remote(engine, takes_us=500_000)
    for number in range(12):
        loaded(engine, 1000 * number, f"loads-{number}", 129, 10)
    for number in range(10):
        engine.arrive(20_000 + 5000 * number, f"local-{number}", 120, 10)
    engine.run()


@case(
    "15b-remote-kv-late",
    "waiting-remote-kv-pending",
    engine={"kv_transfer_config": KV},
    says=(r"remote|KV (transfer|load)",),
    silent=(r"gpu-memory-utilization",),
    exits={"remote_kv_pending": 100},
)
def remote_kv_is_late(engine):
    """There is room enough; the other side needs a third of a second for each load."""
    remote(engine, takes_us=330_000)
    for number in range(30):
        loaded(engine, 20_000 * number, f"r{number}", 200, 12)
    engine.run()


@case(
    "15c-loads-that-never-come",
    "waiting-remote-kv-pending",
    "kv-held-idle",
    engine={"kv_transfer_config": KV, "async_scheduling": True},
    says=(r"lost-", r"remote|KV (transfer|load)"),
    exits={"remote_kv_pending": 100},
)
def loads_that_never_come(engine):
    """Three loads never arrive; everything else is served."""
    remote(engine, takes_us=10_000_000)
    for number in range(3):
        loaded(engine, 1000 * number, f"lost-{number}", 400, 10)
    for number in range(40):
        engine.arrive(10_000 * number, f"r{number}", 100, 20)
    engine.run(until_us=1_000_000)


@case(
    "29-head-of-line",
    "head-of-line",
    engine={"num_blocks": 21, "max_model_len": 320, "max_num_batched_tokens": 256, "max_num_seqs": 16},
    says=(r"\bbig\b", r"\b15\b", r"\bruns\b"),
    exits={"kv_blocks": 40},
)
def big_one_at_the_head(engine):
    """A running request holds ten of 20 blocks; the next needs fifteen, and three behind it would fit."""
    engine.arrive(0, "runs", 160, 60)
    engine.arrive(8000, "big", 240, 4)
    for number in range(3):
        engine.arrive(10_000 + 1000 * number, f"small-{number}", 32, 4)
    engine.run()


@case(
    "29b-head-of-line-async",
    "head-of-line",
    engine={"num_blocks": 301, "async_scheduling": True},
    says=(r"document", r"fit"),
    exits={"kv_blocks": 40},
)
def documents_among_chats(engine):
    """Documents of 3,000 tokens need two thirds of the cache each, in turn; chats would fit beside them."""
    for number in range(4):
        engine.arrive(1000 * number, f"document-{number}", 3000, 40)
    for number in range(20):
        engine.arrive(5000 + 3000 * number, f"chat-{number}", 60, 10)
    engine.run()


@case(
    "151-clients-leave-during-loads",
    "kv-held-idle",
    engine={"num_blocks": 201, "kv_transfer_config": KV},
    says=(r"aborted requests", r"kept[^.]*blocks", r"loads[^.]*never end"),
    silent=(r"kv-cache-memory-bytes",),
    exits={"kv_blocks": 100},
)
def clients_leave_during_loads(engine):
    """Each third load never ends; its client leaves after 0.3 s, but its 20 blocks stay with vLLM."""
    remote(engine, takes_us=20_000)
    begins = engine.scheduler.connector.update_state_after_alloc
    engine.scheduler.connector.update_state_after_alloc = lambda request, *others: (
        None if request.request_id.startswith("lost") else begins(request, *others)
    )
    done = set()
    engine.finished = done.add
    for number in range(60):
        name, us = f"{'lost' if number % 3 == 1 else 'r'}-{number}", 30_000 * number
        loaded(engine, us, name, 320, 12)
        engine.at(us + 300_000, lambda name=name: name in done or engine.abort(name))
    engine.run(until_us=2_500_000)


@case(
    "157-connector-never-answers",
    "waiting-connector-undecided",
    engine={"kv_transfer_config": KV, "async_scheduling": True},
    says=(r"never answered for 8 requests", r"[Ff]ind out why", r"[Nn]o setting"),
    silent=(r"wait longer",),
    exits={"connector_undecided": 100},
)
def connector_never_answers(engine):
    """A connector waits for a store that never ends for one of five requests; clients leave after 1 s."""
    for number in range(40):
        name, us = f"r{number}", 30_000 * number
        engine.arrive(us, name, 200, 20)
        if number % 5 == 2:
            engine.scheduler.connector.has[name] = (None, False)
            engine.at(us + 1_000_000, lambda name=name: engine.abort(name))
    engine.run()


AGENTS = {
    "num_blocks": 261,
    "enable_prefix_caching": True,
    "async_scheduling": True,
    "kv_transfer_config": KV,
}


def agents_take_turns(engine):
    """Six agents send prompts that grow from 1,000 tokens; the cache has room for three of them."""
    lengths, sent = [1000] * 6, iter(range(6, 60))

    def send(number, us):
        agent = number % 6
        prompt = [100 + (7919 * agent + 31 * at) % 1800 for at in range(lengths[agent])]
        engine.arrive(us, f"agent{agent}-{number}", prompt, 16)
        lengths[agent] += 40

    def next_one(_):
        if (number := next(sent, None)) is not None:
            send(number, engine.clock.now_us + 400_000)

    engine.finished = next_one
    for number in range(6):
        send(number, 80_000 * number)
    engine.run()


@case(
    "159-kv-tier-brings-nothing",
    "prefix-cache",
    engine=AGENTS,
    says=(r"KV connector ToyKV brought none of them", r"[Ff]ind out why ToyKV"),
)
def tier_brings_nothing(engine):
    """Six agents in a cache for three; the KV connector stores their blocks, and finds none of them."""
    agents_take_turns(engine)


@case(
    "159b-kv-tier-brings-it-back",
    engine=AGENTS,
    silent=(r"computed again", r"[Ff]ind out why"),
)
def tier_brings_it_back(engine):
    """The same agents; the KV connector finds all that they had computed."""
    held = {}

    def tokens(request, computed):
        agent = request.request_id.partition("-")[0]
        found = max(0, held.get(agent, 0) // 16 * 16 - computed)
        held[agent] = request.num_prompt_tokens - 1
        return found, False

    engine.scheduler.connector.get_num_new_matched_tokens = tokens
    agents_take_turns(engine)
