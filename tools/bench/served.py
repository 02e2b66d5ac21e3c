"""A real ``vllm serve`` under bad loads, beside vLLM's client: ``python -m tools.bench.served --out DIR``.

For each load a server of the CPU build with a tiny model is recorded while vLLM's own benchmark client runs
(``--dataset-name custom``, which needs pandas): its figures, and those of the server's ``/metrics``, stand
beside those of ``analyze``. Then the first advice that names a setting and a value is given to a new server,
and what it stated stands beside what the client measures. During the load ``starved`` other processes keep
all processors busy. A quarter of an hour; on a busy machine the second comparison is worthless.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import string
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).parents[2]
VLLM = [sys.executable, str(REPO / "examples" / "vllm_cpu.py")]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
BASE = {"max_model_len": 4096, "kv_cache_memory_bytes": "64M"}
FIGURES = {
    "output tok/s": ("output_throughput", lambda trial: trial["output_tokens_per_s"]),
    "TTFT p50 ms": ("median_ttft_ms", lambda trial: trial["ttft_ms"]["p50"]),
    "TPOT p50 ms": ("median_tpot_ms", lambda trial: trial["tpot_ms"]["p50"]),
    "E2E p50 ms": ("median_e2el_ms", lambda trial: trial["e2e_ms"]["p50"]),
}
"""The client's key, and how the report's trial has it."""
METRICS = {
    "TTFT mean ms": "vllm:time_to_first_token_seconds",
    "E2E mean ms": "vllm:e2e_request_latency_seconds",
    "queue mean ms": "vllm:request_queue_time_seconds",
}
STATED = {
    "output_tokens_per_s": "output_throughput",
    "ttft_p50_ms": "median_ttft_ms",
    "tpot_p50_ms": "median_tpot_ms",
    "e2e_mean_ms": "mean_e2el_ms",
}


@dataclass
class Load:
    """Options of the server and of the client, and the lengths of the requests."""

    server: dict
    client: list[str]
    lengths: list[tuple[int, int]]
    busy_processes: int = 0
    """Processes that compute on the server's processors while the client runs."""
    histories: int = 0
    """Conversations whose prompts are all that was said before; 0: prompts have nothing in common."""
    options: dict = field(default_factory=dict)


def loads():
    """Return six loads whose limit is known."""
    draw = random.Random(7)  # noqa: S311  # no secret
    talks = [(200 + 240 * turn, 40) for turn in range(8) for _ in range(6)]
    mixed = [(3000, 16) if n % 12 == 5 else (40, 48) for n in range(72)]
    return {
        "kv-short": Load(
            {"kv_cache_memory_bytes": "4M"},
            ["--request-rate", "inf"],
            [(draw.randint(200, 600), draw.randint(80, 160)) for _ in range(64)],
        ),
        "seats-short": Load({"max_num_seqs": 4}, ["--request-rate", "inf"], [(60, 60)] * 80),
        "long-among-short": Load({"max_num_batched_tokens": 512}, ["--request-rate", "16"], mixed),
        "two-idle-clients": Load({}, ["--max-concurrency", "2"], [(120, 60)] * 40),
        "conversations": Load({}, ["--max-concurrency", "6"], talks, histories=6),
        "starved": Load({}, ["--request-rate", "8"], [(120, 60)] * 80, busy_processes=6),
    }


def write_requests(load, path):
    """The rows of vLLM's ``custom`` dataset: a letter is a token of the tiny model's tokenizer."""
    draw = random.Random(11)  # noqa: S311  # no secret
    longest = max(prompt for prompt, _ in load.lengths)
    texts = [
        "".join(draw.choices(string.ascii_lowercase, k=longest))
        for _ in range(load.histories or len(load.lengths))
    ]
    with path.open("w") as file:
        for number, (prompt, output) in enumerate(load.lengths):
            row = {"prompt": texts[number % len(texts)][:prompt], "output_tokens": output}
            file.write(json.dumps(row) + "\n")


