"""Load: requests in the order in which they reach the engine, and their made-up prompts.

Each iteration over a load reads its source again.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Literal

import msgspec

from schedtrace.model.message import Message
from schedtrace.workloads.clients import Clients, as_closed_loop

Pass = tuple[int, int]
"""Pass of ranks in lock-step: a wave of the load and a pass within the wave, both counted from 0."""


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a load, without its text."""

    request_id: str
    arrived_us: float
    """Time at which the client sends the request, in microseconds since the load began."""
    prompt_tokens: int
    output_tokens: int
    """Output tokens after which the request ends, unless it is aborted before."""
    max_tokens: int | None = None
    """Limit that the client requested; None for ``output_tokens``."""
    priority: int = 0
    data_parallel_rank: int | None = None
    """Rank that the client requests; None if vLLM's front end chooses."""
    lora: str | None = None
    prefix: tuple[int, ...] = ()
    """Identity of each leading block of the prompt, ``Workload.prefix_block`` tokens each; the last block may
    be incomplete. Two prompts share their first k blocks if their first k identities are equal."""
    front_end_us: float = 0.0
    """Time from the request's arrival until it reached the engine's input queue."""
    queued_step: int | None = None
    """Number of ``schedule()`` calls in the trial that had begun when the scheduler got the request; only for
    a recorded load."""
    queued_pass: Pass | None = None
    """First pass of ranks in lock-step whose ``schedule()`` call found the request in the queue; only for a
    recorded load."""
    abort_us: float | None = None
    """Time at which the client disconnected."""
    abort_step: int | None = None
    """Number of ``schedule()`` calls in the trial that had begun when the scheduler dropped the request; only
    for a recorded load."""
    abort_pass: Pass | None = None
    """First pass whose ``schedule()`` call no longer found the request; only for a recorded load."""
    answered_us: float | None = None
    """Time at which the request ended or its client disconnected in a recorded load; None if not recorded."""
    structured: bool = False
    """Whether the output follows a grammar."""
    after: str | None = None
    """Id of the request of the session's previous turn. This request is sent ``delay_us`` after the answer to
    that turn, but not before ``arrived_us``. None: it waits for no answer."""
    delay_us: float = 0.0
    draft_acceptance: float | None = None
    """Share of the request's draft tokens that were accepted; None if not recorded, or none were scheduled.
    """

    @property
    def reached_us(self) -> float:
        """Time at which the request reached the engine's input queue."""
        return self.arrived_us + self.front_end_us


Source = Literal[
    "mooncake",
    "bailian",
    "timed_trace",
    "azure",
    "burstgpt",
    "servegen",
    "sharegpt",
    "jsonl",
    "chat",
    "openai_batch",
    "sessions",
    "vllm_bench",
    "aiperf",
    "random",
    "recorded",
]


@dataclass(frozen=True)
class Workload:
    """Stream of requests that can be iterated repeatedly, in bounded memory.

    Requests are ordered by ``reached_us``.
    """

    name: str
    source: Source
    prefix_block: int | None
    """Number of tokens of each block in ``LoadRequest.prefix``; None if it is unknown which prompts share a
    prefix."""
    notes: list[Message]
    """Notes on facts that the source lacks, and on the assumptions made."""
    requests: int
    prompt_tokens: int
    output_tokens: int
    last_arrival_us: float
    """Time in microseconds from the first request's arrival to the last one's."""
    read: Callable[[], Iterator[LoadRequest]] = field(repr=False)
    """Function that reads the requests once."""
    began_us: int | None = None
    """Beginning of a recorded load on the trace's clock, in microseconds."""
    of_server: bool = False
    """Whether the load was recorded without trials, so that it begins and ends with the recording."""
    clients: Clients | None = None
    """Pattern in which requests follow answers; None if they arrive at their own times."""
    later_turns: int = 0
    """Number of requests that wait for the answer to the session's previous turn."""

    @property
    def replayed_clients(self) -> Clients | None:
        """Clients, if a replay sends their requests after its own answers; otherwise None."""
        return self.clients if self.clients is not None and self.clients.is_replayed else None

    @property
    def all_notes(self) -> list[Message]:
        """All notes, including how clients are replayed."""
        return [*self.notes, *([self.clients.note] if self.clients else [])]

    def with_clients(self, clients: int) -> "Workload":
        """Return the load of ``clients`` clients with one request open each, whatever the recorded times."""
        arrived, answered = zip(*((request.arrived_us, request.answered_us) for request in self), strict=True)
        return replace(self, clients=as_closed_loop(arrived, answered, clients))

    def with_concurrency(self, clients: int) -> "Workload":
        """Return a closed loop with another number of clients and the same think times."""
        if self.clients is None:
            return self
        think_us = tuple(islice(cycle(self.clients.think_us), max(0, self.requests - clients)))
        return replace(self, clients=replace(self.clients, clients=clients, think_us=think_us))

    def __iter__(self) -> Iterator[LoadRequest]:
        """Yield the requests, reading the source once more."""
        return self.read()

    def __len__(self) -> int:
        return self.requests


def make_workload(
    name: str,
    source: Source,
    read: Callable[[], Iterator[LoadRequest]],
    *,
    prefix_block: int | None = None,
    notes: Iterable[Message] = (),
    began_us: int | None = None,
    of_server: bool = False,
    clients: Clients | None = None,
) -> Workload:
    """Return a workload with the totals of one pass over ``read()``; ``notes`` are taken after the pass."""
    requests = prompt_tokens = output_tokens = later_turns = 0
    last_arrival_us = 0.0
    for request in read():
        requests += 1
        later_turns += request.after is not None
        prompt_tokens += request.prompt_tokens
        output_tokens += request.output_tokens
        last_arrival_us = max(last_arrival_us, request.arrived_us)
    return Workload(
        name=name,
        source=source,
        prefix_block=prefix_block,
        notes=list(notes),
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        last_arrival_us=last_arrival_us,
        read=read,
        began_us=began_us,
        of_server=of_server,
        clients=clients,
        later_turns=later_turns,
    )


ID_BYTES = 8
"""Number of bytes of the hash of a request's id; two of 20,000 requests share a hash with a probability of
1e-11."""


def token_ids(request: LoadRequest, prefix_block: int | None, vocabulary: int = 2000) -> list[int]:
    """Return the token ids of a prompt with the request's length and prefix.

    A block with an identity contains that number in base ``vocabulary // 2``, lowest digit first, padded with
    zeros, so two such blocks are equal exactly if their identities are. The rest of the prompt contains a
    hash of the request's id, written in the same way with the upper half of the vocabulary, so it equals no
    block of another request. If a block has fewer tokens than its number has digits, the remaining digits are
    left out.

    Args:
        request: Request, whose ``prefix`` may end within a block.
        prefix_block: Tokens of each block of ``prefix``; None if the prefix is empty.
        vocabulary: Exclusive upper bound of the ids; at least 4.

    Raises:
        ValueError: If ``prefix_block`` is missing, or the prefix has more blocks than the prompt.
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
    """Return the ``length`` lowest digits of a number in a base, the least significant one first."""
    digits: list[int] = []
    while number and len(digits) < length:
        number, digit = divmod(number, base)
        digits.append(digit)
    return digits + [0] * (length - len(digits))
