"""What the writer remembers of each request while it lives: its arrival, its tokens' times, what it lost."""

from collections.abc import Sequence

from schedtrace.model.trace import Arrival, Finish
from schedtrace.record.capture import ALL, Result


class _Tokens:
    """One time for all requests that got their latest token in the same steps: shared, so set once a step."""

    __slots__ = ("us",)

    def __init__(self, us: int) -> None:
        self.us = us


class Life:
    """One request."""

    __slots__ = (
        "accepted", "arrival", "cached", "drafts", "first_token_us", "invalid", "last_tokens", "lost_tokens",
        "prompt_tokens", "scheduled_us", "unseen",
    )  # fmt: skip

    def __init__(self, arrival: Arrival | None) -> None:
        self.arrival = arrival
        self.prompt_tokens = 0 if arrival is None else arrival.prompt_tokens
        self.scheduled_us: int | None = None
        self.first_token_us: int | None = None
        self.last_tokens: _Tokens | None = None
        self.cached = 0
        self.lost_tokens = 0
        self.unseen = False
        """It may have got tokens in steps that were dropped."""
        self.drafts = self.accepted = self.invalid = 0


class Lives:
    """All requests that have come and not gone; those never seen to arrive have a life, too.

    Args:
        drafts: Whether a request may have speculative tokens.
        invalid: Whether this vLLM says which of them the grammar forbade (0.14 and newer).
    """

    def __init__(self, *, drafts: bool = False, invalid: bool = False) -> None:
        self._drafts, self._invalid = drafts, invalid
        self._lives: dict[str, Life] = {}
        self._waiting: dict[str, int] = {}
        self._waiting_tokens = 0
        self._got: Sequence[str] = ()
        self._tokens = _Tokens(0)

    def get(self, request_id: str) -> Life:
        """The life of a request."""
        life = self._lives.get(request_id)
        if life is None:
            life = self._lives[request_id] = Life(None)
        return life

    def find(self, request_id: str) -> Life | None:
        """The life of a request, if it has one."""
        return self._lives.get(request_id)

    def arrives(self, arrival: Arrival) -> None:
        """A request came; another part of a streaming session changes nothing."""
        if arrival.streaming_update and arrival.request_id in self._lives:
            return
        self._lives[arrival.request_id] = Life(arrival)
        self.waits(arrival.request_id, arrival.prompt_tokens)

    def leaves(self, finish: Finish) -> None:
        """A request is done; ``finish`` gets the times of its life."""
        self.runs(finish.request_id)
        life = self._lives.pop(finish.request_id, None)
        if life is None:
            return
        if life.arrival is not None:
            finish.arrived_us = life.arrival.arrived_us
            finish.queued_us = life.arrival.queued_us
        finish.scheduled_us = life.scheduled_us
        finish.first_token_us = life.first_token_us
        finish.last_token_us = None if life.last_tokens is None else life.last_tokens.us
        finish.cached_tokens = life.cached
        if self._drafts and not life.unseen:
            finish.drafts, finish.drafts_accepted = life.drafts, life.accepted
            finish.drafts_invalid = life.invalid if self._invalid else None

    def unseen(self) -> None:
        """Steps were dropped: what those who had begun to run got in them is not known."""
        self._got = ()
        for life in self._lives.values():
            if life.scheduled_us is not None:
                life.unseen, life.last_tokens = True, None

    def arrivals(self) -> list[Arrival]:
        """Of those who are here, as far as they were seen to arrive."""
        return [life.arrival for life in self._lives.values() if life.arrival is not None]

    def waits(self, request_id: str, tokens: int) -> None:
        """A request is in the queue and wants so many tokens."""
        self._waiting_tokens += tokens - self._waiting.get(request_id, 0)
        self._waiting[request_id] = tokens

    def runs(self, request_id: str) -> None:
        """It is in the queue no longer."""
        self._waiting_tokens -= self._waiting.pop(request_id, 0)

    def waiting_tokens(self, waiting: int) -> int | None:
        """Tokens that the waiting requests want; None if vLLM's number of them is another one."""
        return self._waiting_tokens if len(self._waiting) == waiting else None

    def got_drafts(self, result: Result, drafts: dict[str, int]) -> None:
        """Note what became of the speculative tokens of a step.

        Args:
            result: What came back for it.
            drafts: Requests that had some, and how many.
        """
        tokens: dict[str, int] = {}
        if not isinstance(result.got, str):
            got, lengths = result.got
            tokens = dict(zip(got, [1] * len(got) if lengths is None else lengths, strict=True))
        for request_id, number in drafts.items():
            life = self._lives.get(request_id)
            if life is not None:
                life.drafts += number
                life.accepted += max(0, tokens.get(request_id, 1) - 1)
                life.invalid += (result.invalid or {}).get(request_id, 0)

    def got_tokens(self, result: Result, ids: Sequence[str], back_us: int) -> int:
        """Note when requests got tokens; returns how many in all.

        Args:
            result: What came back for a step.
            ids: The requests of that step; the same list object for steady steps in a row.
            back_us: When it came.
        """
        if result.got is ALL and ids is self._got:
            self._tokens.us = back_us
            return len(ids)
        got, lengths = (ids, None) if isinstance(result.got, str) else result.got
        self._got, self._tokens = got, _Tokens(back_us)
        for place, request_id in enumerate(got):
            life = self._lives.get(request_id)
            if life is None or (lengths is not None and not lengths[place]):
                continue
            life.last_tokens = self._tokens
            if life.first_token_us is None and not life.unseen:
                life.first_token_us = back_us
        return len(got) if lengths is None else sum(lengths)
