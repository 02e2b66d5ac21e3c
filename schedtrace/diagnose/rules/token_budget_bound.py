"""``token-budget-bound``: most waiting was for tokens of the step's budget."""

from schedtrace.diagnose.rules.bound import Bound, find_bound
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "token-budget-bound"
SUMMARY = "most of the time that requests waited, they waited for the steps' token budget"
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.TIMES)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/token-budget-bound.md``."""
    advice = (
        f"The device works on full steps: that is as it should be for throughput. A larger "
        f"--max-num-batched-tokens (now {timeline.token_budget:,}) starts prompts sooner only if the "
        "longer steps are faster per token; try it and compare with schedtrace diff."
    )
    return find_bound(timeline, Bound(CODE, (Cause.TOKEN_BUDGET,), "the steps' token budget", advice))
