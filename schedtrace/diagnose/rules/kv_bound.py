"""``kv-bound``: most waiting was for room in the KV cache."""

from schedtrace.diagnose.rules.bound import Bound, find_bound
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "kv-bound"
SUMMARY = "most of the time that requests waited, they waited for room in the KV cache"
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.TIMES)

_BOUND = Bound(
    CODE,
    (Cause.KV_BLOCKS, Cause.PREEMPTED_THIS_STEP),
    "room in the KV cache",
    "More room is the only thing that helps all of them: --gpu-memory-utilization, "
    "--kv-cache-memory-bytes, a smaller KV cache type (--kv-cache-dtype fp8), more GPUs per engine; "
    "or shorter requests. Raising --max-num-seqs or --max-num-batched-tokens cannot help.",
)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/kv-bound.md``."""
    return find_bound(timeline, _BOUND)
