"""How a trace is read, for those who ask for it."""

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes that there are."""


@dataclass(frozen=True)
class ReadOptions:
    """Settings that change how long reading takes, never what is read."""

    cache: bool = True
    """Whether a large trace's Parquet files may be kept in the user's cache, and used again."""
    progress: Progress | None = None
    memory_bytes: int = 32 * 2**20
    """Larger traces go by way of Parquet files; parsed, a trace needs up to ten times as much memory."""
    chunk_bytes: int = 8 * 2**20
    """So much of a trace is parsed at once."""


READ = ReadOptions()
"""The usual way."""
