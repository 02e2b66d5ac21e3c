"""What metrics alone cost ``schedule()``: ``python tools/bench/metrics_cost.py`` (no GPU, two minutes).

Every hook and mark on the path of a step is timed by itself, in a steady decode on vLLM's real scheduler.
Turns of two recorders alternate in one process: the one for metrics alone, and the one for a trace, whose
lines are only added up. The rest of the call is measured in processor time. All figures are medians over
steps, which other processes disturb little. They leave out what the marked copy of ``schedule()`` does
between two marks: for each request, it compares the number of tokens before and after a limit.
"""

import argparse
import gc
import os
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
HOOKS = ("schedule_begins", "schedule_ended", "output_came_back")
MARKS = ("end", "done", "exit", "exit_at_head", "cap")
TURN, SETTLE = 10, 3
"""Steps of a turn, and those at its beginning that are left out: they are not steady for the recorder."""


class Spent:
    """Nanoseconds that functions took in the current step, without those of the clock."""

    def __init__(self):
        clock = time.perf_counter_ns
        self.clock_ns = median(clock() - clock() for _ in range(10_000)) * -1
        self.ns = dict.fromkeys((*HOOKS, "marks"), 0.0)

    def timed(self, name, function):
        def call(*args, **options):
            began_ns = time.perf_counter_ns()
            result = function(*args, **options)
            self.ns[name] += time.perf_counter_ns() - began_ns - self.clock_ns
            return result

        return call


def engine(running):
    """A driver with a number of requests that decode for ever, and the traced class of its scheduler."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from schedtrace.record.traced import traced_class
    from schedtrace.simulate import Driver

    traced = traced_class(Scheduler)

    class Timed(traced):
        use = traced

        def schedule(self, *args):
            began_ns = time.thread_time_ns()
            output = self.use.schedule(self, *args)
            self.schedule_ns = time.thread_time_ns() - began_ns
            return output

    limits = {"max_num_seqs": running, "max_num_batched_tokens": running * 16}
    driver = Driver(lambda _: traced, num_blocks=running * 500, max_model_len=16_384, **limits)
    driver.scheduler.__class__ = Timed
    for number in range(running):
        driver.add(f"cmpl-{number:024x}-0", prompt=16, max_tokens=16_000)
    return driver, traced


def recorders(scheduler, traced):
    """The recorders that alternate, by what they are for."""
    from schedtrace.record import traced as module
    from schedtrace.record.settings import Settings
    from schedtrace.record.traced import prepared_recorder

    chosen, kinds = Settings(Path(), trial_ids=False, hash_ids=False, keeps_lines=False), {}
    can_count = module.can_count
    for name, counts in {"metrics alone": True, "a trace's path": False}.items():
        module.can_count = lambda *_, counts=counts: counts
        kinds[name] = prepared_recorder(scheduler, traced, chosen, attached=True)
    module.can_count = can_count
    return kinds


def measure(running, turns):
    """Print what each hook takes, beside ``schedule()``."""
    from schedtrace.record.disguise import RECORDERS
    from schedtrace.record.marks.exits import Marks

    driver, traced = engine(running)
    RECORDERS.get(driver.scheduler).close()
    spent, kinds = Spent(), recorders(driver.scheduler, traced)
    for recorder in kinds.values():
        for hook in HOOKS:
            setattr(recorder, hook, spent.timed(hook, getattr(recorder, hook)))
    own = {name: getattr(Marks, name) for name in MARKS}
    for name, mark in own.items():
        setattr(Marks, name, staticmethod(spent.timed("marks", mark)))
    steps = {name: [] for name in kinds}
    gc.collect()
    gc.freeze()
    for _ in range(turns):
        for name, recorder in kinds.items():
            RECORDERS.put(driver.scheduler, recorder)
            for number in range(TURN):
                spent.ns = dict.fromkeys(spent.ns, 0.0)
                driver.step()
                if number >= SETTLE:
                    steps[name].append((driver.scheduler.schedule_ns, spent.ns))
            time.sleep(0.01)  # the writers may work
    gc.unfreeze()
    for name, mark in own.items():
        setattr(Marks, name, staticmethod(mark))
    for name, seen in steps.items():
        kinds[name].close()
        hooks = {hook: median(ns[hook] for _, ns in seen) / 1e3 for hook in spent.ns}
        within = [sum(ns.values()) - ns["output_came_back"] for _, ns in seen]
        alone = median(whole - hooked for (whole, _), hooked in zip(seen, within, strict=True))
        parts = ", ".join(f"{hook} {us:.1f}" for hook, us in hooks.items())
        us, share = median(within) / 1e3, median(within) / alone
        print(f"| {running} | {name} | {alone / 1e3:,.0f} | {us:.1f} ({parts}) | {share:.2%} |", flush=True)


def main():
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--turns", type=int, default=25)
    given = parser.parse_args()
    from loguru import logger

    logger.remove()
    print("| running | path | schedule() without hooks, us | hooks within it, us | share |")
    print("|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        os.environ["SCHEDTRACE_RUN_DIR"] = f"{folder}/run"
        for running in given.running:
            measure(running, given.turns)


if __name__ == "__main__":
    main()
