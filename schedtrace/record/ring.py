"""The last parts of a trace, in memory instead of on disk, until somebody wants them there."""

import threading
from contextlib import suppress
from pathlib import Path

from schedtrace.model import safe_files
from schedtrace.model.trace_names import part_name
from schedtrace.record.trace_files import Begins


class Ring:
    """Where parts go that are kept in memory.

    Args:
        run_dir: The folder that the run would have.
        rank: Of the engine.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path = run_dir / part_name(rank)
        self._rank = rank
        self._parts: dict[int, list[bytes]] = {0: []}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return sum(map(len, self._all().values()))

    def _all(self) -> dict[int, bytes]:
        with self._lock:
            return {number: b"".join(frames) for number, frames in self._parts.items()}

    def begin(self, number: int) -> None:
        """The next frames belong to this part."""
        with self._lock:
            self._parts[number] = []

    def append(self, frame: bytes) -> None:
        """A frame of the part that was begun last."""
        with self._lock:
            self._parts[max(self._parts)].append(frame)

    def lost(self) -> Begins | None:
        """Nobody else can reach it."""
        return None

    def remove(self, number: int) -> None:
        """A part goes."""
        with self._lock:
            self._parts.pop(number, None)

    def close(self) -> None:
        """What is kept stays, for who wants it now."""

    def write_to(self, folder: Path, end: bytes) -> Path:
        """Write all parts into a run folder; if that fails, none of them stays there.

        Args:
            folder: The run folder.
            end: A frame that comes after them.

        Returns:
            The trace.

        Raises:
            OSError: they cannot be written.
        """
        safe_files.make_folder(folder)
        written: list[Path] = []
        try:
            parts = self._all()
            for number, content in parts.items():
                path = folder / part_name(self._rank, number)
                safe_files.create_new(path, content + end if number == max(parts) else content)
                written.append(path)
        except OSError:
            for path in written:
                with suppress(OSError):
                    path.unlink()
            raise
        return folder / part_name(self._rank)
