"""``max-num-seqs-bound``: most waiting was for a seat."""

from schedtrace.diagnose.rules.allowed import BATCHED_TOKENS, batched_tokens, seats_setting
from schedtrace.diagnose.rules.bound import Bound, find_bound
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import Count, Message, Number, Setting, message
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "max-num-seqs-bound"
SUMMARY = "most waiting time was for a seat (max_num_seqs)"
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/max-num-seqs-bound.md``."""
    setting = seats_setting(timeline)
    advice = message(
        "Raise {setting} (now {seats}) as far as the KV cache holds the requests; vLLM accepts at most "
        "{most}. More requests make each step longer, so watch the time per output token.",
        setting=setting,
        seats=Number(timeline.seats),
        most=_most(timeline),
    )
    resource = message(
        "one of the {seats} ({setting})",
        seats=Count(timeline.seats, "seat"),
        setting=Setting(setting.name.removeprefix("--").replace("-", "_")),
    )
    return find_bound(timeline, Bound(CODE, (Cause.MAX_NUM_SEQS,), resource, advice))


def _most(timeline: Timeline) -> Message:
    """The setting that vLLM does not let this one exceed."""
    if timeline.active_limit:
        limit, now = Setting("--max-num-seqs"), timeline.header.max_num_running_reqs
    else:
        limit, now = BATCHED_TOKENS, batched_tokens(timeline)
    return message("{limit} (now {now})", limit=limit, now=Number(now))
