"""What an attachment costs vLLM's real scheduler: ``python tools/bench/attachment.py`` (no GPU, two minutes).

Two schedulers with the same load take turns. Of one nobody ever knows; the other is attached to and let go
ten times. The ratio of their ``schedule()`` before the first time is the noise, after the last one the cost.
Also: for how long the engine is held up, by ``queue`` as well, and what is left in memory.
"""

import gc
import os
import tempfile
import threading
import time
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace

COUNTS = [16, 64, 256]
CROWDS = [256, 1000, 4000]
CYCLES = 10
ROUNDS, STEPS = 60, 20


class Now:
    """This thread is the engine's."""

    def do(self, what, _timeout_s):
        what()


def engine_of(running, waiting=0):
    from schedtrace.record.live.attachment import Attachment
    from schedtrace.simulate import Driver

    engine = Driver(num_blocks=running * 500, max_model_len=16_384, max_num_seqs=running)
    for number in range(running + waiting):
        engine.add(f"cmpl-{number:024x}-0", prompt=16, max_tokens=16_000)
    for _ in range(20):
        engine.step()
    core = SimpleNamespace(scheduler=engine.scheduler, batch_queue=None)
    return engine, Attachment(core, Now())


def turn(engine):
    """Median of ``schedule()`` in microseconds."""
    took = []
    for _ in range(STEPS):
        begin = time.perf_counter_ns()
        engine.schedule()
        took.append((time.perf_counter_ns() - begin) / 1e3)
        engine.update()
    return median(took)


def ratio(one, other):
    """Quartiles of the other's time over the one's, turn by turn."""
    pairs = []
    for number in range(ROUNDS):
        engines = (one, other) if number % 2 else (other, one)
        took = {id(engine): turn(engine) for engine in engines}
        pairs.append(took[id(other)] / took[id(one)])
    return quantiles(pairs)


def percent(quartiles):
    low, middle, high = (100 * (one - 1) for one in quartiles)
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"


def rss_kib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def cycle(engine, attachment, folder):
    """Attach, make some steps, detach: for how long each held the engine up, in microseconds."""
    attach_us = attachment.start_recording(folder, None, hash_ids=False).held_us
    for _ in range(STEPS):
        engine.step()
    detach_us = attachment.stop_recording().held_us
    return attach_us, detach_us


def held_by_queue(engine):
    """For how long a look at the queues holds the engine up, in microseconds."""
    from schedtrace.record.live.queue_copy import queue_now
    from schedtrace.record.written_ids import WrittenIds

    config = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(model="tiny"))
    core = SimpleNamespace(scheduler=engine.scheduler, vllm_config=config)
    engine.step()
    return queue_now(core, Now(), lambda **_wait: [], WrittenIds(hash_ids=False)).held_us


def main():
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    from loguru import logger

    logger.remove()
    with tempfile.TemporaryDirectory() as home:
        for number in COUNTS:
            (one, _), (other, attachment) = engine_of(number), engine_of(number)
            gc.collect()
            gc.freeze()  # as EngineCore does once it is up
            noise, used = ratio(one, other), []
            for time_ in range(CYCLES):
                cycle(other, attachment, Path(home) / f"{number}-{time_}")
                used.append((rss_kib(), threading.active_count(), len(os.listdir("/proc/self/fd"))))  # noqa: PTH208  # of Linux
            after = ratio(one, other)
            gc.unfreeze()
            print(
                f"schedule() at {number} running: plain against plain {percent(noise)}, after {CYCLES}",
                end=" ",
            )
            print(f"attachments {percent(after)}")
            grown, (_, threads, files) = used[-1][0] - used[1][0], used[-1]
            print(f"  memory since the second: {grown:+,} KiB; threads {used[0][1]} to {threads}", end=", ")
            print(f"files {used[0][2]} to {files}")
        for number in CROWDS:
            engine, attachment = engine_of(16, number)
            gc.collect()
            gc.freeze()
            held = [cycle(engine, attachment, Path(home) / f"w{number}-{time_}") for time_ in range(CYCLES)]
            looks = [held_by_queue(engine) for _ in range(2 * CYCLES)]
            gc.unfreeze()
            attach_us, detach_us = zip(*held, strict=True)
            print(f"held up with {number:,} waiting: attach {median(attach_us):,.0f} us (at most", end=" ")
            print(
                f"{max(attach_us):,.0f}), detach {median(detach_us):,.1f} us (at most {max(detach_us):,.1f}),"
                f" queue {median(looks):,.0f} us (at most {max(looks):,.0f})"
            )


if __name__ == "__main__":
    main()
