"""Makes the traces in this folder anew: vLLM's own scheduler and KV cache manager, without a model.

``python tests/data/findings/make.py [code ...]``. Decisions are the same every time; times are those of this
machine, with a made-up device that takes 1 ms a step, 10 us a prefill token and 50 us a decode, or virtual
ones, with the same device. ``make.py --sentences [code ...]`` leaves the traces as they are and writes what
is found in them (``sentences.txt``).
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# vLLM reads them when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput

from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver, Simulation, VirtualClock
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.constants import Constants

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))  # for the toy connector, which vLLM imports by its name

from tests.contract.causes.toy_connectors import KV  # noqa: E402  # see the line above
from tests.unit.diagnose.sentences import write_sentences  # noqa: E402  # likewise

ON_GPU = {"schedtrace": {"device": "a simulated GPU"}}
"""On a CPU vLLM switches asynchronous scheduling off."""
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

    def arrive(self, request_ids: list[str]) -> None:
        """The KV of these requests has been loaded from elsewhere."""
        output = KVConnectorOutput(finished_recving=set(request_ids))
        self.scheduler._update_from_kv_xfer_finished(output)  # as a worker's output does


class Pipeline(Driver):
    """A pipeline whose stages take ``STEP_S`` and ten times ``DECODE_S`` a token for each batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(traced_class, **options)
        self.stages = [0.0] * self.depth
        self.done: list[float] = []

    def step(self, *args: Any) -> Any:
        output = self.schedule(*args)
        passed = time.monotonic()
        for stage, free in enumerate(self.stages):
            passed = max(passed, free) + STEP_S + 10 * DECODE_S * output.total_num_scheduled_tokens
            self.stages[stage] = passed
        self.done.append(passed)
        if len(self.in_flight) == self.depth:
            time.sleep(max(0.0, self.done.pop(0) - time.monotonic()))
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


def longest_for_the_cache() -> None:
    """176 tokens fill the 11 blocks that requests can hold."""
    device = Device(num_blocks=12, max_model_len=256)
    device.add("long", 176, 1)
    device.add("short", 20, 4)
    device.finish()


def starts_again(outputs: int) -> None:
    """12 blocks of 16: one request grows until it needs them all; the other gets only a first chunk in."""
    device = Device(
        num_blocks=13, max_model_len=256, max_num_batched_tokens=64, scheduler_reserve_full_isl=False
    )
    device.add("holder", 100, outputs)
    for _ in range(2):
        device.step()
    device.add("starts", 160, 4)
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


def joined(prompt: int) -> None:
    """Four requests decode; every third step another one with such a prompt joins them."""
    device = Device()
    for number in range(4):
        device.add(f"d{number}", 8, 40)
    device.step()
    for number in range(8):
        device.add(f"p{number}", prompt, 1)
        for _ in range(3):
            device.step()
    device.finish()


def pipeline(*batches: int) -> None:
    """A stage for each batch; so many prompts come before each of the first steps."""
    device = Pipeline(pipeline_parallel_size=len(batches))
    for batch, size in enumerate(batches):
        for number in range(size):
            device.add(f"{'abcd'[batch]}{number}", 8, 22 + 4 * number)
        device.step()
    device.finish()


