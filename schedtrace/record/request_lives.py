"""Histories of requests that the writer keeps: arrival, times of tokens, and lost tokens."""

from collections import deque
from collections.abc import Container, Iterator, Sequence

from schedtrace.model.trace import Arrival, Finish, Present, PresentState
from schedtrace.record.capture import ALL, Result


class _Tokens:
    """Time of the latest token, in one object for all requests that got it in the same step."""

    __slots__ = ("steps", "us")

    def __init__(self, us: int) -> None:
        self.us, self.steps = us, 1


_ASKED = [name for name in Arrival.__struct_fields__ if name in Present.__struct_fields__]


class RequestLife:
    """History of one request."""

    __slots__ = (
        "accepted", "arrival", "cached", "computed_tokens", "drafts", "first_token_us", "has_run", "invalid",
        "last_tokens", "lost_tokens", "num_preemptions", "prompt_tokens", "scheduled_us",
        "tokens_before", "unseen",
    )  # fmt: skip

    def __init__(self, arrival: Arrival | Present | None) -> None:
        self.arrival = arrival
        """Arrival; None if it was not recorded."""
        self.prompt_tokens = 0 if arrival is None else arrival.prompt_tokens
        self.has_run = False
        """Whether a step has scheduled the request."""
        self.scheduled_us: int | None = None
        self.first_token_us: int | None = None
        self.last_tokens: _Tokens | None = None
        self.tokens_before = 0
        """Number of generated tokens, without those counted by ``last_tokens``."""
        self.computed_tokens = 0
        """Number of computed tokens, kept while no step contains the request."""
        self.cached = 0
        self.lost_tokens = 0
        self.num_preemptions: int | None = 0
        self.unseen = False
        """Whether the request may have got tokens in steps that were dropped."""
        self.drafts = self.accepted = self.invalid = 0

    @property
    def output_tokens(self) -> int:
        """Number of tokens generated so far, except in dropped steps."""
        return self.tokens_before + (0 if self.last_tokens is None else self.last_tokens.steps)


