"""Makes the trace in parts in this folder anew: vLLM's own scheduler and KV cache manager, without a model.

``python tests/data/parts/make.py``: 150 requests come at random while KV blocks are short, so there are
waits, preemptions and ends in every part. ``tests/fuzz/parts.py`` breaks it.
"""

import os
import shutil
from pathlib import Path
from random import Random

# vLLM reads them when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
HERE = Path(__file__).parent
RUN = HERE / "run"
os.environ.update(SCHEDTRACE_RUN_DIR=str(RUN), SCHEDTRACE_TRACE="maxsize=1T")

import sys  # noqa: E402  # see the line above

sys.path.insert(0, str(HERE.parents[2]))

from schedtrace.model import trace_bounds  # noqa: E402  # likewise
from schedtrace.record import trace_files  # noqa: E402  # likewise
from tests.data.findings.make import Device  # noqa: E402  # likewise

REQUESTS = 150
trace_bounds.PART_BYTES = 7_000
trace_files.FRAME_S = 0.15


def main() -> None:
    shutil.rmtree(RUN, ignore_errors=True)
    random = Random(1)  # noqa: S311  # repeatable
    device = Device(num_blocks=60, max_model_len=320, max_num_seqs=16)
    comes = sorted(random.uniform(0, 700) for _ in range(REQUESTS))
    number = came = 0
    while came < REQUESTS or device.scheduler.has_requests():
        while came < REQUESTS and comes[came] <= number:
            device.add(f"r{came}", random.choice([20, 60, 150]), random.choice([2, 20, 60]))
            came += 1
        device.step()
        number += 1
    device.finish()


if __name__ == "__main__":
    main()
