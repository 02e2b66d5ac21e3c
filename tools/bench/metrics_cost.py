"""What metrics alone cost ``schedule()``: ``python tools/bench/metrics_cost.py`` (no GPU, two minutes).

Every hook and mark on the path of a step is timed by itself, in a steady decode on vLLM's real scheduler.
Turns of three recorders alternate in one process: the one for metrics alone, the one for a trace, whose lines
are only added up, and one whose hooks and marks do nothing. The last shows what timing itself takes, which is
subtracted from the other two. The rest of the call is measured in processor time. All figures are medians
over steps, which other processes disturb little. They leave out what the marked copy of ``schedule()`` does
between two marks: for each request, it compares the number of tokens before and after a limit.

``--bytecodes`` counts this as well, on any machine: the bytecodes that a step executes with metrics alone and
that it does not execute without schedtrace, by file.
"""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
HOOKS = ("schedule_begins", "schedule_ended", "output_came_back")
MARKS = ("end", "done", "exit", "exit_at_head", "cap")
TURN, SETTLE = 10, 3
"""Steps of a turn, and those at its beginning that are left out: they are not steady for the recorder."""


NOTHING = "nothing"


class Nothing:
    """A recorder whose hooks do nothing."""

    active, queued, left, clock = True, False, 0, time.monotonic_ns

    def __init__(self):
        self.events = []
        self.schedule_begins = self.schedule_ended = self.output_came_back = nothing
        self.request_freed = self.request_was_freed = self.close = nothing


def nothing(*_args, **_options):
    """Do nothing."""


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

    from schedtrace.record.disguise import set_class
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
    set_class(driver.scheduler, Timed)
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
    return kinds | {NOTHING: Nothing()}


def measure(running, turns):
    """Print what each hook takes, beside ``schedule()``."""
    from schedtrace.record.disguise import RECORDERS
    from schedtrace.record.marks.exits import Marks

    driver, traced = engine(running)
    RECORDERS.look_up(driver.scheduler).close()
    spent, kinds = Spent(), recorders(driver.scheduler, traced)
    for recorder in kinds.values():
        for hook in HOOKS:
            setattr(recorder, hook, spent.timed(hook, getattr(recorder, hook)))
    own = {mark: getattr(Marks, mark) for mark in MARKS}
    steps = {name: [] for name in kinds}
    gc.collect()
    gc.freeze()
    for _ in range(turns):
        for name, recorder in kinds.items():
            RECORDERS.store(driver.scheduler, recorder)
            for mark, function in own.items():
                timed = spent.timed("marks", nothing if name == NOTHING else function)
                setattr(Marks, mark, staticmethod(timed))
            steps[name] += turn(driver, spent)
    gc.unfreeze()
    for mark, function in own.items():
        setattr(Marks, mark, staticmethod(function))
    for recorder in kinds.values():
        recorder.close()
    timing = {hook: median(ns[hook] for _, ns in steps[NOTHING]) for hook in spent.ns}
    for name in kinds.keys() - {NOTHING}:
        report(running, name, steps[name], timing)


def turn(driver, spent):
    """Nanoseconds of ``schedule()``, and those of each hook, in the steps of a turn."""
    steps = []
    for number in range(TURN):
        spent.ns = dict.fromkeys(spent.ns, 0.0)
        driver.step()
        if number >= SETTLE:
            steps.append((driver.scheduler.schedule_ns, spent.ns))
    time.sleep(0.01)  # the writers may work
    return steps


def report(running, name, steps, timing):
    """Print a row of the table; ``timing``: nanoseconds of hooks that do nothing."""
    hooks = {hook: median(ns[hook] for _, ns in steps) - timing[hook] for hook in timing}
    within = [sum(ns.values()) - ns["output_came_back"] for _, ns in steps]
    alone = median(whole - hooked for (whole, _), hooked in zip(steps, within, strict=True))
    timing_ns = sum(timing.values()) - timing["output_came_back"]
    us = (median(within) - timing_ns) / 1e3
    parts = ", ".join(f"{hook} {ns / 1e3:.1f}" for hook, ns in hooks.items())
    row = f"{alone / 1e3:,.0f} | {us:.1f} ({parts}) | {timing_ns / 1e3:.1f} | {us * 1e3 / alone:.2%}"
    print(f"| {running} | {name} | {row} |", flush=True)


def bytecodes(running):
    """Print the bytecodes that ``schedule()`` executes with metrics alone and not without schedtrace."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from schedtrace.record.disguise import RECORDERS

    driver, traced = engine(running)
    RECORDERS.look_up(driver.scheduler).close()
    recorder = recorders(driver.scheduler, traced)["metrics alone"]
    RECORDERS.store(driver.scheduler, recorder)
    for _ in range(TURN):
        driver.step()
    counts = {}
    for used in (Scheduler, traced):
        while driver.scheduler.running[0].num_computed_tokens % 16 != 5:  # no request gets another block
            driver.step()
        driver.scheduler.use = used
        counts[used] = traced_bytecodes(driver.schedule)
        driver.scheduler.use = traced
        driver.update()
    recorder.close()
    plain, added = counts[Scheduler], counts[traced]
    added.subtract(plain)
    parts = ", ".join(f"{file} {number}" for file, number in sorted(added.items()) if number)
    row = f"{plain.total():,} | {added.total():,} ({parts}) | {added.total() / plain.total():.2%}"
    print(f"| {running} | {row} |", flush=True)


def traced_bytecodes(call):
    """The bytecodes that a call executes, by file, without those of the driver."""
    counts = Counter()

    def entered(frame, *_):
        if "/simulate/" in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        file = frame.f_code.co_filename.rpartition("/")[2]

        def executed(_frame, event, _):
            counts[file] += event == "opcode"
            return executed

        return executed

    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(None)
    return counts


def main():
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--bytecodes", action="store_true")
    given = parser.parse_args()
    from loguru import logger

    logger.remove()
    head = "running | path | schedule() without hooks, us | hooks within it, us | timing, us | share"
    if given.bytecodes:
        head = "running | bytecodes of schedule() | added with metrics alone, by file | share"
    print(f"| {head} |\n|{'---|' * (head.count('|') + 1)}")
    with TemporaryDirectory() as folder:
        os.environ["SCHEDTRACE_RUN_DIR"] = f"{folder}/run"
        for running in given.running:
            bytecodes(running) if given.bytecodes else measure(running, given.turns)


if __name__ == "__main__":
    main()
