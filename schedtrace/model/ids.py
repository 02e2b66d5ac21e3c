"""How request ids and other names that clients choose are written: short ones as they are, long ones cut.

A client may choose an id of a megabyte. Written in every line that mentions it, it would fill the disk.
"""

import hashlib
from typing import Any

from schedtrace.model.printable import encodable

LONGEST = 256
"""Characters. vLLM's own ids have about 50; those that carry the addresses of a KV transfer, 125."""
PREFIX = 64
"""Characters that are kept of a longer one."""
MARK = "...blake2b-"


def capped(name: Any) -> str:
    """A name as it is written: at most ``LONGEST`` characters, equal only for equal names.

    Longer names, and those that look as if they had been cut here or hold a lone surrogate, are written as
    their beginning, ``MARK`` and 32 hex digits of the BLAKE2b hash of the whole. What is no string is
    written as its ``repr``.
    """
    text = name if isinstance(name, str) else repr(name)
    if len(text) <= LONGEST and MARK not in text and (text.isascii() or encodable(text) == text):
        return text
    return f"{encodable(text[:PREFIX])}{MARK}{_digest(text, 16)}"


def hashed(request_id: Any) -> str:
    """A request id as 12 hex digits of its BLAKE2b hash: equal ids stay equal, and unreadable."""
    return _digest(request_id if isinstance(request_id, str) else repr(request_id), 6)


def kept_prefix(written: str) -> str | None:
    """The beginning of a name that was cut; None if it was not."""
    prefix, mark, _ = written.rpartition(MARK)
    return prefix if mark else None


def shortened(message: str, most: int = 500) -> str:
    """A message that may quote such names, cut where it is too long."""
    return message if len(message) <= most else f"{message[:most]}... ({len(message):,} characters)"


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()
