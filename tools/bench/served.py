"""A real ``vllm serve`` under bad loads, beside vLLM's client: ``python -m tools.bench.served --out DIR``.

For each load, a server of the CPU build is recorded while vLLM's own benchmark client runs (``--dataset-name
custom``, which needs pandas). Then a new server gets the first advice of ``analyze --predict`` that names a
setting and a value, and the client measures again: does the stated interval contain the measured change?

Each of the six loads has one setting that is the limit. Their model is large enough for the engine, not the
front end or the client, to do most of the work, as on a GPU. With ``--diagnoses``, six other loads show what
``analyze`` says first: the model is tiny, clients may be the limit, and during the load ``starved`` other
processes keep all processors busy. The client's figures, and those of the server's ``/metrics``, stand
beside those of ``analyze``. With ``--starts N``, the server of each load is started N times with the same
settings: how much longer do the same steps take in another start? A quarter of an hour; on a busy machine the
measured changes are worthless.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import signal
import socket
import string
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline

REPO = Path(__file__).parents[2]
VLLM = [sys.executable, str(REPO / "examples" / "vllm_cpu.py")]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
BASE = {"max_model_len": 4096, "kv_cache_memory_bytes": "64M"}
LARGE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Model whose steps take 10 to 30 ms with a few decodes, in place of the tiny one."""
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
    beginnings: int = 0
    """Texts of which every prompt is a beginning, in turn; 0: prompts have nothing in common."""
    shared: int = 0
    """Tokens at the beginning of all prompts that are the same."""
    model: str = "large"


AT_ONCE = ["--request-rate", "inf"]


def limited_loads():
    """Return six loads, each with a setting that is the limit."""
    draw = random.Random(7)  # noqa: S311  # no secret
    drawn = [(draw.randint(60, 180), draw.randint(60, 120)) for _ in range(64)]
    short_cache = {"max_model_len": 1024, "kv_cache_memory_bytes": "5M"}
    few_tokens = {"max_num_batched_tokens": 16, "max_num_seqs": 16}
    small_chunks = {"long_prefill_token_threshold": 16}
    no_sharing = {"enable_prefix_caching": False}
    return {
        "seats": Load({"max_num_seqs": 4}, ["--max-concurrency", "24"], [(30, 60)] * 120),
        "seats-arrivals": Load({"max_num_seqs": 3}, ["--request-rate", "5"], [(40, 60)] * 100),
        "kv-cache": Load(short_cache, AT_ONCE, drawn),
        "token-budget": Load(few_tokens, ["--request-rate", "2.5"], [(300, 20)] * 60),
        "threshold": Load(small_chunks, ["--max-concurrency", "3"], [(600, 60)] * 48),
        "prefix-cache": Load(no_sharing, ["--request-rate", "2"], [(540, 24)] * 40, shared=512),
    }


def diagnosed_loads():
    """Return six loads of a tiny model whose limit is known; it need not be a setting."""
    draw = random.Random(7)  # noqa: S311  # no secret
    talks = [(200 + 240 * turn, 40) for turn in range(8) for _ in range(6)]
    mixed = [(3000, 16) if n % 12 == 5 else (40, 48) for n in range(72)]
    drawn = [(draw.randint(200, 600), draw.randint(80, 160)) for _ in range(64)]
    few_tokens = {"max_num_batched_tokens": 512}
    return {
        "kv-short": Load({"kv_cache_memory_bytes": "4M"}, AT_ONCE, drawn, model="tiny"),
        "seats-short": Load({"max_num_seqs": 4}, AT_ONCE, [(60, 60)] * 80, model="tiny"),
        "long-among-short": Load(few_tokens, ["--request-rate", "16"], mixed, model="tiny"),
        "two-idle-clients": Load({}, ["--max-concurrency", "2"], [(120, 60)] * 40, model="tiny"),
        "conversations": Load({}, ["--max-concurrency", "6"], talks, beginnings=6, model="tiny"),
        "starved": Load({}, ["--request-rate", "8"], [(120, 60)] * 80, busy_processes=6, model="tiny"),
    }


