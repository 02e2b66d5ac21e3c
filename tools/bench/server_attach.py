"""Attachments to a real server under load, many times: ``python tools/bench/server_attach.py``.

A tiny model on vLLM's CPU engine gets the same load twice: once without, and once with ``--cycles``
attachments. The script reports which requests failed, how long the engine was held up, and what remains in
its process: memory, threads, open files. With ``--minutes``, it records the server into parts instead.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
VLLM_CPU = [sys.executable, str(EXAMPLES / "vllm_cpu.py")]
OPTIONS = [
    "--load-format",
    "dummy",
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    "64M",
    "--max-model-len",
    "2048",
]
START_S = 300
HELD = re.compile(r"held up for ([\d.]+) ms")


def schedtrace(*words):
    """One command's output; it has to succeed."""
    command = [sys.executable, "-m", "schedtrace", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"schedtrace {' '.join(map(str, words))}: {done.stderr}")
    return done.stdout


@contextlib.contextmanager
def server(home, port, **environment):
    """A server that is up; gives the process id of its engine."""
    command = [*VLLM_CPU, "serve", "model", *OPTIONS, "--port", str(port)]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=home, stdout=log, stderr=log, env=os.environ | environment)
        try:
            until = time.monotonic() + START_S
            while not _is_up(port):
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit((home / "server.log").read_text()[-3000:])
                time.sleep(1)
            yield int(re.search(r"pid (\d+)\)", schedtrace("engines", process.pid))[1])
        finally:
            process.terminate()
            process.wait(60)


def _is_up(port):
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    except OSError:
        return False


def load(home, port, name, requests, *options):
    """vLLM's own benchmark, while it runs."""
    command = [*VLLM_CPU, "bench", "serve", "--model", "model", "--port", str(port), *options]
    command += ["--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "60"]
    command += ["--num-prompts", str(requests), "--save-result", "--result-filename", f"{name}.json"]
    with (home / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=home, stdout=log, stderr=log)


def result(home, name):
    """What the benchmark has measured."""
    return json.loads((home / f"{name}.json").read_text())


def left(pid):
    """Memory in MiB, threads and open files of a process."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return mib, len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))


def say(what, pid):
    mib, threads, files = left(pid)
    print(f"{what:<34} {mib:7.1f} MiB, {threads} threads, {files} files", flush=True)


def cycles(home, port, given):
    with server(home, port) as pid:
        for name, count in (("alone", 0), ("attached", given.cycles)):
            bench = load(home, port, name, given.requests, "--request-rate", str(given.rate))
            while not re.search(r", [1-9]\d* running", schedtrace("engines", pid)):
                time.sleep(0.5)
            say(f"{name}, before", pid)
            held = {"attach": [], "detach": []}
            for number in range(1, count + 1):
                time.sleep(1)
                held["attach"].append(float(HELD.search(schedtrace("attach", pid, "-o", home / "logs"))[1]))
                time.sleep(1)
                held["detach"].append(float(HELD.search(schedtrace("detach", pid))[1]))
                say(f"cycle {number}: held up {held['attach'][-1]} and {held['detach'][-1]} ms", pid)
            if count:
                print(f"held up: attach at most {max(held['attach'])}, detach {max(held['detach'])} ms")
            bench.wait()
            found = result(home, name)
            speed, tpot = found["output_throughput"], found["median_tpot_ms"]
            done = f"{found['completed']} of {given.requests} requests"
            print(f"{name}: {done}, {speed:.0f} tok/s, TPOT p50 {tpot:.2f} ms", flush=True)


def recorded(home, port, given):
    environment = {"SCHEDTRACE_DIR": str(home / "logs"), "SCHEDTRACE_TRACE": given.trace}
    with server(home, port, **environment) as pid:
        began, number, bench = time.monotonic(), 0, None
        for minute in range(1, given.minutes + 1):
            while time.monotonic() < began + 60 * minute:
                if bench is None or bench.poll() is not None:
                    number += 1
                    bench = load(home, port, f"load{number}", 3000, "--max-concurrency", "32")
                time.sleep(0.5)
            parts = list(home.glob("logs/*/engine-*"))
            mib = sum(part.stat().st_size for part in parts) / 2**20
            say(f"{minute} min: {mib:.2f} MiB in {len(parts)} parts", pid)
        bench.terminate()
        bench.wait()
    [run] = home.glob("logs/*/")
    for words in ([], [], ["--last", "60s"], ["--last", "60s"]):
        began = time.monotonic()
        said = schedtrace("analyze", run, *words)
        print(f"analyze {' '.join(words) or '(whole)'}: {time.monotonic() - began:.1f} s")
    print(said)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--minutes", type=int, help="record all the time for so long")
    parser.add_argument("--trace", default="maxsize=16M")
    given = parser.parse_args()
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS="1"
    )
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        made = [sys.executable, EXAMPLES / "tiny_model.py", home / "model"]
        subprocess.run(made, check=True, capture_output=True)
        (recorded if given.minutes else cycles)(home, given.port, given)


if __name__ == "__main__":
    main()
