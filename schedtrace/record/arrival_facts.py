"""Facts about a request, and the hashes of its prompt, taken when it reaches the scheduler."""

import hashlib
import os
import re
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from schedtrace.model.trace_facts import MARKED_BLOCKS, marks_within

_CHILD = re.compile(r"(\d{1,5})_(.+)", re.DOTALL)


class Salt:
    """Keyed hashes that show which values in a trace are equal, and nothing else.

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
        """Return 4 characters for each hash of a block."""
        key = self._key
        digests = (hashlib.blake2b(block_hash, digest_size=3, key=key).digest() for block_hash in hashes)
        return b64encode(b"".join(digests)).decode()


def requested(request: Any) -> dict[str, Any]:
    """Return the fields of an ``Arrival`` that must be read on the scheduler's thread."""
    facts: dict[str, Any] = {"client_index": getattr(request, "client_index", None)}
    if getattr(request, "structured_output_request", None) is not None:
        facts["structured"] = True
    facts |= _remote_side(getattr(request, "kv_transfer_params", None))
    params = request.sampling_params
    if params is None:
        return facts
    facts["logprobs"] = params.logprobs
    facts["prompt_logprobs"] = params.prompt_logprobs
    facts["min_tokens"] = params.min_tokens
    if params.logit_bias:
        facts["logit_bias"] = len(params.logit_bias)
    return facts


def _remote_side(params: Any) -> dict[str, Any]:
    """Return the fields of an ``Arrival`` about the other engine of a request in disaggregated prefill.

    A connector changes its parameters later: they are read before the request reaches it.
    """
    if not isinstance(params, dict):
        return {}
    facts: dict[str, Any] = {}
    for side in ("prefill", "decode"):
        if params.get(f"do_remote_{side}") is True:
            facts["remote"] = side
    for name in ("remote_request_id", "transfer_id"):
        if isinstance(remote_id := params.get(name), str) and remote_id:
            facts[name] = remote_id
    return facts


class Prefixes:
    """Common beginnings of prompts: blocks are stored on the scheduler's thread and hashed on the writer's.

    Args:
        block_size: Tokens of a block if vLLM computes no hashes; None to record none.
        wanted: Whether any beginnings are recorded.
    """

    def __init__(self, block_size: int | None = None, *, wanted: bool = True) -> None:
        self._wanted = wanted
        self._salt = Salt()
        self._block_size = block_size
        self._blocks: dict[str, list[Any] | _Prompt] = {}

    def keep_prompt(self, request: Any) -> None:
        """Keep vLLM's hashes of the prompt's marked blocks; its output has no hashes yet.

        If vLLM computes none, because nothing needs them, the prompt itself is kept until it is hashed.
        """
        hashes = getattr(request, "block_hashes", None) if self._wanted else None
        if hashes:
            marked = MARKED_BLOCKS[: marks_within(len(hashes))]
            self._blocks[request.request_id] = [hashes[block - 1] for block in marked]
        elif hashes is not None and (prompt := _prompt(request, self._block_size)) is not None:
            self._blocks[request.request_id] = prompt

    def drop_prompt(self, request_id: str) -> None:
        """Drop a prompt whose hashes will not be needed."""
        self._blocks.pop(request_id, None)

    def hashes(self, request_id: str) -> str | None:
        """Return ``Arrival.prefix_hashes``, once; None if the prompt's tokens are not numbers."""
        blocks = self._blocks.pop(request_id, None)
        if blocks is None:
            return None
        if not isinstance(blocks, _Prompt):
            return self._salt.hashed_blocks([_as_bytes(block_hash) for block_hash in blocks])
        try:
            return self._salt.hashed_blocks(list(blocks.block_hashes()))
        except (TypeError, OverflowError):
            return None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt whose blocks vLLM does not hash."""

    token_ids: Sequence[int]
    tokens: int
    """Number of tokens of the prompt itself; the list may grow later."""
    block_size: int
    told_apart_by: str
    """Key on which vLLM's hashes depend besides tokens."""

    def block_hashes(self) -> Iterator[bytes]:
        """Yield a hash for every marked block, which covers it and all blocks before it."""
        before, begin = self.told_apart_by.encode(errors="surrogatepass"), 0
        for block in MARKED_BLOCKS[: marks_within(self.tokens // self.block_size)]:
            end = block * self.block_size
            tokens = array("q", self.token_ids[begin:end]).tobytes()
            before, begin = hashlib.blake2b(before + tokens, digest_size=16).digest(), end
            yield before


def _prompt(request: Any, block_size: int | None) -> _Prompt | None:
    """Return the stored part of a prompt; None if it fills no block, or contains anything but tokens."""
    token_ids = getattr(request, "prompt_token_ids", None)
    only_tokens = (
        not getattr(request, "mm_features", None) and getattr(request, "prompt_embeds", None) is None
    )
    if not token_ids or not block_size or len(token_ids) < block_size or not only_tokens:
        return None
    lora = getattr(request, "lora_request", None)
    told_apart_by = f"{getattr(lora, 'lora_name', None)} {getattr(request, 'cache_salt', None)}"
    return _Prompt(token_ids, len(token_ids), block_size, told_apart_by)


def _as_bytes(block_hash: Any) -> bytes:
    """Return the hash as bytes; before vLLM 0.11 it is a tuple that begins with a number."""
    if isinstance(block_hash, bytes):
        return block_hash
    return repr(getattr(block_hash, "hash_value", block_hash)).encode()


def sibling(request_id: str, salt: Salt) -> tuple[int, str] | None:
    """Return the number and the hashed parent of a child of a request with ``n`` > 1, from its id."""
    match = _CHILD.fullmatch(str(request_id))
    return (int(match[1]), salt.hashed_id(match[2])) if match else None
