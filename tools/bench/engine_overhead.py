"""What recording costs an engine at realistic step times: ``python tools/bench/engine_overhead.py`` (no GPU).

vLLM's ``EngineCore`` with the simulated executor in real time decodes for a fixed number of running requests.
One engine steps in turns with and without the recorder: the same requests, the same minute of the machine.
A round is one turn of each and gives one ratio of their times, which is that of throughput. A machine with
busy neighbours stalls for longer than a step: so there is also the ratio of the fastest 80 % of a turn's
steps, and the work of the engine's thread, in which stalls do not count.
"""

import argparse
import gc
import os
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median, quantiles

STEP_MS = (5, 10, 20)
RUNNING = (16, 64, 256)
PROMPT, OUTPUT = 16, 16_000
LEAST_ROUNDS = 4
FASTEST = 0.8
DRAWS = 2000


def engine_of(running, step_ms, *, overlapped):
    """An engine core whose scheduler can be switched between the plain and the recording class."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from schedtrace.record.traced import traced_class
    from schedtrace.simulate import clock
    from schedtrace.simulate.core import make_core
    from schedtrace.simulate.driver import engine_config, kv_cache_groups, make_request
    from schedtrace.simulate.executor import ModelRunner, SimulatedExecutor
    from schedtrace.step_times.constants import Constants

    clock.SPIN_US = 0.0  # waiting awake would count as work
    plain = AsyncScheduler if overlapped else Scheduler
    traced = traced_class(plain)

    class Switched(traced):
        use = traced

        def schedule(self, *args):
            return self.use.schedule(self, *args)

        def update_from_output(self, *args):
            return self.use.update_from_output(self, *args)

    def executor(config):
        times = Constants(1000 * step_ms, 0, 0, 0)
        return SimulatedExecutor(config, clock=clock.MachineClock(), times=times, model_runner=ModelRunner())

    config = engine_config(
        num_blocks=running * 500, async_scheduling=overlapped, max_num_seqs=running,
        max_num_batched_tokens=max(256, running * PROMPT), max_model_len=2 * OUTPUT,
    )  # fmt: skip
    core = make_core(config, executor, Switched, kv_cache_groups(config))
    for number in range(running):
        core.scheduler.add_request(make_request(f"cmpl-{number:024x}-0", [7] * PROMPT, OUTPUT, 8, None))
    return core, {"plain": plain, "traced": traced}


def turn(core, scheduler_class, steps):
    """Milliseconds a step: of all, of the fastest, and this thread's work; then the writer finishes."""
    core.scheduler.use = scheduler_class
    writer = core.scheduler._schedtrace_recorder.writer
    for _ in range(3):  # the first steps of a turn see the change
        core.step_fn()
    ends, worked = [time.perf_counter()], time.thread_time()
    while len(ends) <= steps:
        if core.step_fn()[0] is not None:
            ends.append(time.perf_counter())
    worked = time.thread_time() - worked
    fastest = sorted(end - begin for begin, end in pairwise(ends))[: round(FASTEST * steps)]
    while writer._pending:
        time.sleep(0.01)
    return 1000 * (ends[-1] - ends[0]) / steps, 1000 * mean(fastest), 1000 * worked / steps


def measure(running, step_ms, *, overlapped, rounds, steps):
    """Rounds: what ``turn`` says of the plain class, and of the recording one."""
    core, classes = engine_of(running, step_ms, overlapped=overlapped)
    turn(core, classes["traced"], 10)
    gc.collect()
    gc.freeze()
    pairs = []
    for number in range(rounds):
        order = ("plain", "traced") if number % 2 else ("traced", "plain")
        took = {name: turn(core, classes[name], steps) for name in order}
        pairs.append((took["plain"], took["traced"]))
    gc.unfreeze()
    while core.batch_queue:
        future, output, *_ = core.batch_queue.pop()
        core.scheduler.update_from_output(output, future.result())
    core.scheduler.shutdown()
    return pairs


def interval(losses):
    """The median's 95 % interval: the median of rounds drawn anew."""
    import numpy as np

    drawn = np.random.default_rng(0).choice(losses, size=(DRAWS, len(losses)))
    return np.percentile(np.median(drawn, axis=1), [2.5, 97.5])


def row(name, pairs):
    """One line of the table; what is lost in percent of throughput."""
    every, fastest = ([100 * (1 - plain[kind] / traced[kind]) for plain, traced in pairs] for kind in (0, 1))
    low, middle, high = quantiles(every)
    least, most = interval(fastest)
    step_ms = median(plain[1] for plain, _ in pairs)
    work_ms = median(plain[2] for plain, _ in pairs)
    added_ms = median(traced[2] - plain[2] for plain, traced in pairs)
    return " | ".join(
        (
            f"| {name} | {step_ms:.2f} ms | {work_ms:.2f} ms",
            f"{1000 * added_ms:+.0f} us, {added_ms / step_ms:.2%}",
            f"{median(fastest):+.2f} % ({least:+.2f} to {most:+.2f})",
            f"{middle:+.2f} % ({low:+.2f} to {high:+.2f}) |",
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="of each case")
    parser.add_argument("--steps", type=int, default=40, help="of a turn")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only cases with this, as 'sync, 10 ms, 256'"
    )
    given = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    from loguru import logger

    logger.remove()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; turns of {given.steps} steps\n")
    print("| case | step | thread's work | added work | lost, fastest steps | lost, all steps |")
    print("|---|---|---|---|---|---|")
    for overlapped, step_ms, running in product((False, True), STEP_MS, RUNNING):
        name = f"{'overlapped' if overlapped else 'sync'}, {step_ms} ms, {running} running"
        if given.only not in name:
            continue
        rounds = max(LEAST_ROUNDS, round(1000 * given.seconds / (2 * given.steps * step_ms)))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SCHEDTRACE_RUN_DIR"] = str(Path(folder) / "run")
            pairs = measure(running, step_ms, overlapped=overlapped, rounds=rounds, steps=given.steps)
        print(row(name, pairs), flush=True)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
