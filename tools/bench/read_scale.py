"""What reading a large trace takes: ``python tools/bench/read_scale.py`` (no vLLM, minutes).

The same load in both versions of the format, each way in a process of its own, in turns: ``schedtrace
analyze`` and reading alone without and with the cache; of format 1 also tokens per request counted by Polars,
DuckDB and pandas (the last two where they are installed).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

from schedtrace.model.safe_files import user_cache
from schedtrace.read.cache import FOLDER
from tools.bench.big_trace import write_big_trace

ROOT = Path(__file__).parents[2]
ANALYZE = "import sys; from schedtrace.cli.main import main; sys.exit(main(['analyze', sys.argv[1]]))"
READ = "import sys; from pathlib import Path; from schedtrace.read.trace import read_trace; "
READ += "read_trace(Path(sys.argv[1]))"
POLARS = """
import sys, polars as pl
requests = pl.List(pl.Struct({"request_id": pl.String, "scheduled_tokens": pl.Int64}))
lines = pl.scan_ndjson(sys.argv[1], schema={"type": pl.String, "requests": requests})
rows = lines.filter(pl.col("type") == "step").select("requests").explode("requests").unnest("requests")
print(rows.group_by("request_id").agg(pl.col("scheduled_tokens").sum()).collect().height)
"""
DUCKDB = """
import sys, duckdb
duckdb.sql("SET threads TO 2")
columns = "{type: 'VARCHAR', requests: 'STRUCT(request_id VARCHAR, scheduled_tokens BIGINT)[]'}"
lines = f"read_json('{sys.argv[1]}', format='newline_delimited', columns={columns})"
rows = f"SELECT unnest(requests) AS one FROM {lines} WHERE type = 'step'"
told = duckdb.sql(f"SELECT one.request_id, sum(one.scheduled_tokens) FROM ({rows}) GROUP BY ALL")
print(len(told.fetchall()))
"""
PANDAS = """
import sys, pandas as pd
total = {}
for lines in pd.read_json(sys.argv[1], lines=True, chunksize=1000):
    rows = pd.DataFrame(lines["requests"].dropna().explode().tolist())
    if len(rows):
        for name, tokens in rows.groupby("request_id")["scheduled_tokens"].sum().items():
            total[name] = total.get(name, 0) + tokens
print(len(total))
"""
OURS = {
    "analyze, the first time": ANALYZE,
    "analyze, the second time": ANALYZE,
    "read_trace, the first time": READ,
    "read_trace, the second time": READ,
}
FIRST = " the first time"
OTHERS = {
    "Polars: scan_ndjson, explode, group_by": POLARS,
    "DuckDB: read_json, unnest, group by": DUCKDB,
    "pandas: read_json in chunks, explode, groupby": PANDAS,
}
NEEDS = {DUCKDB: "duckdb", PANDAS: "pandas"}


def main() -> None:
    """Measure every way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "schedtrace-scale"))
    given = parser.parse_args()
    os.environ["XDG_CACHE_HOME"] = str(given.folder / "cache")
    ways: dict[str, tuple[str, Path]] = {}
    for version in (1, 2):
        folder = given.folder / f"{given.steps}x{given.seats}-format-{version}"
        path = _trace(folder, given.steps, given.seats, version)
        size = path.stat().st_size / 1e6
        print(f"{path}: {size:,.0f} MB; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)  # noqa: S607  # into the page cache
        named = OURS | (OTHERS if version == 1 else {})
        ways |= {f"format {version}: {name}": (code, path) for name, code in named.items()}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, (code, path) in ways.items():
            if name.endswith(FIRST):
                shutil.rmtree(user_cache() / FOLDER, ignore_errors=True)
            if (told := _measure(code, path)) is not None:
                found[name].append(told)
    print(f"{'median of ' + str(given.rounds):<46} {'wall s':>8} {'CPU s':>8} {'peak MB':>8}")
    for name, rounds in found.items():
        if not rounds:
            print(f"{name:<46} not installed, or failed")
            continue
        wall, cpu, peak = (median(values) for values in zip(*rounds, strict=True))
        print(f"{name:<46} {wall:8.1f} {cpu:8.1f} {peak:8,.0f}")
    print(f"load now {os.getloadavg()[0]:.1f}")


def _trace(folder: Path, steps: int, seats: int, version: int) -> Path:
    path = folder / "engine-0.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_big_trace(folder / "new", steps, seats, version).replace(path)
        time.sleep(3)  # a file changed just now is hashed as a whole
    return path


def _measure(code: str, path: Path) -> tuple[float, float, float] | None:
    """Wall and CPU seconds, and peak memory in MB; None where it cannot run."""
    module = NEEDS.get(code)
    if module and subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode:  # noqa: PLW1510  # its code is the answer
        return None
    began = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - began
    return None if child.returncode else (wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3)


if __name__ == "__main__":
    main()
