"""``kv-bound``: most waiting was for KV cache space."""

from schedtrace.diagnose.rules.allowed import MORE_KV_SPACE
from schedtrace.diagnose.rules.bound import Bound, find_bound
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message, Setting, message
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "kv-bound"
SUMMARY = "most waiting time was for KV cache space"
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/kv-bound.md``."""
    causes = (Cause.KV_BLOCKS, Cause.PREEMPTED_THIS_STEP)
    return find_bound(timeline, Bound(CODE, causes, message("KV cache space"), _advice(timeline)))


def _advice(timeline: Timeline) -> Message:
    halved = str(timeline.header.settings.get("cache_config.cache_dtype")).startswith("fp8")
    smaller = message(", or store it in fewer bytes ({dtype})", dtype=Setting("--kv-cache-dtype fp8"))
    return message(
        "Give the KV cache more space ({more}){smaller}. A larger {seats} or {budget} does not help.",
        more=MORE_KV_SPACE,
        smaller=NOTHING if halved else smaller,
        seats=Setting("--max-num-seqs"),
        budget=Setting("--max-num-batched-tokens"),
    )
