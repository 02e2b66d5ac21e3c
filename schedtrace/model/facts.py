"""What a record of a run can tell; foreign logs tell less than a trace of schedtrace."""

from enum import StrEnum


class Fact(StrEnum):
    """A kind of facts, in the words in which its absence is told."""

    REQUESTS = "what each request got"
    TIMES = "when steps began and ended"
    QUEUE = "queue lengths"
    EXITS = "why a step stopped"
    BLOCKS = "KV blocks"
    LIVES = "when requests came and went"
    PREEMPTIONS = "preemptions"
    CACHE = "prefix-cache hits"
    CONFIG = "the engine's settings"


ALL_FACTS = frozenset(Fact)
