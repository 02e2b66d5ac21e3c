"""Looks for hangs of balance scheduling: many small loads on two ranks in lock-step, on vLLM's real engine.

    python tools/bench/balance_hangs.py                       # 50 loads on one engine
    python tools/bench/balance_hangs.py --async-scheduling    # likewise, with asynchronous scheduling

A load has random numbers of requests, lengths, arrivals and aborts; in every fifth the engine is paused. One
that is not done after ``--limit`` seconds is a hang: its number is printed and the exit code is 1. Between
loads the engine is idle every now and then, so that waves end and begin. CPU build only; about a minute.
"""

import argparse
import asyncio
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from schedtrace.balance import SCHEDULER_CLS

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
MODEL = Path(__file__).parents[2] / "examples" / "tiny-qwen3-lockstep"
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--loads", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60, help="seconds for one load")
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--scheduler-cls", default=SCHEDULER_CLS)
    parser.add_argument("--prefill-schedule-interval", type=int, default=1)
    parser.add_argument("--async-scheduling", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCHEDTRACE_RUN_DIR"] = f"{folder}/run"
        os.environ["GATHER_TIMES"] = f"{folder}/gathers"
        hung = asyncio.run(play(options))
        gc.collect()  # vLLM's front end wants to be gone before the interpreter is
        held_back = report(Path(folder))
    idle = options.scheduler_cls == SCHEDULER_CLS and options.max_num_seqs > 1 and not held_back
    if idle:
        print("NOT BALANCED: the gate kept no request waiting")
    sys.exit(idle or hung is not None)


async def play(options: argparse.Namespace) -> int | None:
    """The number of the load that hung, if one did."""
    engine = start(options)
    chance = random.Random(options.seed)  # noqa: S311  # a load, no secret
    began = time.monotonic()
    ended: Counter[str] = Counter()
    try:
        for number in range(options.loads):
            try:
                ended += await asyncio.wait_for(play_load(engine, chance, number), options.limit)
            except TimeoutError:
                print(f"HANG: load {number} of seed {options.seed} is not done after {options.limit} s")
                return number
            await asyncio.sleep(chance.choice([0, 0, 0.02, 0.2]))
        print(f"{options.loads} loads in {time.monotonic() - began:.1f} s, no hang: {dict(ended)}")
        return None
    finally:
        engine.shutdown()


def start(options: argparse.Namespace) -> Any:
    """The engine; its processes are forked, which takes seconds instead of a minute."""
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    config = AsyncEngineArgs(
        model=str(MODEL),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=2048,
        max_num_batched_tokens=512,
        max_num_seqs=options.max_num_seqs,
        data_parallel_size=RANKS,
        prefill_schedule_interval=options.prefill_schedule_interval,
        scheduler_cls=options.scheduler_cls or None,
    ).create_engine_config(UsageContext.ENGINE_CONTEXT)
    config.scheduler_config.async_scheduling = options.async_scheduling  # refused on a CPU, but works
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    time_gathers()
    return AsyncLLM.from_vllm_config(config)


def time_gathers() -> None:
    """Have the engine processes, which are forked, write how long each gathering took."""
    from schedtrace.balance import scheduler

    gathered = scheduler._gathered

    def timed(*args: Any) -> list[int]:
        began = time.perf_counter_ns()
        counts = gathered(*args)
        with open(os.environ["GATHER_TIMES"], "a") as file:  # noqa: PTH123  # plain, and in the engine
            file.write(f"{time.perf_counter_ns() - began}\n")
        return counts

    scheduler._gathered = timed


async def play_load(engine: Any, chance: random.Random, number: int) -> Counter[str]:
    """One load; returns how its requests ended. In every fifth all ranks pause meanwhile, and go on."""
    requests = []
    if chance.random() < 0.2:
        mode = chance.choice(["abort", "wait", "keep"])
        requests.append(asyncio.create_task(pause(engine, chance.random() * 0.3, mode)))
    for one in range(chance.randint(1, 24)):
        requests.append(asyncio.create_task(play_request(engine, chance, f"t{number}-{one}")))
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.03)
    return Counter(await asyncio.gather(*requests))


async def pause(engine: Any, after_s: float, mode: str) -> str:
    await asyncio.sleep(after_s)
    await engine.pause_generation(mode=mode)
    await asyncio.sleep(0.05)
    await engine.resume_generation()
    return f"pauses ({mode})"


async def play_request(engine: Any, chance: random.Random, request_id: str) -> str:
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [chance.randrange(100, 2000)] * chance.choice([1, 20, 300, 900])}
    tokens = chance.randint(1, 40)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
    gives_up = chance.randint(0, tokens) if chance.random() < 0.2 else None
    got = 0
    if gives_up == 0:  # before the first token: it may be waiting still
        waits = asyncio.create_task(consume(engine.generate(prompt, params, request_id)))
        await asyncio.sleep(chance.random() * 0.02)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        return "aborted"
    async for output in engine.generate(prompt, params, request_id):
        got = len(output.outputs[0].token_ids)
        if gives_up is not None and got >= gives_up:
            await engine.abort(request_id)
            return "aborted"
    if output.outputs[0].finish_reason == "abort":
        return "aborted by a pause"
    assert got == tokens, f"{request_id} got {got} of {tokens} tokens"
    return "finished"


async def consume(outputs: Any) -> None:
    async for _ in outputs:
        pass


def report(folder: Path) -> int:
    """Prints what the traces and the clock say; in how many steps the gate kept requests waiting."""
    from schedtrace.read.run import read_run

    held_back = 0
    for trace in read_run(folder / "run").traces:
        causes = Counter(trace.exits().collect()["cause"])
        held_back += causes["rank_balance"]
        dummies = trace.steps["dummy_batches"].sum()
        print(
            f"rank {trace.header.engine_rank}: {trace.header.scheduler_class}, {trace.steps.height} steps,"
            f" {dummies} dummy batches, {dict(causes.most_common())}, notices {trace.notices}"
        )
    if (folder / "gathers").exists():
        times = sorted(int(line) / 1000 for line in (folder / "gathers").read_text().split())
        shares = {share: times[int(share * (len(times) - 1))] for share in (0, 0.1, 0.5, 0.9, 1)}
        said = ", ".join(f"{share:.0%} {us:.0f} us" for share, us in shares.items())
        print(f"{len(times)} gatherings, each with the wait for the other rank: {said}")
    return held_back


if __name__ == "__main__":
    main()