def drafted(accepted: int) -> None:
    """Up to 8 requests, each with three drafts a step, of which so many are right."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    device = Device(drafts=3, accepted=lambda *_: accepted, speculative_config=drafts)
    for number in range(8):
        device.add(f"r{number}", 8, 20 * (1 + accepted))
        for _ in range(3):
            device.step()
    device.finish()


@dataclass(frozen=True)
class Cliff(Constants):
    """A device that takes so many times as long for more than 4 requests."""

    factor: float = 1.0

    def device_us(self, batch: Batch) -> float:
        return super().device_us(batch) * (self.factor if batch.requests > 4 else 1.0)


def waves(factor: float) -> None:
    """Three times up to 8 requests at once, on that device."""

    def load(engine: Simulation) -> None:
        for wave in range(3):
            for number in range(8):
                engine.arrive(200_000 * wave + 3000 * number, f"r{wave}-{number}", 8, 18)

    times = Cliff(1e6 * STEP_S, 1e6 * PREFILL_TOKEN_S, 1e6 * DECODE_S, factor=factor)
    in_virtual_time(load, times, max_num_seqs=16)


def beside_chats(prompt: int) -> None:
    """A prompt of this length decodes beside two or three chats of 50 tokens; context takes time."""

    def load(engine: Simulation) -> None:
        engine.arrive(40_000, "agent", prompt, 20)
        for number in range(6):
            engine.arrive(15_000 * number, f"chat-{number}", 50, 20)

    times = Constants(1e6 * STEP_S, 1e6 * PREFILL_TOKEN_S, 1e6 * DECODE_S, 2.0)
    in_virtual_time(load, times, max_model_len=1024, max_num_batched_tokens=1024)


def capped_prompts(threshold: int) -> None:
    """Six prompts of 400 tokens, one after the other, in chunks of so many tokens beside a request."""

    def load(engine: Simulation) -> None:
        engine.arrive(0, "chat", 20, 100)
        for number in range(6):
            engine.arrive(20_000 * number, f"r{number}", 400, 8)

    options = {"max_model_len": 1024, "max_num_batched_tokens": 512}
    in_virtual_time(load, long_prefill_token_threshold=threshold, **options)


def long_among_short(prompt: int, **options: Any) -> None:
    """Two requests decode; a long prompt comes, then short ones, one before every second step."""
    device = Device(max_model_len=2048, num_blocks=200, **options)
    for number in range(2):
        device.add(f"d{number}", 16, 24)
    device.step()
    device.add("long", prompt, 4)
    for number in range(4):
        device.add(f"s{number}", 32, 8)
        device.step()
        device.step()
    device.finish()


def urgent(priority: int) -> None:
    """Two requests of priority 5 hold both seats; three of this priority come."""
    device = Device(max_num_seqs=2, scheduling_policy="priority")
    for name in "ab":
        device.add(name, 40, 24, priority=5)
    device.step()
    for name in "xyz":
        device.add(name, 20, 4, priority=priority)
    device.finish()


def loads_from_elsewhere(requests: int) -> None:
    """So many requests hold 6 of 24 blocks each while their KV is loaded, 20 steps long; eight more come."""
    device = Device(num_blocks=25, kv_transfer_config=KV)
    loaded = [f"load{number}" for number in range(requests)]
    device.add("running", 20, 30)
    for name in loaded:
        device.scheduler.connector.has[name] = (80, True)
        device.add(name, 96, 4)
    device.step()
    for number in range(8):
        device.add(f"r{number}", 112, 2)
    for _ in range(20):
        device.step()
    device.arrive(loaded)
    device.finish()


def unfetched(*, keeps: bool) -> None:
    """Three finished requests keep 6 of 24 blocks each until another engine fetches them; eight more come."""
    device = Device(num_blocks=25, kv_transfer_config=KV)
    device.scheduler.connector.keeps = keeps
    fetched = [f"prefill{number}" for number in range(3)]
    for name in fetched:
        device.add(name, 90, 1)
    for _ in range(3):
        device.step()
    device.scheduler.connector.keeps = False
    for number in range(8):
        device.add(f"r{number}", 112, 2)
    for _ in range(20):
        device.step()
    if keeps:
        output = KVConnectorOutput(finished_sending=set(fetched))
        device.scheduler._update_from_kv_xfer_finished(output)
    device.finish()


def closed_loop(requests: int) -> None:
    """So many requests are open all the time, with four seats."""
    device = Device(max_num_seqs=4)
    for number in range(24):
        device.add(f"r{number}", 20, 10)
        while len(device.scheduler.requests) >= requests:
            device.step()
    device.finish()


def adapters(most: int) -> None:
    """Requests of two LoRA adapters in turn, with so many adapters in a batch at most."""
    device = Device(enable_lora=True, max_loras=most)
    for number in range(6):
        adapter = LoRARequest(f"adapter{number % 2}", 1 + number % 2, "/nowhere")
        device.add(f"r{number}", 20, 12, lora_request=adapter)
    device.finish()


DEVICE = Constants(1e6 * STEP_S, 1e6 * PREFILL_TOKEN_S, 1e6 * DECODE_S)


def in_virtual_time(load: Callable[[Simulation], None], times: Constants = DEVICE, **options: Any) -> None:
    """A load whose requests and events come at their times, in microseconds."""
    with VirtualClock() as clock:
        engine = Simulation(clock, traced_class, times=times, **options)
        load(engine)
        engine.run()
        engine.close()


def impatient(timeout_ms: int) -> None:
    """Five requests at once on one seat, 23 ms each; clients give up after so long and ask again once."""

    def load(engine: Simulation) -> None:
        def sent(us: float, name: str, number: int) -> None:
            engine.arrive(us, name, 40, 20, text=number)

        def gives_up(name: str, number: int) -> None:
            if name in engine.scheduler.requests:
                engine.abort(name)
                if not name.endswith("-again"):
                    sent(engine.clock.now_us + 100, f"{name}-again", number)

        for number in range(5):
            sent(0, f"r{number}", number)
            engine.at(1e3 * timeout_ms, lambda number=number: gives_up(f"r{number}", number))

    in_virtual_time(load, max_num_seqs=1, enable_prefix_caching=True)


def reset(us: float) -> None:
    """Four requests of some 50 ms; the prefix cache is reset at this time."""

    def load(engine: Simulation) -> None:
        for number in range(4):
            engine.arrive(0, f"r{number}", 60, 30)
        engine.at(us, engine.reset_prefix_cache)

    in_virtual_time(load, enable_prefix_caching=True)


def paused(us: float) -> None:
    """A request every 10 ms; the scheduler is paused for so long."""

    def load(engine: Simulation) -> None:
        for number in range(10):
            engine.arrive(10_000 * number, f"r{number}", 40, 12)
        engine.at(50_000, lambda: engine.pause("PAUSED_ALL"))
        engine.at(50_000 + us, lambda: engine.pause("UNPAUSED"))

    in_virtual_time(load)


def one_longer(outputs: int) -> None:
    """23 requests of 10 output tokens on 12 seats, and one of so many, sent last."""

    def load(engine: Simulation) -> None:
        for number in range(23):
            engine.arrive(0, f"r{number}", 10, 10)
        engine.arrive(0, "long", 10, outputs)

    in_virtual_time(load, max_num_seqs=12)


SAMPLES = ("shows", "near-miss")
FURTHER_SAMPLES = {
    "preemption": ("storm", "no-storm"),
    "kv-held-idle": ("finished", "fetched"),
    "interruption": ("reset", "no-reset"),
}
"""Folders of a finding's traces, in the order of ``TRACES``."""
TRACES: dict[str, tuple[Callable[[], None], ...]] = {
    "no-progress": (lambda: starts_again(40), lambda: starts_again(2)),
    "never-fits": (too_long_for_the_cache, longest_for_the_cache),
    "head-of-line": (lambda: head_of_line(32), lambda: head_of_line(200)),
    "stall": (too_long_for_the_cache, short_pause),
    "prefix-cache": (lambda: cached(10), lambda: cached(16)),
    "blocked-budget": (lambda: few_seats(2), lambda: few_seats(5)),
    "preemption": (
        lambda: together(2, 60, 20, num_blocks=9),
        lambda: together(2, 60, 20, num_blocks=12),
        lambda: crowd(6, 14, [56, 20, 12], 8),
        lambda: crowd(5, 30, [24], 16),
    ),
    "kv-bound": (lambda: together(8, 60, 24, num_blocks=25), lambda: together(8, 60, 24)),
    "max-num-seqs-bound": (lambda: together(8, 30, 16, max_num_seqs=2), lambda: together(8, 30, 16)),
    "token-budget-bound": (lambda: together(12, 200, 16), lambda: together(4, 60, 16)),
    "long-context": (lambda: beside_chats(900), lambda: beside_chats(300)),
    "capped-prefill": (lambda: capped_prompts(32), lambda: capped_prompts(256)),
    "long-prompt": (
        lambda: long_among_short(1500),
        lambda: long_among_short(1500, long_prefill_token_threshold=128),
    ),
    "kv-held-idle": (
        lambda: loads_from_elsewhere(3),
        lambda: loads_from_elsewhere(0),
        lambda: unfetched(keeps=True),
        lambda: unfetched(keeps=False),
    ),
    "batched-prefill": (
        lambda: together(8, 400, 2, num_blocks=300, max_model_len=512, max_num_batched_tokens=4096),
        lambda: together(8, 8, 2, num_blocks=300, max_model_len=512, max_num_batched_tokens=4096),
    ),
    "priority-inversion": (lambda: urgent(0), lambda: urgent(5)),
    "other-limit": (lambda: adapters(1), lambda: adapters(2)),
    "client-limited": (lambda: closed_loop(2), lambda: closed_loop(4)),
    "prefill-starves-decode": (lambda: joined(200), lambda: joined(8)),
    "scheduler-overhead": (
        lambda: together(8, 20, 12, additional_config=ON_GPU),
        lambda: together(8, 20, 12, async_scheduling=True, additional_config=ON_GPU),
    ),
    "pipeline-bubbles": (lambda: pipeline(4, 1), lambda: pipeline(3, 2)),
    "spec-decode": (lambda: drafted(0), lambda: drafted(3)),
    "slow-steps": (lambda: waves(4.0), lambda: waves(1.02)),
    "aborted-requests": (lambda: impatient(60), lambda: impatient(80)),
    "interruption": (
        lambda: paused(80_000),
        lambda: paused(100),
        lambda: reset(20_000),
        lambda: reset(100_000),
    ),
    "long-tail": (lambda: one_longer(60), lambda: one_longer(25)),
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
    if sys.argv[1:2] == ["--sentences"]:
        for code in sys.argv[2:] or (folder.name for folder in HERE.iterdir() if folder.is_dir()):
            write_sentences(HERE / code)
        sys.exit()
    for code in sys.argv[1:] or TRACES:
        for name, load in zip((*SAMPLES, *FURTHER_SAMPLES.get(code, ())), TRACES[code], strict=True):
            make(HERE / code / name, load)
        write_sentences(HERE / code)
