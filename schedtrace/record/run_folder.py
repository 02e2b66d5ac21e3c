"""The run folder as the recorder finds or makes it."""

import os
import sys
import time
from pathlib import Path

from schedtrace.model import private
from schedtrace.model.manifest import FILE_NAME, Manifest, write_manifest
from schedtrace.model.redact import vllm_environment, without_secrets
from schedtrace.model.trace import Header


def create(run_dir: Path, name: str) -> tuple[Path, int]:
    """A new file that nobody else has; a second engine of the same process gets a folder of its own."""
    folder, again = run_dir, 1
    while True:
        private.make_folder(folder)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            return folder / name, os.open(folder / name, flags, private.FILE_MODE)
        except FileExistsError:
            again += 1
            folder = run_dir.with_name(f"{run_dir.name}-{again}")


def write_manifest_if_missing(folder: Path, header: Header) -> None:
    """``schedtrace run`` writes a richer manifest before; an attached server gets this one."""
    if (folder / FILE_NAME).exists():
        return
    manifest = Manifest(
        schedtrace_version=header.schedtrace_version,
        status="attached",
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=without_secrets(sys.argv),
        host=header.host,
        cpu_count=os.cpu_count(),
        python_version=header.python_version,
        vllm_version=header.vllm_version,
        torch_version=header.torch_version,
        device=header.device,
        environment=vllm_environment(),
        config_resolved={"scheduler_config": header.scheduler_config},
    )
    write_manifest(folder, manifest)