def write_requests(load, path):
    """Write the rows of vLLM's ``custom`` dataset: a letter is a token of the model's tokenizer."""
    draw = random.Random(11)  # noqa: S311  # no secret
    longest = max(prompt for prompt, _ in load.lengths)
    texts = [
        "".join(draw.choices(string.ascii_lowercase, k=longest))
        for _ in range(load.beginnings or len(load.lengths))
    ]
    texts = [texts[0][: load.shared] + text[load.shared :] for text in texts]
    with path.open("w") as file:
        for number, (prompt, output) in enumerate(load.lengths):
            row = {"prompt": texts[number % len(texts)][:prompt], "output_tokens": output}
            file.write(json.dumps(row) + "\n")


def make_model(kind, parent):
    """Return the folder of a model, which is written if it is not there."""
    folder = parent / kind
    if not folder.exists():
        script = REPO / "examples" / "tiny_model.py"
        subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
        if kind == "large":
            config = folder / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | LARGE))
    return folder


def serve_and_measure(name, load, settings, out):
    """Return the client's figures with these settings of the server, and the recorded run."""
    out.mkdir(parents=True, exist_ok=True)
    model = make_model(load.model, out.parents[1] / "models")
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
            server.wait(120)
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
    """Return an option as it is typed."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, str(value)]


def wait_for(url, server):
    """Wait until the server answers; end the program if it does not."""
    until = time.monotonic() + 600
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    sys.exit("the server did not start: see server.log")


def bench(load, model, port, out):
    """Run the client on the load, and return its figures."""
    write_requests(load, out / "requests.jsonl")
    command = [*VLLM, "bench", "serve", "--model", str(model), "--port", port, "--dataset-name", "custom"]
    command += ["--dataset-path", str(out / "requests.jsonl"), "--custom-output-len", "-1"]
    command += ["--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--temperature", "0"]
    command += ["--num-prompts", str(len(load.lengths)), "--seed", "3", *load.client]
    command += ["--save-result", "--result-dir", str(out), "--result-filename", "bench.json"]
    command += ["--percentile-metrics", "ttft,tpot,e2el"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    (out / "bench.log").write_text(ended.stdout + ended.stderr)
    return json.loads((out / "bench.json").read_text())


def analyze(run, *options):
    """Return the report of a run."""
    command = [sys.executable, "-m", "schedtrace", "analyze", str(run), "--format", "json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode > 1:  # 1: there are findings
        sys.exit(ended.stderr)
    (run.parents[1] / "report.json").write_text(ended.stdout)
    return json.loads(ended.stdout)["runs"][0]


def first_advice(report):
    """Return the first advice that names a setting and a value, with the gain that is stated for it."""
    for finding in report["findings"]:
        for place, advice in enumerate(finding["advice"]):
            if advice["setting"] and advice["value"] is not None:
                return advice, finding["gain"] if place == 0 else None
    return None, None


def means(trial):
    """Return what the trial of a report has beside the server's own means, in ms."""
    return {name: (trial.get(name) or {}).get("mean") for name in ("ttft_ms", "e2e_ms", "queue_ms")}


def percent(frac):
    """Return a share as text."""
    return "?" if frac is None else f"{frac:+.0%}"


def _with_change(before, after):
    return f"{after:10.2f}  {after / before - 1:+.1%}"


def tried(name, load, out):
    """Measure a load, follow the first advice, measure again; return a row of the table."""
    measured, run = serve_and_measure(name, load, {}, out / name / "base")
    report = analyze(run, "--predict")
    row = {"load": name, "first sentence": report["verdict"][0]["text"]}
    tested = report["tested"] or {}
    misfit = (tested.get("baseline") or {}).get("misfit_frac")
    row["misfit"] = percent(misfit)
    advice, gain = first_advice(report)
    if advice is None:
        return row | {"advice": tested.get("no_advice") or report.get("untested") or "none"}
    row["advice"] = advice["message"]["text"]
    row["tested"] = advice["tested"]["text"]
    after, _ = serve_and_measure(name, load, {advice["setting"]: advice["value"]}, out / name / "advised")
    key = STATED.get(gain["metric"]) if gain else None
    if key is None:
        return row | {"stated": "no gain"}
    change = after[key] / measured[key] - 1
    low, high = gain["low_frac"], gain["high_frac"]
    row["stated"] = f"{gain['metric']} {percent(gain['change_frac'])} ({percent(low)} to {percent(high)})"
    row["measured"] = f"{percent(change)} ({measured[key]:.1f} -> {after[key]:.1f})"
    row["inside"] = low is not None and low <= change <= high
    return row


