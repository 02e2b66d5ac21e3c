"""Random loads that are the same every time: what happens before each step, decided by a seed alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from schedtrace.simulate import Driver as Engine

SEEDS = [1, 2, 3]
BUSY_STEPS = 120

Event = Callable[[Engine], Any]


@dataclass(frozen=True)
class Family:
    """A kind of load, and the engine it is for."""

    engine: dict[str, Any] = field(default_factory=dict)
    """Options of ``Engine``."""
    prompt: tuple[int, int] = (1, 120)
    output: tuple[int, int] = (1, 90)
    per_step: float = 0.5
    """Requests that arrive before a step, on average."""
    shared: int = 0
    priorities: int = 1
    aborts: float = 0.0
    pauses: float = 0.0
    resets: float = 0.0
    """Chance before each step that the prefix cache is reset, which preempts everything that runs."""


TIGHT = {"num_blocks": 40}
ASYNC = {"async_scheduling": True}
PREFIX = {"enable_prefix_caching": True}

FAMILIES = {
    "fcfs": Family(),
    "priority": Family({"scheduling_policy": "priority", "num_blocks": 30}, priorities=3),
    "tight_kv": Family(TIGHT),
    "tight_kv_small_budget": Family({"num_blocks": 20, "max_num_batched_tokens": 32}, per_step=0.2),
    "few_seqs": Family({"max_num_seqs": 3}, per_step=0.2),
    "chunked_prefill_off": Family({"enable_chunked_prefill": False}, prompt=(60, 200)),
    "long_prefill_cap": Family({"long_prefill_token_threshold": 24}),
    "prefix_caching": Family(PREFIX, shared=64, prompt=(65, 120)),
    "prefix_caching_tight": Family(PREFIX | TIGHT, shared=64, prompt=(65, 120)),
    "aborts": Family(TIGHT, aborts=0.3),
    "async": Family(ASYNC),
    "async_tight": Family(ASYNC | TIGHT),
    "async_aborts": Family(ASYNC | TIGHT, aborts=0.3),
    "watermark": Family(TIGHT | {"watermark": 0.2}),
    "paused": Family(pauses=0.1),
    "resets": Family(PREFIX, resets=0.05),
    "async_resets": Family(ASYNC | PREFIX, resets=0.05),
}


def make_script(family: Family, seed: int) -> list[list[Event]]:
    """What happens before each step."""
    chance = random.Random(seed)  # noqa: S311  # a load, no secret
    script: list[list[Event]] = []
    ids: list[str] = []
    for _ in range(BUSY_STEPS):
        events: list[Event] = []
        while chance.random() < family.per_step / (1 + family.per_step):
            ids.append(f"t{len(ids) % 3}-{len(ids)}")
            events.append(_arrival(family, chance, ids[-1]))
        if ids and chance.random() < family.aborts:
            events.append(_call("abort", chance.choice(ids)))
        if chance.random() < family.pauses:
            events.append(_call("pause", chance.choice(["UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"])))
        if chance.random() < family.resets:
            events.append(_call("reset_prefix_cache"))
        script.append(events)
    script.append([_call("pause", "UNPAUSED")])
    return script


def play(engine: Engine, script: list[list[Event]]) -> Engine:
    """Work the script off, then step until everything is done."""
    for events in script:
        for event in events:
            event(engine)
        engine.step()
    engine.finish()
    return engine


def _arrival(family: Family, chance: random.Random, request_id: str) -> Event:
    prompt, most = chance.randint(*family.prompt), chance.randint(*family.output)
    stop_at = chance.choice([None, most // 2])
    priority = chance.randrange(family.priorities)
    return _call("add", request_id, prompt, most, shared=family.shared, priority=priority, stop_at=stop_at)


def _call(method: str, *args: Any, **options: Any) -> Event:
    return lambda engine: getattr(engine, method)(*args, **options)
