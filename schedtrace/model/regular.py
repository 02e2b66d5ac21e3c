"""Files that are read: regular ones, since a pipe in the place of one would block whoever opens it."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def opened(path: Path) -> BinaryIO:
    """A regular file, open for reading.

    Raises:
        OSError: it cannot be read, or is none.
    """
    return os.fdopen(descriptor(path), "rb")


def descriptor(path: Path) -> int:
    """The same, as a file descriptor."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = stat.S_IFMT(os.fstat(file).st_mode)
    if kind == stat.S_IFREG:
        return file
    os.close(file)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))
