"""Safe opening of files, for reading untrusted ones and for writing private ones.

Only regular files are read, because a pipe in the place of a file would block its reader. Only the owner may
read a written file, whatever the umask, because traces name clients' requests. No function follows a symbolic
link in the place of the file, because a run folder may come from somebody else. Functions raise OSError if
they cannot open or create a file.
"""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import IO, BinaryIO

from schedtrace.errors import InputError


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading."""
    return os.fdopen(descriptor(path), "rb")


def descriptor(path: Path) -> int:
    """Open a regular file for reading; return its descriptor."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = stat.S_IFMT(os.fstat(file).st_mode)
    if kind == stat.S_IFREG:
        return file
    os.close(file)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


FILE_MODE = 0o600
FOLDER_MODE = 0o700


def writable(path: Path) -> IO[bytes]:
    """Open a new private file for writing; replace an existing file or link."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb")


def create(path: Path) -> None:
    """Create an empty private file for a library that opens it by name; replace an existing file."""
    writable(path).close()


def create_new(path: Path, content: bytes) -> None:
    """Create a private file with this content if no file exists; if writing fails, leave no file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def appendable(path: Path) -> int:
    """Open a private file for appending, and create it if needed; return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, FILE_MODE)


def replace(path: Path, content: bytes) -> None:
    """Write a private file so that a reader sees the old or the new content, never a part of it.

    Raises:
        OSError: If the file cannot be written, or is a device or a pipe: replacing ``/dev/null`` would break
            the machine.
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
    """Create a private folder, and its parents with the usual mode; leave an existing folder as it is."""
    path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)


def own_cache_folder(name: str) -> Path:
    """Return a folder of this name in the user's cache; create it if needed.

    Raises:
        OSError: If the folder cannot be created, or if others own it or may enter it, so that they may have
            written its files.
    """
    make_folder(user_cache())
    folder = user_cache() / name
    make_folder(folder)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise OSError(errno.EPERM, "not a folder of this user alone", str(folder))
    return folder


def expanded(path: str | Path) -> Path:
    """Return a path in which ``~`` or ``~user`` is replaced with the user's home.

    Raises:
        InputError: If there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        msg = f"{path}: no such user, or one without a home"
        raise InputError(msg) from error


def user_cache() -> Path:
    """Return the folder for files that can be made again, in ``$XDG_CACHE_HOME`` or else ``~/.cache``.

    Raises:
        OSError: If the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "schedtrace"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from error
