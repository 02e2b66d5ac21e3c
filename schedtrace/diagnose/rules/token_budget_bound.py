"""``token-budget-bound``: most waiting was for tokens of the step's budget."""

from schedtrace.diagnose.rules.allowed import BATCHED_TOKENS, batched_tokens
from schedtrace.diagnose.rules.bound import Bound, find_bound
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import Code, Number, message
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "token-budget-bound"
SUMMARY = "most waiting time was for the steps' token budget"
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/token-budget-bound.md``."""
    advice = message(
        "A larger {setting} (now {now}) starts prompts sooner and makes each step longer. Compare both with "
        "{diff}.",
        setting=BATCHED_TOKENS,
        now=Number(batched_tokens(timeline)),
        diff=Code("schedtrace diff"),
    )
    return find_bound(
        timeline, Bound(CODE, (Cause.TOKEN_BUDGET,), message("the token budget of steps"), advice)
    )
