"""``examples/vllm_cpu.py`` whose engine and worker are forks: each spares the seven seconds of an import.

They have a lower priority, so an engine that is always busy does not keep the tests' commands waiting.
"""

import os
import runpy
from pathlib import Path

VLLM_CPU = Path(__file__).parents[2] / "examples" / "vllm_cpu.py"


def fork() -> None:
    """In place of vLLM's function that makes spawned processes of its CPU platform's."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


if __name__ == "__main__":
    from vllm.utils import system_utils

    system_utils._maybe_force_spawn = fork
    os.nice(5)
    runpy.run_path(str(VLLM_CPU), run_name="__main__")
