"""Advice for slow steps, by the features that they share or by the part of the step that is slow."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedtrace.diagnose.excess_features import ADAPTER_ROOM
from schedtrace.diagnose.excess_words import OPERATIONS, PARTS, term_nouns
from schedtrace.diagnose.rules.allowed_settings import more_adapters
from schedtrace.diagnose.rules.common import advise, listed
from schedtrace.model.message import Request
from schedtrace.model.report import Advice
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

if TYPE_CHECKING:
    from schedtrace.diagnose.excess import PartExcess
    from schedtrace.diagnose.excess_candidates import Explanation
    from schedtrace.diagnose.excess_features import Term

BEFORE_AND_AFTER = (
    "Profile a step before a {operation} and a step after it, and compare them: the trace does not see "
    "inside a step. Until the cause is known, more of them keep steps short."
)
CALLED = (
    "Look at what the KV connector {name:code} does {where}: it is called there, and no setting of the "
    "scheduler changes it."
)
INSIDE = (
    "Let the KV connector {name:code} load asynchronously, or several requests at once, if it can: it loads "
    "inside the step, and all requests of the step wait. No setting of the scheduler changes it."
)
SAMPLED_LESS = say("ask for fewer log-probabilities")
LESS_WORK = {
    "structured": say("try another grammar backend ({option:setting})", option="--structured-outputs-config"),
    "logprobs": SAMPLED_LESS,
    "prompt_logprobs": SAMPLED_LESS,
}
"""Advice that reduces the work for a request with a special option, by feature."""
MEMBERS = ("request", "length", "trait", "lora")
"""Features that stand for requests."""
PROFILE = "Profile one of these steps: the trace does not see inside {part}."


def would_tell(part: str) -> Advice:
    """Return the advice to record what may explain a slow part of steps, if the trace does not."""
    if part == "execution":
        return advise(
            "Record at these times what else uses the device and its host, and the device's clocks, power "
            "and temperature, and profile one of these steps: the trace has none of these."
        )
    return advise(
        "Record at these times what else uses the host's processors, and sample the stacks of the engine "
        "process (for instance with py-spy): the trace has neither."
    )


def profile_advice(excess: "PartExcess", explanation: "Explanation") -> Advice:
    """Return the advice to examine slow steps with this explanation more closely."""
    for term in explanation.terms:
        if term.feature.kind == "since":
            return advise(BEFORE_AND_AFTER, operation=OPERATIONS[term.feature.detail])
        if term.feature.kind == "period":
            return would_tell(excess.part)
    return advise(PROFILE, part="a step" if excess.part == "execution" else PARTS[excess.part][3:])


def remedies(timeline: Timeline, part: str, terms: "Sequence[Term]") -> list[Advice]:
    """Return advice that shortens steps with these conditions, or reveals more; empty if there is none.

    Args:
        timeline: Timeline of the engine.
        part: Part of the steps that is long.
        terms: Conditions.
    """
    kinds = {term.feature.kind for term in terms}
    connector = timeline.header.settings.get("kv_transfer_config.kv_connector")
    asks = any(term.feature.detail.startswith("connector") for term in terms)
    loads_inside = part == "execution" and "external" in kinds
    if connector and (asks or loads_inside or kinds & {"loads", "parked"}):
        return [advise(INSIDE if loads_inside else CALLED, name=str(connector), where=PARTS[part])]
    places = [name for kind, name in ADAPTER_ROOM.items() if kind in kinds]
    more = [advice for name in places if (advice := more_adapters(timeline, name)) is not None]
    if "compiling" in kinds:
        more.append(
            advise(
                "More processors for the engine, or a higher CPU limit of its container: [{threads:n thread}]"
                "[{threads:!}threads] may compile grammars beside it. Fewer different grammars help, too.",
                threads=timeline.header.grammar_threads,
            )
        )
    if more:
        return more
    if members := [term for term in terms if term.feature.kind in MEMBERS]:
        names = [
            say("{request}", request=Request(term.feature.detail))
            if term.feature.kind == "length"
            else term_nouns(term)
            for term in members
        ]
        without = (
            "Run the same load without {requests} and compare the two with {diff:code}.[ If they cost that "
            "much, {less}, or give them an engine of their own: all requests of a step wait for them.]"
        )
        less = [LESS_WORK[term.feature.detail] for term in members if term.feature.detail in LESS_WORK]
        return [
            advise(
                without,
                requests=listed(names),
                diff="schedtrace diff",
                less=less[0] if less else None,
            )
        ]
    if kinds & {"first_use", "first_size"}:
        warm = (
            "Warm the engine up with batches of these sizes before it serves or is measured "
            "({warmup:setting} of {run:code})."
        )
        return [advise(warm, warmup="--warmup", run="schedtrace run")]
    if "encoder" in kinds and part == "execution":
        elsewhere = (
            "An engine of its own for the encoder ({connector:setting}), or smaller inputs: all requests of "
            "a batch wait for its encoder."
        )
        return [advise(elsewhere, connector="--ec-transfer-config")]
    return []
