"""Sentences about steps as data for ``sentence.js``, which fills them in the browser."""

from typing import Any

import msgspec

from schedtrace.explain.step_words import StepWords
from schedtrace.model.message import Message, Slot
from schedtrace.model.printable import visible
from schedtrace.present.pages.step import crowd, used
from schedtrace.present.phrases import pieces

Parts = list[str | dict[str, Any]]
"""A sentence: plain words, ``{"is": "code", "text": "a.py:1"}``, and slots (``model.message.Slot``)."""


def step_templates(words: StepWords) -> dict[str, list[Parts]]:
    """The lines of ``schedtrace step`` that are known of every step.

    ``used``: with ``tokens``, ``budget``, ``left`` and ``requests``; the second where nobody was scheduled.
    ``crowd``, before and after a step: with ``running``, ``waiting``, ``free`` and ``total`` (KV blocks); the
    second where only the free blocks are known, the third where no blocks are. ``stops`` and ``preempted``:
    those of ``words``, in their order.
    """
    tokens, left, running, waiting, free, total = (
        Slot(name, "number") for name in ("tokens", "left", "running", "waiting", "free", "total")
    )
    budget, requests = Slot("budget", "count", "token"), Slot("requests", "count", "request")
    return {
        "used": [parts(used(tokens, budget, left, someone)) for someone in (requests, None)],
        "crowd": [
            parts(crowd(running, waiting, *blocks)) for blocks in ((free, total), (free, None), (None, None))
        ],
        "stops": [parts(template) for template in words.stops.templates],
        "preempted": [parts(template) for template in words.preempted.templates],
    }


def parts(template: Message) -> Parts:
    """A template with everything written but its slots, printable."""
    found: Parts = []
    for text, value in pieces(template):
        if isinstance(value, Slot):
            found.append(msgspec.to_builtins(value))
        elif value is not None:
            found.append({"is": str(value.__struct_config__.tag), "text": visible(text)})
        elif found and isinstance(found[-1], str):
            found[-1] += visible(text)
        else:
            found.append(visible(text))
    return found
