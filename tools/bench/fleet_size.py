"""What reading a fleet of large traces takes: ``python tools/bench/fleet_size.py [--traces 8] [--jobs 2]``.

Each trace is a copy of one synthetic recording (``big_trace.py``, 70,000 steps of 256 requests, 100 MB) with
a process id of its own, so that no two are the same recording. Prints a JSON object for the first call, and
one for a second call that finds all summaries in the cache: megabytes, processor seconds in all and per
megabyte, wall seconds, and the peak memory of the largest process.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from schedtrace.fleet.engines import read_fleet
from schedtrace.fleet.inputs import find_fleet
from schedtrace.fleet.summary_cache import SummaryCache
from schedtrace.fleet.tenants import parse_tenant_key
from schedtrace.fleet.workers import LocalProcesses, RayTasks
from tools.bench.big_trace import write_big_trace


def write_fleet(folder: Path, traces: int, steps: int, seats: int) -> None:
    """Write the traces of as many engines, each with its own process id."""
    first = folder / "original.jsonl"
    write_big_trace(first, steps=steps, seats=seats, version=2)
    header, _, rest = first.read_bytes().partition(b"\n")
    for number in range(traces):
        engine = folder / "fleet" / f"engine-{number}" / "engine-0.jsonl"
        engine.parent.mkdir(parents=True)
        changed = json.loads(header) | {"pid": 1000 + number, "host": f"node{number}"}
        engine.write_bytes(json.dumps(changed).encode() + b"\n" + rest)
    first.unlink()


def measured(folder: Path, jobs: int, on: str, tenant: str | None) -> dict[str, object]:
    """Read the fleet once; return what it took."""
    cache = folder / "summaries"
    cache.mkdir(exist_ok=True)
    before, began = cpu_s(), time.perf_counter()
    fleet = read_fleet(
        find_fleet([str(folder / "fleet")]),
        lambda _: RayTasks(jobs) if on == "ray" else LocalProcesses(jobs),
        tenant_key=None if tenant is None else parse_tenant_key(tenant, is_hashed=False),
        cache=SummaryCache(cache),
    )
    size_mb = sum(engine.size_bytes for engine in fleet.read.engines) / 1e6
    took_s = cpu_s() - before
    return {
        "engines": len(fleet.by_name),
        "on": on,
        "jobs": jobs,
        "cached": sum(engine.cached for engine in fleet.read.engines),
        "mb": round(size_mb),
        "cpu_s": round(took_s, 1),
        "cpu_s_per_mb": round(took_s / size_mb, 3),
        "wall_s": round(time.perf_counter() - began, 1),
        "peak_mb_of_a_process": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
    }


def cpu_s() -> float:
    """Return the processor time of this process and of its ended children, not of Ray's workers."""
    usages = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Write the traces, and read them twice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=int, default=8)
    parser.add_argument("--steps", type=int, default=70_000)
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--on", choices=["local", "ray"], default="local")
    parser.add_argument("--tenant", help="property by which summaries are divided among tenants")
    options = parser.parse_args()
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="fleet-size-") as name:
        folder = Path(name)
        write_fleet(folder, options.traces, options.steps, options.seats)
        for _ in range(2):
            print(json.dumps(measured(folder, options.jobs, options.on, options.tenant)), flush=True)


if __name__ == "__main__":
    main()
