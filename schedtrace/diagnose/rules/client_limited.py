"""``client-limited``: the engine waits for its clients, which keep few requests open or send few."""

from schedtrace.diagnose.offered_load import IDLE_FRAC, OfferedLoad, offered_load
from schedtrace.diagnose.rule import Rule
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

CODE = "client-limited"


class ClientPace(Evidence, kw_only=True):
    """What the clients ask for."""

    clients: int | None
    """With one request open each; None: requests come at times of their own."""
    think_ms: float | None
    requests_per_s: float | None
    tokens_per_s: float | None
    working_frac: float


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/client-limited.md``."""
    load = offered_load(timeline)
    if not _waits_for_clients(timeline, load):
        return []
    closed = load.loop is not None
    return [
        Finding(
            code=CODE,
            title=say("The client sends too little"),
            verdict=_verdict(timeline, load),
            severity="info",
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=timeline.steps.height,
            trials=[],
            steps=[],
            tokens=0,
            message=say(
                "{pattern}The pattern is a hint: the trace does not see the client.",
                pattern=say("Each further request followed an answer. ") if closed else NOTHING,
            ),
            advice=[
                Advice(
                    message=say(
                        "more connections, or a higher concurrency, to load this engine"
                        if closed
                        else "a higher request rate, to load this engine"
                    )
                )
            ],
            evidence=ClientPace(
                clients=None if load.loop is None else load.loop.clients,
                think_ms=load.think_ms,
                requests_per_s=load.requests_per_s,
                tokens_per_s=load.tokens_per_s,
                working_frac=load.working_frac,
            ),
        )
    ]


def _waits_for_clients(timeline: Timeline, load: OfferedLoad) -> bool:
    if load.loop is not None:
        return load.loop.clients < (timeline.seats or load.loop.clients + 1)
    return load.pace == "clock" and not load.grows and load.working_frac <= IDLE_FRAC


def _verdict(timeline: Timeline, load: OfferedLoad) -> Message:
    if load.loop is None:
        return say(
            "The client is the limit: it offers {offered}, and the engine keeps up: it {works}.",
            offered=load.offered,
            works=load.works,
        )
    seats = NOTHING
    if timeline.seats:
        seats = say(" has {seats:n seat} and", seats=timeline.seats)
    return say(
        "The client is the limit: {clients}; the engine{seats} {works}.",
        clients=load.clients,
        seats=seats,
        works=load.works,
    )


RULE = Rule(
    code=CODE,
    summary="the engine waits for its clients, which keep few requests open or send few",
    needs=frozenset({Fact.TIMES, Fact.LIVES}),
    find=find,
    quiet=3,
)
