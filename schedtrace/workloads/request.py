"""One request of a load."""

import msgspec

Pass = tuple[int, int]
"""Of ranks in lock-step: a wave of the load, and a pass in it, both from 0."""


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load, without its text. Times are microseconds since the load began."""

    request_id: str
    arrived_us: float
    """The client sent it."""
    prompt_tokens: int
    output_tokens: int
    """It ends after so many, unless it is aborted before."""
    max_tokens: int | None = None
    """Limit that the client asked for; None: ``output_tokens``."""
    priority: int = 0
    data_parallel_rank: int | None = None
    """Rank that the client asks for; None: vLLM's front end chooses."""
    lora: str | None = None
    prefix: tuple[int, ...] = ()
    """Identity of each leading block of the prompt, ``Workload.prefix_block`` tokens each; the last one may
    be a part of a block. Two prompts share their first k blocks if their first k identities are equal."""
    front_end_us: float = 0.0
    """From its arrival until it reached the engine's input queue."""
    queued_step: int | None = None
    """Of a recorded load: ``schedule()`` calls of the trial that had begun when the scheduler got it."""
    queued_pass: Pass | None = None
    """Likewise, of ranks in lock-step: the first pass whose ``schedule()`` call found it in the queue."""
    abort_us: float | None = None
    """The client went away."""
    abort_step: int | None = None
    """Of a recorded load: ``schedule()`` calls of the trial that had begun when the scheduler dropped it."""
    abort_pass: Pass | None = None
    """Likewise: the first pass whose ``schedule()`` call did not find it any more."""
    answered_us: float | None = None
    """Of a recorded load: it ended, or its client went away; None: neither is recorded."""
    structured: bool = False
    """Its output follows a grammar."""
    draft_acceptance: float | None = None
    """Share of its speculative tokens that were accepted; None: not recorded, or none were scheduled."""
