"""The words of severities, states and changes, and how each is marked: their one home."""

from schedtrace.present.sections import State, Style, Styled

SEVERITIES = {"info": Style.INFO, "warning": Style.WARNING, "critical": Style.CRITICAL}

CHANGES = {"appeared": Style.WARNING, "went": Style.GOOD, "stayed": None}
"""What became of a finding."""

EXITS_VIA = {"source": "exact, from the scheduler's own code", "inferred": "inferred from its state"}

STATES = {
    "front_end": State("front end", "~", Style.DIM),
    "waiting": State("waiting", ".", Style.WARNING),
    "prefill": State("prefill", "P", Style.PREFILL, prominent=True),
    "recompute": State("recompute", "R", Style.RECOMPUTE, prominent=True),
    "decode": State("decode", "=", Style.DECODE),
    "preempted": State("preempted", "x", Style.BAD),
    "stalled": State("stalled", "_", Style.DIM),
}
"""What a request did; prefill and recompute are few steps, but the ones to be found in a long life."""

ENGINE_STATES = {
    "device": "device",
    "schedule": "schedule()",
    "update": "update_from_output()",
    "dummy": "dummy batches",
    "host_gap": "between steps",
}
"""What a busy engine did."""

EVENTS = {"preempted": Style.BAD, "first_token": Style.STRONG}


def severity(word: str) -> Styled:
    """A severity, marked."""
    return Styled(word, SEVERITIES[word])


def state(word: str) -> State:
    """A state by its word in a document; one that is not known keeps its word."""
    return STATES.get(word) or State(word, "?", Style.DIM)
