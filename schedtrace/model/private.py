"""Files and folders that only their owner may read, whatever the umask: traces name clients' requests."""

import errno
import os
import tempfile
from pathlib import Path
from typing import IO

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def writable(path: Path) -> IO[bytes]:
    """A private file, emptied, open for writing.

    Raises:
        OSError: it cannot be made.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "wb")


def create(path: Path) -> None:
    """An empty private file, for a library that opens it by its name; replaces one that is there.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))


def replace(path: Path, content: bytes) -> None:
    """Write a private file so that a reader sees the old or the new one, never a part.

    Raises:
        OSError: it cannot be written, or it is a device or a pipe: a file in the place of ``/dev/null`` would
            break the machine.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    file, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Make a private folder, and its parents as usual; one that is there stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
