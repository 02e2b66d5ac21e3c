"""What each fact beside the decisions costs, in microseconds a time: ``python tools/bench/facts_cost.py``.

vLLM's real scheduler, driven without a model; the best of seven rounds, since other work only ever adds.
"""

import os
import time
from collections.abc import Callable
from copy import copy
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

from schedtrace.record import allocation
from schedtrace.record.facts import Prefixes, SchedulerFacts, admissions
from schedtrace.record.header import engine_facts
from schedtrace.record.processes import CpuTimes
from schedtrace.simulate import Driver

ROUNDS, PROMPT = 7, 100


def best_us(call: Callable[[], Any], times: int = 500) -> float:
    """Microseconds of one call."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - began) / times * 1e6)
    return min(found)


def costs(running: int) -> dict[str, float]:
    """Name of a fact to its cost with so many requests running."""
    engine = Driver(
        num_blocks=running * 9 + 20,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        enable_prefix_caching=True,
    )
    for number in range(running):
        engine.add(f"r{number}", prompt=PROMPT, max_tokens=1000)
    for _ in range(4):
        output = engine.step()
    scheduler, manager = engine.scheduler, engine.scheduler.kv_cache_manager
    facts, prefixes = SchedulerFacts(scheduler, lambda ns: ns // 1000), Prefixes()
    steady = SimpleNamespace(scheduled_new_reqs=[], num_scheduled_tokens=output.num_scheduled_tokens)
    capture = SimpleNamespace(num_running_after=running, num_waiting_after=0, end_ns=0, throttled=None)
    head = engine.make_request("head", prompt=4000, max_tokens=4)
    arguments = ((head, 4000), {"num_new_computed_tokens": 0, "num_lookahead_tokens": 0})
    new = [SimpleNamespace(req_id="r3", num_computed_tokens=0)]
    taken = allocation.refused_head(scheduler, "head", arguments)
    assert taken is not None  # dense models have their managers
    cpu = CpuTimes()

    def hashed() -> None:
        prefixes.keep_prompt(head)
        prefixes.hashes("head")

    own, unhashed = Prefixes(block_size=16), copy(head)
    unhashed.block_hashes = []

    def hashed_by_us() -> None:
        own.keep_prompt(unhashed)
        own.hashes("head")

    def cpu_line() -> None:
        cpu._next_us = 0
        cpu.line(0, 0)

    return {
        "every step: state (finished but held, encoder, sessions, prefix keys, wave)": best_us(
            lambda: facts.note_call(capture, scheduler, steady, [])
        ),
        "arrival: what it asks for, siblings, input thread": best_us(lambda: facts.arrival_fields(head)),
        "arrival: keep the first 256 block hashes": best_us(lambda: prefixes.keep_prompt(head)),
        "first scheduling: hits, and why there were none": best_us(lambda: admissions(scheduler, new)),
        "another head refused: holders and need by group": best_us(
            lambda: allocation.refused_head(scheduler, "head", arguments), 100
        ),
        "every refusal, Mamba groups or an unknown manager: copied to be asked": best_us(
            lambda: allocation.apart(manager)
        ),
        "once: cache groups and settings": best_us(lambda: engine_facts(scheduler), 100),
        "writer, an arrival: 250 block hashes salted": best_us(hashed, 50),
        "writer, an arrival without prefix caching: 250 blocks of tokens hashed": best_us(hashed_by_us, 50),
        "writer, another head refused": best_us(lambda: allocation.refusal_line(taken), 100),
        "writer, once a second: processor time of threads": best_us(cpu_line, 100),
    }


if __name__ == "__main__":
    few, many = costs(16), costs(256)
    for name in few:
        print(f"| {name} | {few[name]:.1f} | {many[name]:.1f} |")
