"""``client-limited``: the engine waits for its clients, which keep few requests open or send few."""

from schedtrace.diagnose.offered_load import IDLE_FRAC, OfferedLoad, offered_load
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import advise, step_finding
from schedtrace.model.report import Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

ANSWERS = "{clients}; the engine[ has {seats:n seat} and] {works}."
TIMES = "it offers {offered}, and the engine keeps up: it {works}."


class ClientPace(Evidence, kw_only=True):
    """What the clients ask for."""

    clients: int | None
    """Number of clients with one request open each; None: requests come at times of their own."""
    think_ms: float | None
    """Median time from an answer to the next request of its client."""
    requests_per_s: float | None
    """Rate that requests come at; None for a closed loop."""
    tokens_per_s: float | None
    """Tokens offered by these requests; None for a closed loop."""
    working_frac: float
    """Share of the time in which the engine had work."""


def _find(timeline: Timeline) -> Findings:
    load = offered_load(timeline)
    if not _waits_for_clients(timeline, load):
        return
    more = "more connections, or a higher concurrency," if load.loop else "a higher request rate,"
    seats = {"seats": timeline.seats} if load.loop else {}
    yield step_finding(
        timeline,
        timeline.steps,
        ClientPace(
            clients=None if load.loop is None else load.loop.clients,
            think_ms=load.think_ms,
            requests_per_s=load.requests_per_s,
            tokens_per_s=load.tokens_per_s,
            working_frac=load.working_frac,
        ),
        title="The client sends too little",
        verdict=say("The client is the limit: " + (ANSWERS if load.loop else TIMES), load, **seats),
        severity="info",
        trials=[],
        steps=[],
        message=say(
            "[{loop:?}Each further request followed an answer. ]The pattern is a hint: the trace does "
            "not see the client.",
            load,
        ),
        advice=[advise(f"{more} to load this engine")],
    )


def _waits_for_clients(timeline: Timeline, load: OfferedLoad) -> bool:
    if load.loop is not None:
        return load.loop.clients < (timeline.seats or load.loop.clients + 1)
    return load.pace == "clock" and not load.grows and load.working_frac <= IDLE_FRAC


RULE = Rule(
    code="client-limited",
    summary="the engine waits for its clients, which keep few requests open or send few",
    needs=frozenset({Fact.TIMES, Fact.LIVES}),
    find=_find,
    quiet=3,
)
