"""Ids in the form that a trace contains (cut or hashed), and keyed hashes of prompts' blocks."""

import hashlib
import os
from base64 import b64encode
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from schedtrace.model.printable import capped, hashed

MOST_KEPT = 100_000
"""Maximum number of ids that are cached; beyond it, departures must have been missed."""


class WrittenIds(dict[Any, str]):
    """Cache of the ids as the trace contains them: ``written[request_id]`` applies ``model.printable``.

    Entries may be dropped at any time, because they can be recomputed from the ids.

    Args:
        hash_ids: Whether ids are written as hashes.
    """

    def __init__(self, *, hash_ids: bool) -> None:
        super().__init__()
        self.hash_ids = hash_ids
        self._write = hashed if hash_ids else capped

    def __missing__(self, request_id: Any) -> str:
        if len(self) >= MOST_KEPT:
            self.clear()
        written = self[request_id] = self._write(request_id)
        return written

    def replace_ids(self, *rows: Iterable[Any]) -> None:
        """Replace the ids in rows that have an id."""
        for row in chain(*rows):
            if row.request_id is not None:
                row.request_id = self[row.request_id]

    def written_ids(self, request_ids: Iterable[Any]) -> list[str]:
        """Return the written form of ids."""
        return [self[request_id] for request_id in request_ids]

    def drop_id(self, request_id: Any) -> None:
        """Drop the entry of a request that has left."""
        self.pop(request_id, None)


class Salt:
    """Maker of keyed hashes, which show only which values in a trace are equal.

    The key is random and never written, so nobody can hash a guess and compare.
    """

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def hashed_id(self, request_id: str) -> str:
        """Return an id as 8 hex digits."""
        return hashlib.blake2b(
            request_id.encode(errors="surrogatepass"), digest_size=4, key=self._key
        ).hexdigest()

    def hashed_blocks(self, hashes: Sequence[bytes]) -> str:
        """Return a text with 4 characters for each block's hash."""
        key = self._key
        digests = (hashlib.blake2b(block_hash, digest_size=3, key=key).digest() for block_hash in hashes)
        return b64encode(b"".join(digests)).decode()
