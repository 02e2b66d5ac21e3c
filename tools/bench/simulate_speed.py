"""How fast a simulation runs: virtual seconds a second, and all its time over that of vLLM's own two calls.

``python tools/bench/simulate_speed.py``: Llama-3.1-8B on an H100 (roofline), steady decode of 16, 64 and 256
requests of 500 tokens, prefix caching off; plain, and recorded as ``simulate`` does. One process, in turn.
"""

import os
import tempfile
import time
from pathlib import Path

from schedtrace.record.traced import traced_class
from schedtrace.simulate import Simulation, VirtualClock
from schedtrace.step_times.roofline import Roofline, gpu
from schedtrace.step_times.shapes import shape

RUNNING = (16, 64, 256)
OUTPUT_TOKENS = 300
ROUNDS = 3


def measure(running: int, *, recorded: bool, folder: Path) -> tuple[float, float]:
    """Virtual seconds a wall second, and all wall time over that of vLLM's two calls."""
    os.environ["SCHEDTRACE_RUN_DIR"] = str(folder)
    spent = 0.0
    with VirtualClock() as clock:
        engine = Simulation(
            clock,
            traced_class if recorded else None,
            times=Roofline(shape("Llama-3.1-8B"), gpu("h100")),
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            max_model_len=2048,
            num_blocks=28_744,
            async_scheduling=True,
        )

        def timed(name: str) -> None:
            call = getattr(engine.scheduler, name)

            def takes(*args: object) -> object:
                nonlocal spent
                began = time.perf_counter()
                try:
                    return call(*args)
                finally:
                    spent += time.perf_counter() - began

            setattr(engine.scheduler, name, takes)

        for name in ("schedule", "update_from_output"):
            timed(name)
        for number in range(running):
            engine.arrive(0, f"r{number}", 500, OUTPUT_TOKENS)
        began = time.perf_counter()
        engine.run()
        wall = time.perf_counter() - began
        virtual = clock.now_us / 1e6
        engine.close()
    return virtual / wall, wall / spent


def main() -> None:
    """Print the table."""
    print("running  recorded  virtual s a second  all over both calls")
    with tempfile.TemporaryDirectory() as folder:
        for running in RUNNING:
            for recorded in (False, True):
                best = [
                    measure(running, recorded=recorded, folder=Path(folder) / f"{running}-{recorded}-{n}")
                    for n in range(ROUNDS)
                ]
                speed, ratio = max(one[0] for one in best), min(one[1] for one in best)
                print(f"{running:7}  {'yes' if recorded else 'no':8}  {speed:18.1f}  {ratio:19.2f}")


if __name__ == "__main__":
    main()
