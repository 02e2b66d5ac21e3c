"""Where engines listen: a folder of this user alone, with a socket for each process, named after it."""

import os
import stat
from pathlib import Path

FOLDER = Path("/tmp")  # noqa: S108  # below it a folder that only its owner may enter is made, and checked
"""Fixed: a server and the shell that asks it may have other values of ``TMPDIR`` and ``XDG_RUNTIME_DIR``."""


def folder_of(user: int) -> Path:
    """The folder of a user's sockets, whether it is there or not."""
    return FOLDER / f"schedtrace-{user}"


def is_private(folder: Path, user: int) -> bool:
    """Whether it is a folder, that user's, and nobody else may enter it."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == user and not about.st_mode & 0o077


def socket_of(pid: int, user: int) -> Path:
    """The socket of a process."""
    return folder_of(user) / f"{pid}.sock"


def own_folder() -> Path:
    """This user's, made if it is not there.

    Raises:
        OSError: it cannot be made, or somebody else's stands in its place.
    """
    user = os.geteuid()
    folder = folder_of(user)
    folder.mkdir(0o700, exist_ok=True)
    if not is_private(folder, user):
        raise PermissionError(1, "not a folder of this user alone", str(folder))
    return folder
