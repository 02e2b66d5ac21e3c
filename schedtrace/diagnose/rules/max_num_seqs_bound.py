"""``max-num-seqs-bound``: most waiting was for a seat."""

from schedtrace.diagnose.rules.bound import Bound, find_bound
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "max-num-seqs-bound"
SUMMARY = "most of the time that requests waited, they waited for max_num_seqs"
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.TIMES)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/max-num-seqs-bound.md``."""
    limit = "--max-num-active-seqs" if timeline.active_limit else "--max-num-seqs"
    advice = (
        f"Raise {limit} (now {timeline.seats:,}) as far as the KV cache holds them all; each step gets longer, "
        "so watch the time per output token."
    )
    what = f"one of the {timeline.seats:,} seats ({limit.removeprefix('--').replace('-', '_')})"
    return find_bound(timeline, Bound(CODE, (Cause.MAX_NUM_SEQS,), what, advice))
