"""Processor time of an engine's process with metrics alone and with spans of 1 % and of all requests.

vLLM's scheduler works off requests that come and go, so that a number of them runs; each case takes turns of
the same steps in one process, and all its threads count: the scheduler, the writer, the export. The collector
is another process. ``python tools/bench/span_overhead.py [RUNNING ...]``
"""

import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

CASES = {"metrics": "on", "spans 1 %": "spans=1%", "spans 100 %": "spans=all"}
ROUNDS, STEPS, OUTPUT = 12, 300, 100


def collector(endpoint):
    from tests.otlp_receiver import receiver

    with receiver() as (_, address):
        endpoint.send(address)
        endpoint.recv()


class Case:
    """An engine with its recorder, and requests that come as others end."""

    def __init__(self, running, asked):
        from schedtrace.model.live import Health
        from schedtrace.record.disguise import RECORDERS
        from schedtrace.record.metrics.engine_meter import EngineMeter
        from schedtrace.record.metrics.measuring import EngineFacts
        from schedtrace.record.otel.export import choice
        from schedtrace.record.traced import traced_class
        from schedtrace.simulate import Driver

        os.environ["SCHEDTRACE_RUN_DIR"] = tempfile.mkdtemp() + "/run"
        self.engine = Driver(traced_class, max_num_seqs=running, num_gpu_blocks_override=running * 40)
        self.running, self.number, self.chance = running, 0, random.Random(1)  # noqa: S311  # a load, no secret
        self.meter = EngineMeter(
            ("m", "0"),
            by_priority=False,
            facts=lambda: EngineFacts(None, None, {}),
            health=lambda: Health("busy"),
        )
        self.meter.send_otlp(choice(asked))
        RECORDERS.look_up(self.engine.scheduler).writer.measuring.meter = self.meter
        self.turn(STEPS)

    def turn(self, steps):
        """Make steps; return the processor time of all threads for each."""
        began = time.process_time()
        for _ in range(steps):
            while len(self.engine.scheduler.requests) < self.running * 5 // 4:
                self.number += 1
                trace = f"00-{self.chance.getrandbits(128):032x}-00f067aa0ba902b7-01"
                output = self.chance.randint(OUTPUT // 2, OUTPUT * 3 // 2)
                self.engine.add(f"r{self.number}", 64, output, trace_headers={"traceparent": trace})
            self.engine.step()
        time.sleep(1.3)  # for the writer and the export, which sleep in between
        return (time.process_time() - began) / steps


def main():
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=collector, args=(theirs,), daemon=True)
    process.start()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = ours.recv()
    for running in map(int, sys.argv[1:] or ("16", "64", "256")):
        cases = {name: Case(running, asked) for name, asked in CASES.items()}
        times = {name: [] for name in cases}
        for number in range(ROUNDS):
            order = list(cases)[number % 3 :] + list(cases)[: number % 3]
            for name in order:
                times[name].append(cases[name].turn(STEPS))
        base = times["metrics"]
        for name, took in times.items():
            ratios = sorted(mine / its - 1 for mine, its in zip(took, base, strict=True))
            low, middle, high = statistics.quantiles(ratios, n=4) if name != "metrics" else (0, 0, 0)
            lost = cases[name].meter._series.values
            lost = sum(value for (family, _), value in lost.items() if family.name == "lost_request_spans")
            print(
                f"{running} running, {name}: {statistics.median(took) * 1e6:.0f} us a step, "
                f"{middle:+.1%} ({low:+.1%} to {high:+.1%}), {cases[name].number} requests, {lost:.0f} lost",
                flush=True,
            )
        for case in cases.values():
            case.meter.close()
            case.engine.finish()
    ours.send("end")


if __name__ == "__main__":
    main()
