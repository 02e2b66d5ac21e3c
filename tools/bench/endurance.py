"""A recording that never ends: ``python tools/bench/endurance.py`` (no GPU; ten million steps, an hour).

vLLM's real scheduler works an endless load off, recorded into parts with a budget, or kept in memory
(``--keep``). Ten times it says how much memory the process has and what lies on disk; at the end how far the
trace's clock is from the wall clock, and how long two analyses of the whole and of the last minute take.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOOKS = 10


def rss_mib(pid="self"):
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def on_disk(folder):
    """MiB and files of a folder's traces."""
    sizes = [file.stat().st_size for file in folder.glob("**/engine-*")]
    return sum(sizes) / 2**20, len(sizes)


def said(done, steps, rss, folder, began):
    mib, parts = on_disk(folder)
    rate = done / (time.monotonic() - began)
    print(
        f"{done:>12,} of {steps:,} steps ({rate:,.0f}/s)  {rss:7.1f} MiB resident  "
        f"{mib:7.2f} MiB in {parts} parts",
        flush=True,
    )


def play(steps, running):
    """So many steps with random requests: gives the folder, and what the recorder wrote in all."""
    from schedtrace.record.traced import traced_class
    from schedtrace.simulate import Driver

    chance, added = random.Random(0), 0  # noqa: S311  # a load
    engine = Driver(traced_class, num_blocks=40 * running, max_num_seqs=running, max_model_len=4096)
    recorder = engine.scheduler._schedtrace_recorder
    writer = recorder.writer
    folder, began = recorder.writer.path.parent, time.monotonic()
    for done in range(1, steps + 1):
        while len(engine.scheduler.requests) < running + 8:
            added += 1
            engine.add(
                f"cmpl-{added:024x}-0", prompt=chance.randint(10, 400), max_tokens=chance.randint(20, 400)
            )
        engine.requests.clear()  # a driver keeps those that have ended, too
        engine.step()
        if done % 200 == 0:  # a driver does not wait for a device, and the writer has a disk
            while len(writer._pending) > 1000:
                time.sleep(0.001)
        if done % (steps // LOOKS) == 0:
            said(done, steps, rss_mib(), folder, began)
    now_us, wall_us = writer.clock.now_us(), time.time_ns() // 1000
    off_us = now_us + writer.clock.wall_us - wall_us
    engine.scheduler.shutdown()
    took = time.monotonic() - began
    print(f"after {took:,.0f} s the trace's clock is {off_us:+,} us from the wall clock")
    return folder


def analyzed(folder):
    """How long it takes, the first and the second time."""
    for words in ([], ["--last", "60s"]):
        for which in ("first", "second"):
            command = [sys.executable, "-m", "schedtrace", "analyze", str(folder), *words]
            began = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            took = time.monotonic() - began
            print(
                f"analyze {' '.join(words) or '(whole)':<12} {which:>6}: {took:6.1f} s, "
                f"exit code {done.returncode}"
            )
            if done.returncode > 1:
                print(done.stderr[-500:])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--trace", default="maxsize=64M")
    parser.add_argument("--keep", help="in memory: 120s")
    parser.add_argument("--folder", type=Path, help="where to, and let it stay")
    given = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    with tempfile.TemporaryDirectory() as home:
        os.environ["SCHEDTRACE_RUN_DIR"] = str((given.folder or Path(home)) / "run")
        os.environ["SCHEDTRACE_KEEP" if given.keep else "SCHEDTRACE_TRACE"] = given.keep or given.trace
        folder = play(given.steps, given.running)
        if not given.keep:
            analyzed(folder)


if __name__ == "__main__":
    main()
