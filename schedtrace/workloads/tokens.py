"""Made-up prompts that share exactly the blocks that the load's prompts shared."""

import hashlib

from schedtrace.workloads.workload import LoadRequest

ID_BYTES = 8
"""Of the hash of a request's id: two of 20,000 requests have the same one with a probability of 1e-11."""


def token_ids(request: LoadRequest, prefix_block: int | None, vocabulary: int = 2000) -> list[int]:
    """Token ids of a prompt with the request's length and prefix.

    A block with an identity is that number in base ``vocabulary // 2``, lowest digit first, padded with
    zeros, so two such blocks are equal exactly if their identities are. What follows the last known block is
    a hash of the request's id, written likewise with the upper half of the vocabulary: it equals no block of
    another request, known or not. Of a block with fewer tokens than its number has digits, only those count.

    Args:
        request: Its ``prefix`` may end within a block.
        prefix_block: Tokens of each block of ``prefix``; None if it is empty.
        vocabulary: Ids are below it; at least 4.

    Raises:
        ValueError: a prefix without ``prefix_block``, or more blocks than the prompt has.
    """
    base = vocabulary // 2
    if request.prefix and prefix_block is None:
        msg = f"{request.request_id}: a prefix, but no size of its blocks"
        raise ValueError(msg)
    ids: list[int] = []
    for identity in request.prefix:
        left = request.prompt_tokens - len(ids)
        if left <= 0:
            msg = f"{request.request_id}: {len(request.prefix)} blocks, {request.prompt_tokens} prompt tokens"
            raise ValueError(msg)
        ids += _digits(identity, base, min(prefix_block or left, left))
    digest = hashlib.blake2b(request.request_id.encode(errors="surrogatepass"), digest_size=ID_BYTES).digest()
    own = _digits(int.from_bytes(digest), base, request.prompt_tokens - len(ids))
    return ids + [base + digit for digit in own]


def _digits(number: int, base: int, length: int) -> list[int]:
    """So many digits of a number, the lowest first."""
    digits: list[int] = []
    while number and len(digits) < length:
        number, digit = divmod(number, base)
        digits.append(digit)
    return digits + [0] * (length - len(digits))
