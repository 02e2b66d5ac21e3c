"""What recording costs vLLM's real scheduler: ``python tests/bench/record_overhead.py`` (no GPU, minutes).

One scheduler works its load off, in turns with and without the recorder: the same requests, the same memory,
the same minute of the machine. A round is one turn of each, and gives one ratio.
"""

import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median, quantiles

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
sys.path.insert(0, str(Path(__file__).parents[2]))

from loguru import logger
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from schedtrace.record.allocation import stand_in
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver as Engine

LOADS = [(16, 0, 0), (64, 0, 0), (256, 0, 0), (1024, 0, 0), (256, 10_000, 0), (256, 1, 1)]
"""Running, waiting, seats free: with a free seat the one who waits is looked at and skipped in every step."""

_begun = time.perf_counter()
TRACED = traced_class(Scheduler)
stand_in(KVCacheManager)
INSTRUMENTED_MS = 1e3 * (time.perf_counter() - _begun)
"""What an engine spends on it once, when it starts."""

RESTED = {"average": median, "rounds": 60, "steps": 20}
BUSY = {"average": mean, "rounds": 10, "steps": 300}
PATCHED_CALLS = 60


class Patched(TRACED):
    """The forum thread's patch: in every call a sink is added and a dict of all requests is logged."""

    path = None

    def schedule(self, *args):
        output = Scheduler.schedule(self, *args)
        logger.add(self.path, level="DEBUG")
        requests = [
            {
                "request_id": request_id,
                "computed_tokens": self.requests[request_id].num_computed_tokens - tokens,
                "scheduled_tokens": tokens,
            }
            for request_id, tokens in output.num_scheduled_tokens.items()
        ]
        record = {
            "token_budget": self.max_num_scheduled_tokens,
            "remaining_budget": self.max_num_scheduled_tokens - output.total_num_scheduled_tokens,
            "total_requests": len(requests),
            "requests": requests,
            "max_num_running_reqs": self.max_num_running_reqs,
        }
        logger.debug(record)
        return output


class Switched(Patched):
    """A scheduler whose methods are those of the class ``use``, with a clock around them."""

    use: type
    schedule_us: list
    update_us: list

    def schedule(self, *args):
        start = time.perf_counter_ns()
        output = self.use.schedule(self, *args)
        self.schedule_us.append((time.perf_counter_ns() - start) / 1e3)
        return output

    def update_from_output(self, *args):
        method = Scheduler if self.use is Patched else self.use
        start = time.perf_counter_ns()
        outputs = method.update_from_output(self, *args)
        self.update_us.append((time.perf_counter_ns() - start) / 1e3)
        return outputs


CLASSES = {"plain": Scheduler, "traced": TRACED, "patched": Patched}


class SteadyDecode(Engine):
    """So many requests that decode one token a step; others wait for a seat, or for their grammar."""

    def __init__(self, running, waiting=0, free_seats=0):
        limits = {"max_num_seqs": running + free_seats, "max_num_batched_tokens": 16 * running}
        super().__init__(lambda _: Switched, num_blocks=running * 500, max_model_len=16_384, **limits)
        never_ready = StructuredOutputsParams(json="{}") if free_seats else None
        for number in range(running + waiting):
            grammar = never_ready if number >= running else None
            self.add(f"request-{number}", prompt=16, max_tokens=16_000, structured_outputs=grammar)
        self.writer = self.scheduler._schedtrace_recorder._writer
        self.turn("traced", 10)
        gc.collect()
        gc.freeze()  # as EngineCore does once it is up

    def turn(self, name, steps):
        """What each of so many steps took; afterwards the trace writer may finish."""
        scheduler = self.scheduler
        scheduler.use, scheduler.schedule_us, scheduler.update_us = CLASSES[name], [], []
        before = self.writer_cpu_us()
        for _ in range(steps):
            self.step()
        while self.writer._pending:
            time.sleep(0.01)
        time.sleep(0.02)
        writer_us = (self.writer_cpu_us() - before) / steps
        return {"schedule": scheduler.schedule_us, "update": scheduler.update_us, "writer": [writer_us]}

    def writer_cpu_us(self):
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self.writer._thread.ident)) / 1e3

    def close(self):
        gc.unfreeze()
        self.scheduler.shutdown()


def compare(load, other, average, rounds, steps):
    """One line: the plain class and another in turns."""
    engine, pairs = SteadyDecode(*load), []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        turns = {place: engine.turn(other if place else "plain", steps) for place in order}
        pairs.append((turns[0], turns[1]))
    engine.close()
    cells, added_us = [f"{load[0]:>3} + {load[1]:<6,} | {load[2]}", f"{other:6}"], 0.0
    for method in ("schedule", "update"):
        plain_us = median(average(plain[method]) for plain, _ in pairs)
        ratios = [average(second[method]) / average(plain[method]) for plain, second in pairs]
        low, middle, high = (100 * (ratio - 1) for ratio in quantiles(ratios))
        added_us += plain_us * middle / 100
        cells.append(f"{plain_us:5,.0f} us {middle:+6.1f} % ({low:+5.1f} .. {high:+5.1f})")
    writer_us = median(second["writer"][0] for _, second in pairs)
    print(" | ".join([*cells, f"{added_us:+5.0f} us", f"{writer_us:5.0f} us"]), flush=True)


def compare_with_patch(folder):
    """One turn of each class with 256 running requests: the patch gets slower with every call."""
    Patched.path = folder / "profile.log"
    engine = SteadyDecode(256)
    for name in CLASSES:
        before = engine.writer.path.stat().st_size
        times = engine.turn(name, PATCHED_CALLS)["schedule"]
        size = engine.writer.path.stat().st_size - before
        if name == "patched":
            size = Patched.path.stat().st_size
        print(f"{name:7} | {median(times[:10]):6,.0f} us | {median(times[-10:]):6,.0f} us | {size:>12,}")
    engine.close()


def main():
    logger.remove()
    with tempfile.TemporaryDirectory() as name:
        os.environ["SCHEDTRACE_RUN_DIR"] = str(Path(name) / "run")
        columns = (
            "running + waiting | seats free | class | schedule(), more | update_from_output(), more"
            " | both, a step | writer's CPU, a step"
        )
        print(f"Instrumenting, once: {INSTRUMENTED_MS:.0f} ms\n")
        print(f"A. The writer rests meanwhile; medians of turns of {RESTED['steps']} steps\n{columns}")
        compare((256, 0, 0), "plain", **RESTED)
        for load in LOADS:
            compare(load, "traced", **RESTED)
        print(f"\nB. The engine never waits for a device; means of turns of {BUSY['steps']} steps\n{columns}")
        compare((256, 0, 0), "plain", **BUSY)
        compare((256, 0, 0), "traced", **BUSY)
        print("\nC. The forum thread's patch; schedule() with 256 running requests")
        print(f"class | first 10 calls | calls {PATCHED_CALLS - 9} to {PATCHED_CALLS} | bytes on disk")
        compare_with_patch(Path(name))
        logger.remove()


if __name__ == "__main__":
    main()
