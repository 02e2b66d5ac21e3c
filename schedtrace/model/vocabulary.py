"""What the table of causes says about one exit or cap of a trace, as messages."""

import re

from schedtrace.model import causes
from schedtrace.model.causes import PAGE, Cause, entries
from schedtrace.model.message import Message, Number, Setting, Value
from schedtrace.model.say import say
from schedtrace.model.trace import Header

FIGURES = frozenset({"seats", "seats_setting", "seats_option", "token_budget"})
"""What a text of the table may have in braces."""
INTERRUPTIONS = {
    "paused": "the scheduler was paused",
    "asleep": "the engine was asleep",
    "called": "the engine ran another call",
    "no_call": "the engine did not call schedule()",
    "first_steps": "a first step took longer than its work",
    "hung": "schedule() did not return",
    "stalled": "the engine made no step",
    "starved": "the engine's processes had too few processors",
}
"""Kinds of interruptions (``timeline/events.py``), to stand within a sentence."""
SLOW_STEP = "a step took longer than its work"
"""Words for all other kinds of interruptions, to stand within a sentence."""
_NAME = re.compile(r"`([^`]+)`")


def reason(header: Header, *, loop: str, cause: str, detail: str | None) -> Message:
    """Return why a loop ended or skipped a request, to stand within a sentence.

    Args:
        header: Of the trace: it has the engine's limits, and the causes that other packages register.
        loop: ``waiting`` or ``running``.
        cause: A word of ``Cause`` or any other.
        detail: The exit's.
    """
    if text := causes.reason(cause, detail, loop):
        return _filled(header, text)
    registered = header.registered_causes.get(cause)
    if registered:
        return say("{meaning:code} (cause {cause:cause})", meaning=registered, cause=cause)
    return say("cause {cause:cause}", cause=cause)


def advice(header: Header, *, cause: str, detail: str | None = None) -> Message:
    """Return what to try against it; for a cause that is not in the table, where it is documented."""
    for row in entries(cause, detail):
        if row.advice:
            return _filled(header, row.advice)
    if cause in header.registered_causes:
        return say("See the package that registers the cause {cause:cause}.", cause=cause)
    return say("See {page:code}.", page=PAGE)


def interruption(kind: str | None) -> str:
    """Return what kept an engine from its usual steps, to stand within a sentence."""
    return INTERRUPTIONS.get(kind or "", SLOW_STEP)


def reasoned_details(cause: Cause, loop: str) -> list[str]:
    """Return the details with a reason of their own, which decides what helps if limits share a cause."""
    return [detail for detail, entry in cause.entry.details.items() if entry.reason(loop)]


def _filled(header: Header, text: str) -> Message:
    """Return a text of the table with the engine's figures; each name in backticks is a setting."""
    active = header.scheduler_config.get("max_num_active_seqs")
    limited = isinstance(active, int) and active > 0
    setting = "max_num_active_seqs" if limited else "max_num_seqs"
    figures: dict[str, Value] = {
        "seats": Number(active if limited else header.max_num_running_reqs),
        "seats_setting": Setting(setting),
        "seats_option": Setting(f"--{setting.replace('_', '-')}"),
        "token_budget": Number(header.token_budget),
    }
    names = _NAME.findall(text)
    settings: dict[str, Value] = {f"setting{at}": Setting(name) for at, name in enumerate(names)}
    numbered = iter(settings)
    template = _NAME.sub(lambda _: f"{{{next(numbered)}}}", text)
    used = {name: value for name, value in figures.items() if f"{{{name}}}" in template}
    return say(template, **used, **settings)