class RequestLives:
    """Histories of all requests that have arrived and not left, including those that were already present.

    Args:
        drafts: Whether a request may have speculative tokens.
        invalid: Whether this vLLM reports which speculative tokens the grammar forbade (0.14 and newer).
    """

    def __init__(self, *, drafts: bool = False, invalid: bool = False) -> None:
        self._drafts, self._invalid = drafts, invalid
        self.by_id: dict[str, RequestLife] = {}
        self.waiting: dict[str, int] = {}
        """Number of tokens that each request in the queue wants."""
        self.waiting_tokens = 0
        """Sum of the numbers in ``waiting``."""
        self._rejected: deque[tuple[int, str, int]] = deque()
        """Refused draft tokens that no step shows yet: the time at which the scheduler learned of them, the
        request, and their number."""
        self._got: Sequence[str] = ()
        self._tokens = _Tokens(0)

    def life_by_id(self, request_id: str) -> RequestLife:
        """Return the history of a request, creating it if needed."""
        life = self.by_id.get(request_id)
        if life is None:
            life = self.by_id[request_id] = RequestLife(None)
        return life

    def note_arrival(self, arrival: Arrival) -> None:
        """Record that a request arrived; a later part of a streaming session changes nothing."""
        if arrival.streaming_update and arrival.request_id in self.by_id:
            return
        self.by_id[arrival.request_id] = RequestLife(arrival)
        self.note_waiting(arrival.request_id, arrival.prompt_tokens)

    def was_there(self, entry: Present, *, wanted_tokens: int, in_flight: bool) -> None:
        """Record that a request was present before the first step.

        Args:
            entry: Entry of the request in the trace.
            wanted_tokens: Number of tokens that the request wants, if it waits.
            in_flight: Whether the request may get tokens from a step that is not recorded.
        """
        life = self.by_id[entry.request_id] = RequestLife(entry)
        life.has_run = entry.state != "waiting"
        life.lost_tokens, life.scheduled_us = entry.lost_tokens, entry.scheduled_us
        life.first_token_us, life.num_preemptions = entry.first_token_us, entry.num_preemptions
        life.tokens_before, life.computed_tokens = entry.output_tokens, entry.computed_tokens
        life.unseen = in_flight or entry.output_tokens > 0
        if entry.state != "running":
            self.note_waiting(entry.request_id, wanted_tokens)

    def note_finish(self, finish: Finish) -> None:
        """Record that a request is finished; fill ``finish`` with the times of its history."""
        self.note_running(finish.request_id)
        life = self.by_id.pop(finish.request_id, None)
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

    def lose_sight(self) -> None:
        """Record that steps were dropped, in which requests that had run may have got tokens."""
        self._got = ()
        for life in self.by_id.values():
            if life.has_run:
                life.tokens_before = life.output_tokens
                life.unseen, life.last_tokens = True, None

    def keep_tokens(self, left: Sequence[tuple[str, int]], scheduled: Container[str], start_ns: int) -> None:
        """Store the computed tokens of requests that are no longer in a step but were not preempted.

        Args:
            left: These requests, with the computed tokens that they have if all draft tokens were accepted.
            scheduled: The requests of this step.
            start_ns: Start of the step, which takes all earlier refusals of draft tokens into account.
        """
        for request_id, tokens in left:
            if (life := self.by_id.get(request_id)) is not None and request_id not in self.waiting:
                life.computed_tokens = tokens
        while self._rejected and self._rejected[0][0] <= start_ns:
            _, request_id, tokens = self._rejected.popleft()
            if (life := self.by_id.get(request_id)) is not None and request_id not in scheduled:
                life.computed_tokens = max(0, life.computed_tokens - tokens)

    def present_requests(self, scheduled: Sequence[tuple[str, int]]) -> Iterator[tuple[str, Present]]:
        """Yield the requests present: running ones, preempted ones, and waiting ones in order of arrival.

        Requests whose arrival was not recorded are left out, because the tokens that they want are unknown.

        Args:
            scheduled: Requests of the latest step, with the tokens that are computed after it.
        """
        computed = dict(scheduled)
        for _, request_id, tokens in self._rejected:
            if request_id in computed:
                computed[request_id] -= tokens
        running = [name for name in (*computed, *self.by_id) if name not in self.waiting]
        preempted = [
            name for name in reversed(self.waiting) if name in self.by_id and self.by_id[name].has_run
        ]
        for request_id in dict.fromkeys((*running, *preempted, *self.by_id)):
            life = self.by_id.get(request_id)
            if life is None or life.arrival is None:
                continue
            waits = request_id in self.waiting
            state: PresentState = "running" if not waits else "preempted" if life.has_run else "waiting"
            entry = Present(**{name: getattr(life.arrival, name) for name in _ASKED}, state=state)
            entry.scheduled_us, entry.first_token_us = life.scheduled_us, life.first_token_us
            entry.computed_tokens = (
                life.computed_tokens if waits else computed.get(request_id, life.computed_tokens)
            )
            entry.output_tokens, entry.lost_tokens = life.output_tokens, life.lost_tokens
            entry.num_preemptions = life.num_preemptions
            yield request_id, entry

    def note_waiting(self, request_id: str, tokens: int) -> None:
        """Record that a request is in the queue and wants this many tokens."""
        self.waiting_tokens += tokens - self.waiting.get(request_id, 0)
        self.waiting[request_id] = tokens

    def note_running(self, request_id: str) -> None:
        """Record that a request is no longer in the queue."""
        self.waiting_tokens -= self.waiting.pop(request_id, 0)

    def got_drafts(self, result: Result, drafts: dict[str, int]) -> None:
        """Record the results of a step's draft tokens.

        Args:
            result: Output of the step.
            drafts: Number of draft tokens by request.
        """
        tokens: dict[str, int] = {}
        if not isinstance(result.got, str):
            got, lengths = result.got
            tokens = dict(zip(got, [1] * len(got) if lengths is None else lengths, strict=True))
        for request_id, number in drafts.items():
            life = self.by_id.get(request_id)
            if life is not None:
                life.drafts += number
                accepted = max(0, tokens.get(request_id, 1) - 1)
                life.accepted += accepted
                if number > accepted:
                    self._rejected.append((result.done_ns, request_id, number - accepted))
                life.invalid += (result.invalid or {}).get(request_id, 0)

    def got_tokens(self, result: Result, ids: Sequence[str], back_us: int) -> int:
        """Record when requests got tokens; return the number of all these tokens.

        Args:
            result: Output of a step.
            ids: Requests of that step; the same list object for consecutive steady steps.
            back_us: Time at which the output came back, in microseconds.
        """
        if result.got is ALL and ids is self._got:
            self._tokens.us = back_us
            self._tokens.steps += 1
            return len(ids)
        got, lengths = (ids, None) if isinstance(result.got, str) else result.got
        self._got, self._tokens = got, _Tokens(back_us)
        for place, request_id in enumerate(got):
            life = self.by_id.get(request_id)
            number = 1 if lengths is None else lengths[place]
            if life is None or not number:
                continue
            life.tokens_before = life.output_tokens + number - 1
            life.last_tokens = self._tokens
            if life.first_token_us is None and not life.unseen:
                life.first_token_us = back_us
        return len(got) if lengths is None else sum(lengths)