def compare_figures(name, load, out, options):
    """Print the client's figures beside the report's, and those after the first advice."""
    measured, run = serve_and_measure(name, load, {}, out / name / "base")
    report = analyze(run, *options)
    print("\n".join(f"  {sentence['text']}" for sentence in report["verdict"]))
    trial = report["trials"][0]
    for label, (key, of_trial) in FIGURES.items():
        ours = of_trial(trial)
        print(f"  {label:14} client {measured[key]:10.2f}  schedtrace {_with_change(measured[key], ours)}")
    print(f"  /metrics since its start: {of_metrics(run.parents[1] / 'metrics.txt')}")
    print(f"  schedtrace, of the trial: {means(trial)}")
    advice, gain = first_advice(report)
    if advice is None:
        print(f"  {name}: no advice that names a setting and a value")
        return
    settings = {advice["setting"]: advice["value"]}
    after, _ = serve_and_measure(name, load, settings, out / name / "advised")
    stated = "no gain stated"
    if gain:
        ends = f"{percent(gain['low_frac'])} to {percent(gain['high_frac'])}"
        stated = f"{gain['metric']} {percent(gain['change_frac'])} ({ends})"
        if key := STATED.get(gain["metric"]):
            stated += f", measured {after[key] / measured[key] - 1:+.1%}"
    print(f"  {name}: {settings}: stated {stated}")
    for label, (key, _) in FIGURES.items():
        print(f"  {label:14} {measured[key]:10.2f} -> {_with_change(measured[key], after[key])}")


def step_times(run):
    """Return the median time of each step's size (requests and tokens) that occurs often, and its number."""
    recorded = read_run(run)
    (trace,) = recorded.traces
    steps = make_timeline(trace, recorded.manifest).steps.filter(pl.col("total_requests") > 0)
    took = pl.col("busy_us").alias("us")
    sizes = steps.group_by("total_requests", "used_tokens").agg(took.median(), pl.len())
    return sizes.filter(pl.col("len") >= 20)  # for a median


def compare_starts(name, load, starts, out):
    """Print the logarithms of the ratios of the same steps' times in any two starts, and their deviation."""
    runs = [serve_and_measure(name, load, {}, out / name / f"start{n}")[1] for n in range(starts)]
    ratios = []
    for first, second in itertools.combinations([step_times(run) for run in runs], 2):
        both = first.join(second, on=["total_requests", "used_tokens"])
        weight = both["len"] + both["len_right"]
        ratios.append(float(((both["us_right"] / both["us"]).log() * weight).sum() / weight.sum()))
    deviation = math.sqrt(sum(ratio**2 for ratio in ratios) / len(ratios))
    print(f"  {name}: {' '.join(f'{ratio:+.3f}' for ratio in ratios)}; deviation {deviation:.3f}", flush=True)


def main():
    """Print a row for each load, or what was measured of each diagnosed load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="names of loads")
    parser.add_argument("--diagnoses", action="store_true", help="the six loads of a tiny model")
    parser.add_argument("--predict", action="store_true", help="with --diagnoses: advice of replays")
    parser.add_argument("--starts", type=int, help="start each server so many times instead, without changes")
    arguments = parser.parse_args()
    loads = diagnosed_loads() if arguments.diagnoses else limited_loads()
    rows = []
    for name in arguments.only or loads:
        if arguments.starts:
            compare_starts(name, loads[name], arguments.starts, arguments.out)
            continue
        if arguments.diagnoses:
            compare_figures(name, loads[name], arguments.out, ["--predict"] if arguments.predict else [])
            continue
        rows.append(tried(name, loads[name], arguments.out))
        print("\n".join(f"  {label}: {text}" for label, text in rows[-1].items()), flush=True)
    for row in rows:
        columns = (row.get(label, "-") for label in ("load", "stated", "measured", "inside", "misfit"))
        print(" | ".join(map(str, columns)))
    inside = [row["inside"] for row in rows if "inside" in row]
    if rows:
        print(f"inside: {sum(inside)} of {len(inside)} stated, of {len(rows)} loads")


if __name__ == "__main__":
    main()
