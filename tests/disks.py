"""Small disks, to fill up."""

import contextlib
import os
import shutil
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(folder, kib):
    """Mount a disk of this size for as long as it is needed; skip the test where that is not possible."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("a file system can be mounted by root only")
    folder.mkdir()
    command = [mount, "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run([umount, "--lazy", folder], check=True)
