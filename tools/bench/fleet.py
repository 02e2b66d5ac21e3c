"""Fleets with known faults: ``python tools/bench/fleet.py [--engines 200] [--seeds 1 2 3] [--jobs 1]``.

For each seed, engines are recorded in virtual time on vLLM's real scheduler (``tests/simulated_fleet.py``):
5 slow hosts, 3 engines with a small KV cache, one that the router sends too much, two whose client stalls,
one that is paused; then ``schedtrace fleet``'s library call compares them. Prints a JSON object a line: the
faults that were found with their cause, those that were missed, healthy engines that were accused, and
processor seconds.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from schedtrace.fleet.engines import read_fleet
from schedtrace.fleet.inputs import find_fleet
from schedtrace.fleet.reduce import fleet_report
from schedtrace.fleet.workers import HereOnly, LocalProcesses
from tests.simulated_fleet import KINDS, faults_by_name, plan, record_fleet

FAULTS = {"slow_hosts": 5, "kv": 3, "hot": 1, "client": 2, "paused": 1}


def judged(folder: Path, engines: int, seed: int, jobs: int) -> dict[str, object]:
    """Record and compare a fleet; return what was found."""
    planned = plan(engines, **FAULTS)
    began = cpu_s()
    record_fleet(folder, planned, seed=seed)
    recorded_s = cpu_s() - began
    fleet = read_fleet(find_fleet([str(folder)]), lambda _: LocalProcesses(jobs) if jobs > 1 else HereOnly())
    report = fleet_report(fleet)
    found = {each.engine: each.kind for each in report.differences}
    wanted = {name: KINDS[fault] for name, fault in faults_by_name(planned).items()}
    return {
        "seed": seed,
        "engines": len(report.engines),
        "faults": len(wanted),
        "found": sum(found.get(name) == kind for name, kind in wanted.items()),
        "missed": {name: [kind, found.get(name)] for name, kind in wanted.items() if found.get(name) != kind},
        "accused": {name: kind for name, kind in found.items() if name not in wanted},
        "hosts": sorted(host.host for host in report.hosts if host.is_slow),
        "record_cpu_s": round(recorded_s, 1),
        "read_cpu_s": round(cpu_s() - began - recorded_s, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def cpu_s() -> float:
    """Return the processor time of this process and of those that it ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Judge each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to keep the traces (default: nowhere)")
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    from loguru import logger
    from vllm.model_executor.models import registry

    logger.disable("schedtrace")
    registry._run_in_subprocess = lambda look: look()  # at a model's class: that would import vLLM again
    for seed in options.seeds:
        folder = Path(options.folder or tempfile.mkdtemp(prefix="fleet-")) / f"seed-{seed}"
        try:
            print(json.dumps(judged(folder, options.engines, seed, options.jobs)), flush=True)
        finally:
            if options.folder is None:
                shutil.rmtree(folder.parent)


if __name__ == "__main__":
    sys.exit(main())
