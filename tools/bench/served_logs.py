"""Compare what is said of a real server's console log with what its recording says, under ten bad loads.

    python -m tools.bench.served_logs --out DIR [--only kv seats ...]

For each load a server of the CPU build with a tiny model is recorded, prints periodic lines once a second and
gets requests from threads in a closed loop; then its log and its recording are analyzed apart. Prints the
statements on the log beside the trace's first findings and its waits, whether the log names the trace's first
cause, and each statement that the trace contradicts; ends with 1 if there is one. Verdicts count, not times:
a busy machine is fine. Ten minutes.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.records import described
from schedtrace.errors import SchedtraceError
from schedtrace.model.message import plain
from schedtrace.model.records import Statement, WeakRecord
from schedtrace.model.report import RunReport
from schedtrace.read.kinds import kind_of
from schedtrace.read.run import find_runs, read_run
from tests.e2e import warm
from tests.other_records import claimed_causes, disagreements, waits_for_capacity
from tools.bench.served import BASE, ENVIRONMENT, REPO, option

IMPORT_S, START_S, END_S = 1800, 900, 120
LOAD_S = 15.0


@dataclass
class Client:
    """A thread that sends one request after the other."""

    prompt: tuple[int, int]
    """Smallest and largest number of tokens."""
    output: int
    pause_s: float = 0.0
    """Time between an answer and the next request."""
    rank: int | None = None
    """Rank that all requests are for."""


@dataclass
class Load:
    """A server, its clients, and what happens meanwhile."""

    server: dict[str, object]
    clients: list[Client]
    expected: set[str]
    """Codes of statements, one of which should be made on the log."""
    meanwhile: Callable[[int, Path], None] | None = None
    """Called with the server's port and log while the clients run."""


def loads() -> dict[str, Load]:
    """Return loads whose limit is known."""
    return {
        "kv": Load(
            {"kv_cache_memory_bytes": "4M"},
            [Client((200, 600), 120)] * 24,
            {"kv-cache-full", "kv-cache-possible", "seats-or-kv-cache", "several-limits"},
        ),
        "seats": Load({"max_num_seqs": 4}, [Client((60, 60), 60)] * 16, {"seats-taken"}),
        "long-prompts": Load(
            {"max_num_batched_tokens": 512},
            [Client((40, 40), 48)] * 6 + [Client((3000, 3000), 8)] * 6,
            {"prompts-pending", "several-limits", "decodes-slowed-by-prefills", "no-queue"},
        ),
        "starved-decodes": Load(
            {"max_num_batched_tokens": 4096},
            [Client((40, 40), 400)] * 4 + [Client((3500, 3500), 1, pause_s=3.0)],
            {"decodes-slowed-by-prefills", "no-queue"},
        ),
        "one-rank": Load(
            {"data_parallel_size": 2, "api_server_count": 1, "max_num_seqs": 6},
            [Client((60, 60), 80, rank=0)] * 12 + [Client((60, 60), 20, pause_s=1.0, rank=1)],
            {"uneven-ranks"},
        ),
        "client": Load({}, [Client((120, 120), 40, pause_s=0.5)] * 2, {"no-queue"}),
        "paused": Load({}, [Client((60, 60), 200)] * 6, {"no-tokens", "none-admitted"}, meanwhile=_pause),
        "failed-start": Load({"kv_cache_memory_bytes": "100K"}, [], {"start-failed"}),
        "failed-arguments": Load({"max_model_len": 9_999_999}, [], {"start-failed"}),
        "killed-engine": Load({}, [Client((60, 60), 200)] * 6, {"engine-failed"}, meanwhile=_kill_engine),
    }


def _pause(port: int, _: Path) -> None:
    time.sleep(4)
    _post(port, "/pause?mode=keep", {})
    time.sleep(8)
    _post(port, "/resume", {})


def _kill_engine(_: int, log: Path) -> None:
    time.sleep(4)
    for engine in set(re.findall(rb"\(EngineCore\w* pid=(\d+)\)", log.read_bytes())):
        os.kill(int(engine), signal.SIGKILL)


def _post(port: int, path: str, body: dict[str, object], headers: dict[str, str] | None = None) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"} | (headers or {}),
    )
    with urllib.request.urlopen(request, timeout=END_S) as answer:
        answer.read()


def _send(client: Client, port: int, model: Path, until: float, number: int) -> None:
    """Send requests until a time; an error ends it, as a server that has failed refuses all."""
    draw = random.Random(number)  # noqa: S311  # no secret
    headers = {} if client.rank is None else {"X-data-parallel-rank": str(client.rank)}
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            prompt = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(*client.prompt)))
            body = {"model": str(model), "prompt": prompt, "max_tokens": client.output, "ignore_eos": True}
            _post(port, "/v1/completions", body, headers)
            time.sleep(client.pause_s)