def serve_and_measure(name, load, settings, out):
    """The client's figures with these settings of the server, and the recorded run."""
    out.mkdir(parents=True, exist_ok=True)
    model = out.parent / "model"
    if not model.exists():
        subprocess.run(
            [sys.executable, REPO / "examples" / "tiny_model.py", model], check=True, capture_output=True
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = [
        text for key, value in {**BASE, **load.server, **settings}.items() for text in option(key, value)
    ]
    command = [*VLLM, "serve", str(model), "--load-format", "dummy", "--enforce-eager", "--port", port]
    with (out / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--shutdown-timeout", "20", *options],
            env={**ENVIRONMENT, "SCHEDTRACE_DIR": str(out / "logs")},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server)
            with busy(load.busy_processes):
                measured = bench(load, model, port, out)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                (out / "metrics.txt").write_bytes(answer.read())
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    (run,) = (out / "logs").iterdir()
    print(f"{name}: {run}", flush=True)
    return measured, run


@contextlib.contextmanager
def busy(count):
    """Keep processors busy with this many processes; they end by themselves after ten minutes."""
    code = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def of_metrics(path):
    """Return the server's own means since its start, warm-up included, in ms; preemptions; requests."""
    sums = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#") and (name := line.partition("{")[0]).startswith("vllm:"):
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    figures = {"requests": sums.get("vllm:e2e_request_latency_seconds_count")}
    for label, name in METRICS.items():
        if count := sums.get(f"{name}_count"):
            figures[label] = 1e3 * sums[f"{name}_sum"] / count
    return figures | {"preemptions": sums.get("vllm:num_preemptions_total")}


def option(name, value):
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, str(value)]


def wait_for(url, server):
    until = time.monotonic() + 180
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    sys.exit("the server did not start: see server.log")


def bench(load, model, port, out):
    """Ten requests to warm up, a pause, then the load."""
    write_requests(load, out / "requests.jsonl")
    command = [*VLLM, "bench", "serve", "--model", str(model), "--port", port, "--dataset-name", "custom"]
    command += [
        "--dataset-path",
        str(out / "requests.jsonl"),
        "--custom-output-len",
        "-1",
        "--skip-chat-template",
    ]
    command += [
        "--disable-shuffle",
        "--ignore-eos",
        "--temperature",
        "0",
        "--num-prompts",
        str(len(load.lengths)),
    ]
    command += ["--save-result", "--result-dir", str(out), "--result-filename", "bench.json"]
    command += ["--percentile-metrics", "ttft,tpot,e2el", "--seed", "3", *load.client]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    (out / "bench.log").write_text(ended.stdout + ended.stderr)
    return json.loads((out / "bench.json").read_text())


def analyze(run, *options):
    """The report as JSON, and the page."""
    command = [sys.executable, "-m", "schedtrace", "analyze", str(run)]
    told = subprocess.run(
        [*command, "--format", "json", *options], capture_output=True, text=True, check=True
    )
    page = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"}
    )
    return json.loads(told.stdout)["runs"][0], page.stdout


def first_advice(report):
    """The first that names a setting and a value, with the gain that is stated for it."""
    for finding in report["findings"]:
        for place, advice in enumerate(finding["advice"]):
            if advice["setting"] and advice["value"] is not None:
                return advice, finding["gain"] if place == 0 else None
    return None, None


def means(trial):
    """Return what the trial of a report has beside the server's own means, in ms."""
    return {name: (trial.get(name) or {}).get("mean") for name in ("ttft_ms", "e2e_ms", "queue_ms")}


def _with_change(before, after):
    return f"{after:10.2f}  {after / before - 1:+.1%}"


def main():
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(loads()))
    parser.add_argument("--predict", action="store_true")
    given = parser.parse_args()
    options = ["--predict"] if given.predict else []
    for name in given.only:
        load = loads()[name]
        measured, run = serve_and_measure(name, load, {}, given.out / name / "base")
        report, page = analyze(run, *options)
        print(page)
        trial = report["trials"][0]
        for label, (key, of_trial) in FIGURES.items():
            ours = of_trial(trial)
            print(
                f"  {label:14} client {measured[key]:10.2f}  schedtrace {_with_change(measured[key], ours)}"
            )
        print(f"  /metrics since its start: {of_metrics(run.parents[1] / 'metrics.txt')}")
        print(f"  schedtrace, of the trial: {means(trial)}")
        advice, gain = first_advice(report)
        if advice is None:
            print(f"  {name}: no advice that names a setting and a value")
            continue
        settings = {advice["setting"]: advice["value"]}
        after, _ = serve_and_measure(name, load, settings, given.out / name / "advised")
        stated = "no gain stated"
        if gain:
            low, high = (
                f"{gain[end]:+.1%}" if gain[end] is not None else "?" for end in ("low_frac", "high_frac")
            )
            stated = f"{gain['metric']} {gain['change_frac']:+.1%} ({low} to {high})"
            key = STATED.get(gain["metric"])
            if key:
                stated += f", measured {after[key] / measured[key] - 1:+.1%}"
        print(f"  {name}: {settings}: stated {stated}")
        for label, (key, _) in FIGURES.items():
            print(f"  {label:14} {measured[key]:10.2f} -> {_with_change(measured[key], after[key])}")


if __name__ == "__main__":
    main()
