"""What recording costs vLLM's real scheduler: ``python tools/bench/record_overhead.py`` (no GPU, minutes).

One scheduler works its load off, in turns with and without the recorder: the same requests, the same memory,
the same minute of the machine. A round is one turn of each, and gives one ratio. ``--before COMMIT`` measures
the recorder of that commit in the same run: load by load, in a process of its own.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median, quantiles

ROOT = Path(__file__).parents[2]
METRICS = "BENCH_METRICS"
"""Variable of the process that measures metrics without a trace."""
COUNTS = [16, 64, 256, 1024]
LOADS = {
    **{f"decode, {number} running": {"number": number} for number in COUNTS},
    "decode, 256 running, 10,000 waiting": {"number": 256, "waiting": 10_000},
    "likewise, a class that is not vLLM's": {"number": 256, "waiting": 10_000, "foreign": True},
    **{f"mixed, {number} running": {"number": number, "prompt": 400, "output": 100} for number in COUNTS[:3]},
    "a finish in every step, 256 running": {"number": 256, "prompt": 16, "output": 256},
    "decode, 256 running, engine never waits": {"number": 256, "busy": True},
    "mixed, 256 running, engine never waits": {"number": 256, "prompt": 400, "output": 100, "busy": True},
}
RESTED = {"average": median, "rounds": 40, "steps": 20}
BUSY = {"average": mean, "rounds": 8, "steps": 300}


def engine_of(number, waiting=0, prompt=0, output=0, foreign=False):  # noqa: C901  # classes over a class found late
    """A driver of vLLM's scheduler, whose methods are those of a class that can be switched."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from schedtrace.record.disguise import set_class
    from schedtrace.record.traced import traced_class
    from schedtrace.simulate import Driver

    traced = traced_class(Scheduler)

    class Switched(traced):
        use = Scheduler

        def schedule(self, *args):
            start = time.perf_counter_ns()
            scheduled = self.use.schedule(self, *args)
            self.schedule_us.append((time.perf_counter_ns() - start) / 1e3)
            return scheduled

        def update_from_output(self, *args):
            start = time.perf_counter_ns()
            outputs = self.use.update_from_output(self, *args)
            self.update_us.append((time.perf_counter_ns() - start) / 1e3)
            return outputs

    class Load(Driver):
        """``number`` requests run: for ever, or each is followed by another one."""

        def __init__(self):
            tokens = number * 16 if not output else number + 6 * prompt * number // (output + prompt)
            limits = {"max_num_seqs": number, "max_num_batched_tokens": tokens}
            made = Switched if foreign else traced
            super().__init__(lambda _: made, num_blocks=number * 500, max_model_len=16_384, **limits)
            # Made as vLLM's, of which more is known than of another one. A plain assignment would end the
            # recording.
            set_class(self.scheduler, Switched)
            self.classes = {"plain": Scheduler, "traced": traced}
            recorder = self.scheduler._schedtrace_recorder
            self.writer = getattr(recorder, "writer", None) or recorder._writer  # of a commit before
            if METRICS in os.environ:
                self.writer.measuring.meter = metrics()
            self.added = 0
            for place in range(number + waiting):
                self.another(1 + place * output // number if output else 16_000)
            self.turn("traced", 2 * output or 10)
            gc.collect()
            gc.freeze()  # as EngineCore does once it is up

        def another(self, tokens):
            self.added += 1
            request_id = f"cmpl-{self.added:024x}-0"
            self.add(request_id, prompt=prompt or 16, max_tokens=tokens)

        def step(self, *args):
            while output and len(self.scheduler.requests) < number:
                self.another(output)
            return super().step(*args)

        def turn(self, name, steps):
            """Run this many steps and return their times; then let the trace writer finish."""
            scheduler, writer = self.scheduler, self.writer
            scheduler.use, scheduler.schedule_us, scheduler.update_us = self.classes[name], [], []
            cpu_us, size = self.writer_cpu_us(), self.written()
            for _ in range(steps):
                self.step()
            while writer._pending:
                time.sleep(0.01)
            time.sleep(0.02)
            return {
                "schedule": scheduler.schedule_us,
                "update": scheduler.update_us,
                "writer": (self.writer_cpu_us() - cpu_us) / steps,
                "bytes": (self.written() - size) / steps,
            }

        def written(self):
            return sum(file.stat().st_size for file in self.writer.path.parent.glob("engine-*"))

        def writer_cpu_us(self):
            return time.clock_gettime_ns(time.pthread_getcpuclockid(self.writer._thread.ident)) / 1e3

    return Load()


def metrics():
    """Metrics that appear in a registry of their own, which nobody scrapes."""
    from schedtrace.model.live import Health
    from schedtrace.record.metrics.engine_meter import EngineMeter
    from schedtrace.record.metrics.measuring import EngineFacts

    facts = EngineFacts(None, 0.0, {"free": 1})
    return EngineMeter(("tiny", "0"), by_priority=False, facts=lambda: facts, health=lambda: Health("busy"))


def without_lines():
    """Make recorders that keep no lines, as for metrics alone."""
    from dataclasses import replace

    from schedtrace.record import traced

    read = traced.from_environment
    traced.from_environment = lambda: replace(read(), keeps_lines=False)


def measure(other="traced", busy=False, **load):
    """One load: the plain class and another in turns."""
    how = BUSY if busy else RESTED
    average, engine, pairs = how["average"], engine_of(**load), []
    for number in range(how["rounds"]):
        order = (0, 1) if number % 2 else (1, 0)
        turns = {place: engine.turn(other if place else "plain", how["steps"]) for place in order}
        pairs.append((turns[0], turns[1]))
    gc.unfreeze()
    engine.scheduler.shutdown()
    result = {"writer": median(second["writer"] for _, second in pairs)}
    result["bytes"] = mean(
        sum(turn["bytes"] for turn in pair) for pair in pairs
    )  # a frame may come a turn later
    for method in ("schedule", "update"):
        ratios = [average(second[method]) / average(plain[method]) for plain, second in pairs]
        result[method] = [median(average(plain[method]) for plain, _ in pairs), *quantiles(ratios)]
    return result


def serve():
    """Measure what is asked for, a line of JSON each, until there is no more."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    from loguru import logger
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    from schedtrace.record.allocation import stand_in
    from schedtrace.record.traced import traced_class

    logger.remove()
    if METRICS in os.environ:
        without_lines()
    begun = time.perf_counter()
    traced_class(Scheduler)
    stand_in(KVCacheManager)
    print(json.dumps(1e3 * (time.perf_counter() - begun)), flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SCHEDTRACE_RUN_DIR"] = f"{folder}/run"
            print(json.dumps(measure(**json.loads(line))), flush=True)


class Measured:
    """A process that measures with the recorder of one checkout."""

    def __init__(self, name, root, trace="plain"):
        self.name = name
        mode = {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore", "SCHEDTRACE_TRACE": trace}
        if name == "metrics":
            mode[METRICS] = "1"
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=os.environ
            | {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore", "SCHEDTRACE_TRACE": trace}
            | mode,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.instrumented_ms = json.loads(self.process.stdout.readline())

    def measure(self, load):
        self.process.stdin.write(json.dumps(load) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def row(load, name, result):
    """One line of the table."""
    cells, added_us = [f"{load:<40}", f"{name:<7}"], 0.0
    for method in ("schedule", "update"):
        plain_us, low, middle, high = result[method]
        added_us += plain_us * (middle - 1)
        low, middle, high = (100 * (ratio - 1) for ratio in (low, middle, high))
        cells.append(f"{plain_us:6,.0f} {middle:+6.1f} % ({low:+5.1f} .. {high:+5.1f})")
    return " | ".join([*cells, f"{added_us:+6.1f}", f"{result['writer']:6.0f}", f"{result['bytes']:8,.0f}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", metavar="COMMIT", help="measure the recorder of this commit, too")
    parser.add_argument("--only", metavar="TEXT", default="", help="only loads with this in their name")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return
    with tempfile.TemporaryDirectory() as folder:
        recorders = [Measured("plain", ROOT), Measured("zstd", ROOT, "maxsize=1G"), Measured("metrics", ROOT)]
        if given.before:
            packed = subprocess.run(
                ["git", "archive", given.before, "schedtrace"],  # noqa: S607  # whichever git there is
                cwd=ROOT, capture_output=True, check=True,
            ).stdout  # fmt: skip
            subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)  # noqa: S607  # likewise
            recorders.insert(0, Measured("before", folder))
        for recorder in recorders:
            print(f"{recorder.name}: instrumenting takes {recorder.instrumented_ms:.0f} ms, once")
        print(f"load at the start {os.getloadavg()[0]:.1f}; us a step, median and quartiles of rounds\n")
        columns = "schedule(), more | update_from_output(), more | both, added us | writer's CPU us | bytes"
        print(f"{'load':<40} |         | {columns}", flush=True)
        noise = {"number": 256, "other": "plain"}
        for name, load in {"plain against plain, 256 running": noise, **LOADS}.items():
            if given.only in name:
                for recorder in recorders:
                    print(row(name, recorder.name, recorder.measure(load)), flush=True)
        print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