@contextlib.contextmanager
def imported_vllm(folder: Path) -> Iterator[str]:
    """Import vLLM once, in a process from which servers are forked; yield its address."""
    address = folder / "warm"
    command = [sys.executable, "-m", "tests.e2e.warm", str(address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=REPO, env=ENVIRONMENT) as process:
        until = time.monotonic() + IMPORT_S
        while not address.exists() and time.monotonic() < until and process.poll() is None:
            time.sleep(0.5)
        yield str(address)


def serve(name: str, load: Load, out: Path, address: str) -> Path:
    """Serve a load; return the folder with the server's log and its recording."""
    folder = out / name
    folder.mkdir(parents=True)
    model = out / "model"
    if not model.exists():
        subprocess.run([sys.executable, REPO / "examples" / "tiny_model.py", model], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [text for key, value in {**BASE, **load.server}.items() for text in option(key, value)]
    command = ["serve", str(model), "--load-format", "dummy", "--enforce-eager", "--port", str(port)]
    variables = {
        "SCHEDTRACE_DIR": str(folder / "logs"),
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with (folder / "server.log").open("wb") as log:
        server = warm.Process(
            address,
            str(REPO / "tests" / "e2e" / "vllm_by_fork.py"),
            [*command, "--shutdown-timeout", "20", *options],
            cwd=out,
            env=ENVIRONMENT | variables,
            files=(log, log),
        )
        try:
            if _is_up(port, server):
                _run_clients(load, port, Path(log.name), model)
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(END_S)
            server.kill()
            server.wait()
    return folder


def _is_up(port: int, server: warm.Process) -> bool:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return True
        time.sleep(0.5)
    return False


def _run_clients(load: Load, port: int, log: Path, model: Path) -> None:
    until = time.monotonic() + LOAD_S
    threads = [
        threading.Thread(target=_send, args=(client, port, model, until, number), daemon=True)
        for number, client in enumerate(load.clients)
    ]
    for thread in threads:
        thread.start()
    if load.meanwhile is not None:
        load.meanwhile(port, log)
    for thread in threads:
        thread.join(END_S)


def compared(load: Load, folder: Path) -> Iterator[str]:
    """Yield lines on a log beside its recording; a line that begins with ``wrong`` is a contradiction."""
    log = folder / "server.log"
    kind = kind_of(log)
    if kind is None or kind.record is None:
        yield f"wrong: the log is {None if kind is None else kind.name}"
        return
    records: list[WeakRecord] = described("server.log", kind.record.read(log))
    statements = [statement for record in records for statement in record.statements]
    for statement in statements:
        yield f"  log: {statement.certainty} {statement.code}: {plain(statement.text)[:160]}"
    report = _report(folder / "logs")
    codes = {statement.code for statement in statements}
    if report is None:
        yield "  trace: none"
        yield f"  as expected: {bool(codes & load.expected)}"
        return
    shares = {cause: round(share, 3) for cause, share in waits_for_capacity(report).items()}
    yield f"  trace: {[finding.code for finding in report.findings][:4]}, waits {shares}"
    yield f"  as expected: {bool(codes & load.expected)}; {_agreement(statements, report)}"
    yield from (f"wrong: {text}" for text in disagreements(statements, report))


def _report(logs: Path) -> RunReport | None:
    with contextlib.suppress(SchedtraceError):
        runs = find_runs([logs])
        return analyze_run(read_run(runs[-1])) if runs else None
    return None


def _agreement(statements: list[Statement], report: RunReport) -> str:
    """Return whether the log names the cause that the trace has the most waits for."""
    shares = waits_for_capacity(report)
    queues = [causes for statement in statements if (causes := claimed_causes(statement))]
    if not shares:
        return f"the trace has no queue, the log {'one' if queues else 'none'}"
    top = max(shares, key=shares.__getitem__)
    named = next((statement for statement in statements if top in claimed_causes(statement)), None)
    return f"the trace's first cause {top} is {'not named' if named is None else named.certainty}"


def main() -> int:
    """Serve the loads and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(loads()))
    parser.add_argument("--again", action="store_true", help="Compare the logs that are there.")
    given = parser.parse_args()
    wrong = 0
    folder = tempfile.TemporaryDirectory(prefix="served-")
    with folder, contextlib.nullcontext("") if given.again else imported_vllm(Path(folder.name)) as address:
        for name in given.only:
            load = loads()[name]
            served = given.out / name if given.again else serve(name, load, given.out, address)
            print(f"{name}:", flush=True)
            for line in compared(load, served):
                wrong += line.startswith("wrong")
                print(line, flush=True)
    print(f"{wrong} statements that the trace contradicts")
    return min(1, wrong)


if __name__ == "__main__":
    sys.exit(main())
