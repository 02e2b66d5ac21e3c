"""What an installed schedtrace does unasked: ``python tools/bench/dormant.py`` (CPU build, minutes).

A real ``vllm serve`` of the tiny model without the plugin, with it, and with ``SCHEDTRACE=off``:
processes, threads, sockets, files, log lines, imported modules, and the processor time and the time of the
start, as a Markdown table. Every other round goes in reverse order; times are medians. On a busy machine only
the processor time means anything.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

from schedtrace.model.live import socket_folder

ROOT = Path(__file__).parents[2]
OTHERS = "lora_filesystem_resolver,lora_hf_hub_resolver"
"""vLLM's own general plugins."""
MODES = {
    "not installed": {"VLLM_PLUGINS": OTHERS},
    "installed": {},
    "`SCHEDTRACE=off`": {"SCHEDTRACE": "off"},
}
TELLS = """
import json, os, signal, sys, threading
def tell(*_):
    names = sorted(one.name for one in threading.enumerate())
    ours = sum(one.partition(".")[0] == "schedtrace" for one in sys.modules)
    found = {"modules": len(sys.modules), "ours": ours, "threads": names}
    path = os.path.join(os.environ["TELLS"], f"{os.getpid()}.json")
    with open(path + ".new", "w") as file:
        json.dump(found, file)
    os.rename(path + ".new", path)
signal.signal(signal.SIGUSR1, tell)
"""
START_LIMIT_S = 580
TICKS = os.sysconf("SC_CLK_TCK")
SETTLES_S = 3


def children(pid):
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += children(int(child))
    return found


def processor_s(pid):
    """Processor time of a process and all below it, with that of children that have ended."""
    fields = (Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split() for one in children(pid))
    return sum(sum(map(int, field[11:15])) for field in fields) / TICKS


def serve(mode, home, port):
    """One server, started, looked at and stopped."""
    work, tells = home / "work", home / "tells"
    for folder in (work, tells):
        folder.mkdir(parents=True)
    (tells / "sitecustomize.py").write_text(TELLS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SCHEDTRACE")}
    env = kept | {"TELLS": str(tells), "PYTHONPATH": str(tells), "HF_HUB_OFFLINE": "1"} | MODES[mode]
    command = [sys.executable, ROOT / "examples" / "vllm_cpu.py", "serve", home.parent / "tiny"]
    options = "--load-format dummy --enforce-eager --kv-cache-memory-bytes 64M --max-model-len 4096"
    began = time.monotonic()
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *options.split(), "--port", str(port)],
            cwd=work, env=env, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        while not ready(port):
            if process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                raise SystemExit((home / "log").read_text()[-3000:])
            time.sleep(0.1)
        start_s, start_cpu_s = time.monotonic() - began, processor_s(process.pid)
        ask(port)
        time.sleep(SETTLES_S)
        return looked_at(process.pid, tells) | {
            "start_s": start_s,
            "start_cpu_s": start_cpu_s,
            "files": sorted(path.name for path in work.rglob("*")),
            "log": sorted(shape(line) for line in (home / "log").read_text().splitlines()),
        }
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def ready(port):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).status == 200
    return False


def ask(port):
    """A request, so that every thread that comes with the first one is there."""
    body = json.dumps({"prompt": "a b c", "max_tokens": 8}).encode()
    headers = {"Content-Type": "application/json"}
    url = f"http://localhost:{port}/v1/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120).read()


def looked_at(pid, tells):
    """Python processes below a server, their threads, sockets of ours and modules."""
    pids = [one for one in children(pid) if b"tracker" not in Path(f"/proc/{one}/cmdline").read_bytes()]
    for one in pids:
        os.kill(one, signal.SIGUSR1)
    until = time.monotonic() + 60
    while any(not (tells / f"{one}.json").exists() for one in pids) and time.monotonic() < until:
        time.sleep(0.1)
    told = [json.loads(path.read_text()) for one in pids if (path := tells / f"{one}.json").exists()]
    folder = socket_folder(os.geteuid())
    return {
        "processes": len(children(pid)),
        "threads": [len(list(Path(f"/proc/{one}/task").iterdir())) for one in pids],
        "named": [[name for name in one["threads"] if "schedtrace" in name] for one in told],
        "sockets": sum((folder / f"{one}.sock").exists() for one in pids),
        "modules": [one["modules"] for one in told],
        "ours": [one["ours"] for one in told],
    }


def shape(line):
    """A line of the log without its numbers, times and colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
    return re.sub(r"/\S+|[\d.:-]+", "#", plain)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--port", type=int, default=8477)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    options = parser.parse_args()
    found = {mode: [] for mode in options.modes}
    with tempfile.TemporaryDirectory() as home:
        subprocess.run([sys.executable, ROOT / "examples" / "tiny_model.py", f"{home}/tiny"], check=True)
        for number in range(options.rounds):
            for place, mode in enumerate(options.modes[:: (-1) ** number]):
                port = options.port + number * len(MODES) + place
                found[mode].append(serve(mode, Path(home) / f"{number}-{place}", port))
                print(mode, {**found[mode][-1], "log": len(found[mode][-1]["log"])}, flush=True)
    first = {mode: rounds[0] for mode, rounds in found.items()}
    base = set(first[options.modes[0]]["log"])
    print("|  | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for name in ("processes", "threads", "named", "sockets", "files", "modules", "ours"):
        print(f"| {name} | " + " | ".join(str(one[name]) for one in first.values()) + " |")
    print(
        "| log lines that the first lacks | "
        + " | ".join(str(sorted(set(one["log"]) - base)) for one in first.values())
    )
    for name, what in {"start_cpu_s": "start, processor s", "start_s": "start, s"}.items():
        starts = (median(one[name] for one in rounds) for rounds in found.values())
        print(f"| {what} | " + " | ".join(f"{one:.1f}" for one in starts) + " |")


if __name__ == "__main__":
    main()
