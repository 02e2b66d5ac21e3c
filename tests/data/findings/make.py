"""Makes the traces in this folder anew: vLLM's own scheduler and KV cache manager, without a model.

``python tests/data/findings/make.py [code ...]``. Decisions are the same every time; times are those of this
machine, with a made-up device that takes 1 ms a step, 10 us a prefill token and 50 us a decode.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# vLLM reads them when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver

HERE = Path(__file__).parent
STEP_S, PREFILL_TOKEN_S, DECODE_S = 1e-3, 10e-6, 50e-6


class Device(Driver):
    """A driver whose steps take time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(traced_class, **options)

    def step(self, *args: Any) -> Any:
        output = self.schedule(*args)
        counts = output.num_scheduled_tokens.values()
        seconds = sum(DECODE_S if count == 1 else count * PREFILL_TOKEN_S for count in counts)
        time.sleep(STEP_S + seconds)
        if len(self.in_flight) == self.depth:
            self.update()
        return output


def head_of_line(small: int) -> None:
    """A long prompt at the head, prompts of ``small`` tokens behind it, a KV cache of 20 blocks of 16."""
    device = Device(num_blocks=21, max_model_len=320)
    device.add("running", 160, 24)
    device.step()
    device.add("long", 240, 4)
    for name in "abc":
        device.add(name, small, 4)
    device.finish()


def too_long_for_the_cache() -> None:
    """200 tokens need 13 blocks of 16, the cache has 12: vLLM admits it never, nor anybody behind it."""
    device = Device(num_blocks=13, max_model_len=256)
    device.add("long", 200, 4)
    device.add("short", 20, 4)
    for _ in range(20):
        device.step()
    device.abort("long")
    device.finish()


def short_pause() -> None:
    """Three steps without tokens, and async scheduling, whose last steps find all output in flight."""
    device = Device(async_scheduling=True)
    device.add("a", 20, 8)
    device.step()
    device.pause("PAUSED_ALL")
    for _ in range(3):
        device.step()
    device.pause("UNPAUSED")
    device.finish()


def crowd(requests: int, prompt: int, outputs: list[int], blocks: int) -> None:
    """More requests than a KV cache of so many blocks of 16 tokens can hold to their end."""
    device = Device(num_blocks=blocks + 1)
    for number in range(requests):
        device.add(f"r{number}", prompt, outputs[number % len(outputs)])
    device.finish()


def few_seats(seats: int) -> None:
    """Five requests at once; the third one is aborted while it waits."""
    device = Device(max_num_seqs=seats)
    for name in "abcde":
        device.add(name, 40, 6)
    device.step()
    if seats < 5:
        device.abort("c")
    device.finish()


def cached(blocks: int) -> None:
    """Two requests that outgrow the cache together, one more that takes the blocks of the one preempted."""
    device = Device(num_blocks=blocks + 1, enable_prefix_caching=True)
    device.add("a", 64, 40)
    device.add("b", 64, 40)
    device.finish()


def together(requests: int, prompt: int, outputs: int, **options: Any) -> None:
    """So many requests at once."""
    device = Device(**options)
    for number in range(requests):
        device.add(f"r{number}", prompt, outputs)
    device.finish()


def joined(prompt: int, *, running: int = 4, every: int = 3, **options: Any) -> None:
    """Some requests decode; every few steps another one with such a prompt joins them."""
    device = Device(**options)
    for number in range(running):
        device.add(f"d{number}", 8, 40)
    device.step()
    for number in range(8):
        device.add(f"p{number}", prompt, 1)
        for _ in range(every):
            device.step()
    device.finish()


TRACES: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "head-of-line": (lambda: head_of_line(32), lambda: head_of_line(200)),
    "stall": (too_long_for_the_cache, short_pause),
    "queueing": (lambda: few_seats(2), lambda: few_seats(5)),
    "prefix-cache": (lambda: cached(10), lambda: cached(16)),
    "blocked-budget": (lambda: few_seats(2), lambda: few_seats(5)),
    "preemption": (lambda: together(2, 60, 20, num_blocks=9), lambda: together(2, 60, 20, num_blocks=12)),
    "budget-saturated": (lambda: together(4, 200, 4), lambda: together(4, 64, 4)),
    "kv-bound": (lambda: together(4, 100, 20, num_blocks=15), lambda: together(4, 100, 20)),
    "max-num-seqs-bound": (lambda: few_seats(2), lambda: few_seats(5)),
    "token-budget-bound": (lambda: together(4, 200, 4), lambda: together(4, 60, 4)),
    "long-prefill-cap": (
        lambda: together(2, 200, 4, long_prefill_token_threshold=32),
        lambda: together(2, 32, 4, long_prefill_token_threshold=32),
    ),
    "prefill-starves-decode": (lambda: joined(200), lambda: joined(8)),
    "decode-starves-prefill": (
        lambda: joined(12, running=6, every=2, max_num_seqs=8, max_num_batched_tokens=8),
        lambda: joined(12, running=6, every=2, max_num_seqs=8, max_num_batched_tokens=128),
    ),
    "scheduler-overhead": (
        lambda: together(8, 20, 12),
        lambda: together(8, 20, 12, async_scheduling=True),
    ),
    "config-smells": (lambda: together(1, 20, 101), lambda: together(1, 20, 99)),
    "preemption-storm": (lambda: crowd(6, 14, [56, 20, 12], 8), lambda: crowd(5, 30, [24], 16)),
}


def make(folder: Path, load: Callable[[], None]) -> None:
    """Record one load; the host's name and folders do not belong into the repository."""
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["SCHEDTRACE_RUN_DIR"] = str(folder)
    load()
    for beside in (folder / "run.json", *folder.glob("front-end-*.jsonl")):
        beside.unlink(missing_ok=True)
    trace = folder / "engine-0.jsonl"
    head, rest = trace.read_text().split("\n", 1)
    header = json.loads(head) | {"host": "host", "model": "no-model", "pid": 1}
    trace.write_text(json.dumps(header, separators=(",", ":")) + "\n" + rest)


if __name__ == "__main__":
    for code in sys.argv[1:] or TRACES:
        for name, load in zip(("shows", "near-miss"), TRACES[code], strict=True):
            make(HERE / code / name, load)
