"""Time and memory of ``analyze`` on many ranks: ``python tools/bench/many_ranks.py [RANKS [STEPS]]``.

The traces are made by hand: ranks in lock-step, each with 16 requests at a time that decode 180 tokens, one
prefill step after the other rank's. Every line but a prefill's is a delta, as the recorder writes them.
Prints one JSON object a line for runs of 1, 8, 64, ... ranks.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from schedtrace.model.delta import Delta
from schedtrace.model.trace import ScheduledRequest
from tests.makers import arrival, finish, manifest, run_folder, step

RUNNING, DECODES, PROMPT = 16, 180, 500
STEP_US, PREFILL_US = 10_000, 40_000
CODE = "import sys; from schedtrace.cli.main import main; sys.exit(main(['analyze', sys.argv[1]]))"


def trace(rank: int, ranks: int, steps: int) -> list[object]:
    """The lines of one rank; its prefill comes ``rank`` steps after the first rank's."""
    cycle, lines, clock, round_ = DECODES + ranks, [], 0, -1
    names: list[str] = []
    number = 0
    for counter in range(steps):
        at = counter % cycle
        prefills = at < ranks
        took = PREFILL_US if prefills else STEP_US
        if at == rank:
            gone = [
                finish(
                    name,
                    finished_us=clock,
                    queued_us=max(0, clock - cycle * STEP_US),
                    output_tokens=cycle - 1,
                )
                for name in names
            ]
            round_ += 1
            names = [f"{rank}-{round_}-{request}" for request in range(RUNNING)]
            lines.append(
                step(
                    number,
                    start=clock,
                    back=took - 100,
                    requests=[ScheduledRequest(name, 0, PROMPT, "new") for name in names],
                    total_requests=RUNNING,
                    running=RUNNING,
                    budget=16_000,
                    remaining_budget=16_000 - RUNNING * PROMPT,
                    prefill_tokens=RUNNING * PROMPT,
                    num_new=RUNNING,
                    arrived=[arrival(name, clock, clock, prompt_tokens=PROMPT) for name in names],
                    finished=gone,
                    wave=0,
                    step_counter=counter,
                )
            )
            number += 1
        elif names:
            told = {"output_us": clock + took - 100, "update_us": 100, "step_counter": counter}
            if at == (rank + 1) % cycle:
                told |= {
                    "remaining_budget": 16_000 - RUNNING,
                    "prefill_tokens": 0,
                    "decode_tokens": RUNNING,
                    "num_new": 0,
                    "num_continued": RUNNING,
                    "changes": {"changed": [[place, PROMPT, 1] for place in range(RUNNING)]},
                }
            line = {"type": "delta", "step": number, "start_us": clock, "schedule_us": 100, **told}
            lines.append(msgspec.convert(line, Delta))
            number += 1
        clock += took
    return lines


def measure(folder: Path) -> dict[str, float]:
    """Seconds and the largest resident memory of one ``analyze``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", CODE, str(folder)], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "peak_mb": after.ru_maxrss // 1024,
    }


def main(ranks: int, steps: int) -> None:
    """Record, then analyze more and more ranks of it."""
    with tempfile.TemporaryDirectory() as parent:
        for count in (count for count in (1, 8, 64, 512) if count <= ranks):
            folder = Path(parent) / str(count)
            size = 0
            for rank in range(count):
                path = run_folder(
                    folder,
                    *trace(rank, count, steps),
                    about=manifest(),
                    engine_rank=rank,
                    data_parallel_size=count,
                    token_budget=16_000,
                    max_num_running_reqs=256,
                )
            size = sum(file.stat().st_size for file in path.glob("engine-*.jsonl"))
            print(
                json.dumps({"ranks": count, "steps": steps, "trace_mb": size // 2**20, **measure(folder)}),
                flush=True,
            )


if __name__ == "__main__":
    main(*(int(number) for number in sys.argv[1:] or ("64", "5000")))
