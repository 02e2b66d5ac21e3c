"""Wording of the finding ``slow-steps``: parts of a step, shared conditions, title and verdict."""

import math
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from schedtrace.model.message import CauseWord, Count, Message, Request, Steps, joined
from schedtrace.model.say import say

if TYPE_CHECKING:
    from schedtrace.diagnose.excess import Effect, PartExcess
    from schedtrace.diagnose.excess_features import Term

PARTS = {
    "execution": "on the device",
    "schedule": "in schedule()",
    "update": "in update_from_output()",
    "between": "in the engine process, between two steps",
}
"""Phrase for the place where the time of each part of a step is spent."""
NOUNS = {
    "batch": ("request", None),
    "new": ("new request", None),
    "resumed": ("resumed request", None),
    "drafts": ("drafted token", None),
    "encoder": (
        "embedding that the encoder had to compute or load",
        "embeddings that the encoder had to compute or load",
    ),
    "external": (
        "token that the KV connector brought for new requests",
        "tokens that the KV connector brought for new requests",
    ),
    "cached": ("cached token", None),
    "parked": ("parked KV load", None),
    "sessions": ("paused session", None),
    "dummies": ("dummy batch", "dummy batches"),
    "recomputed": ("recomputed token", None),
    "prefill_tokens": ("prefill token", None),
    "decode_tokens": ("decode token", None),
    "context": ("token of context", "tokens of context"),
    "running": ("running request", None),
    "waiting": ("waiting request", None),
    "not_ready": ("request that is not ready", "requests that are not ready"),
    "loads": ("event of a KV load", "events of KV loads"),
    "preemptions": ("preemption", None),
    "compiling": ("grammar that is being compiled", "grammars that are being compiled"),
    "grammars": ("compiled grammar", None),
    "arrivals": ("arrival", None),
    "finishes": ("finished request", None),
    "capped": ("shortened chunk", None),
    "padding": (
        "token of padding to a captured graph's size",
        "tokens of padding to a captured graph's size",
    ),
    "kv_used": ("KV block in use", "KV blocks in use"),
    "adapter_slots": ("LoRA adapter that had no slot", "LoRA adapters that had no slot"),
    "adapter_reads": ("LoRA adapter that was not in memory", "LoRA adapters that were not in memory"),
    "throttled": ("held-back prefill", None),
    "age": ("step since the oldest request came", "steps since the oldest request came"),
}
"""Noun of each counted feature, and its plural; None if the plural only adds an s."""
FLAGS = {
    "decode_only": ("that only decode", "with a prefill or without tokens"),
    "mixed": ("that mix prefill and decode", "that do not mix prefill and decode"),
    "first_use": ("that are the first of their batch size", "that are not the first of their batch size"),
}
"""Clauses for steps with and without each yes-or-no feature."""
TRAIT_WORDS = {
    "logprobs": "requests that ask for log-probabilities",
    "prompt_logprobs": "requests that ask for log-probabilities of their prompts",
    "structured": "requests with structured output",
    "logit_bias": "requests with a logit bias",
    "min_tokens": "requests with a minimum of tokens",
    "lora": "requests that use a LoRA adapter",
}
"""Phrase for requests with each trait."""
OPERATIONS = {
    "pause_state": "pause or resumption",
    "reset_prefix_cache": "reset of the prefix cache",
    "sleep": "sleep",
    "wake_up": "waking up",
    "collective_rpc": "call to the workers",
    "add_lora": "load of an adapter",
}
"""Noun of each operation."""
SECONDS = ("clock", "idle", "period", "since")
"""Kinds of features that are times in seconds; all others are counts or yes-or-no facts."""
LEAST_GROWTH_US = 10.0
"""Growth in microseconds below which a sentence takes a larger unit: a thousand units, then a million."""
LATE_FRAC = 0.1
"""Minimum share of steps that lie below a slope's start for a sentence to state where the slope starts."""
FIRST_OF = {"prefill": "prefill", "used": "number of tokens"}
"""Phrase for each kind of tokens whose number may be the first of its size."""
MINUTES = {
    "clock": "",
    "idle": " without work before a step",
    "since": " since the last {operation} and falls back after it",
}
"""Words after ``a minute`` for each feature in seconds."""


def steps_subject(excess: "PartExcess", effect: "Effect") -> Message:
    """Return a phrase for the slow steps, as the subject of a sentence."""
    terms = effect.explanation.terms
    if len({term.feature.identity for term in terms}) < len(terms) and terms[0].feature.kind in NOUNS:
        low, high = sorted(terms, key=lambda term: term.cut)
        if low.above and not high.above:
            first, last = math.floor(low.cut) + 1, math.floor(high.cut)
            return say("Steps with {first:n} to {last}", first=first, last=term_count(low, last))
    if all(term.feature.kind == "clock" for term in terms):
        steps = excess.steps.filter(pl.Series(effect.inside))["step"]
        return say("Steps {first:n} to {last:n}", first=int(steps[0]), last=int(steps[-1]))
    decodes = [term for term in terms if term.feature.kind == "decode_only" and term.above]
    clauses = [term_clause(excess, term) for term in terms if term not in decodes or len(terms) == 1]
    head = "Decode-only steps" if decodes and len(terms) > 1 else "Steps"
    return say("{head} {clauses}", head=head, clauses=joined(clauses, " and "))


def term_clause(excess: "PartExcess", term: "Term") -> Message:
    """Return a condition in words, as a clause that follows ``steps``."""
    kind, detail = term.feature.identity
    at = math.floor(term.cut)
    match kind:
        case "clock":
            later = excess.steps.filter(pl.Series(term.feature.values > term.cut))["step"]
            side = "from" if term.above else "before"
            words = say("{side} step {step:n}", side=side, step=int(later[0]))
        case "period":
            words = say(
                "{side} phases of {cut:us} that return every {period:us}",
                side="outside of" if term.above else "in",
                cut=term.cut * 1e6,
                period=float(detail) * 1e6,
            )
        case "first_size":
            tokens, _, sizes = detail.partition(" ")
            words = say(
                "whose {tokens} is{not_} the first of its size (in {sizes})",
                tokens=FIRST_OF[tokens],
                not_="" if term.above else " not",
                sizes=f"multiples of {sizes} tokens" if sizes.isdigit() else sizes,
            )
        case "since":
            words = say(
                "{side} than {cut:us} after a {operation}",
                side="more" if term.above else "less",
                cut=term.cut * 1e6,
                operation=OPERATIONS[detail],
            )
        case _ if kind in FLAGS:
            words = say(FLAGS[kind][not term.above])
        case "idle":
            side = "more" if term.above else "less"
            words = say("after {side} than {cut:us} without work", side=side, cut=term.cut * 1e6)
        case _ if at < 1 or kind in ("request", "trait", "lora"):
            words = say("with{out} {what}", out="" if term.above else "out", what=term_nouns(term))
        case _:
            side = "more than" if term.above else "at most"
            words = say("with {side} {count}", side=side, count=term_count(term, at))
    return words


def title(excess: "PartExcess", effect: "Effect", subject: Message) -> Message:
    """Return the finding's title, made from ``subject`` unless the time grows with a feature."""
    if effect.explanation.slope:
        (term,) = effect.explanation.terms
        return say("Time {where} grows with {what}", where=PARTS[excess.part], what=term_nouns(term))
    head = str(subject.arguments.get("head", ""))
    lowered = {**subject.arguments, "head": head.lower()} if head else subject.arguments
    return say("Slow {subject}", subject=Message(subject.template.replace("Steps", "steps", 1), lowered))


def trend(excess: "PartExcess", effect: "Effect", each_us: float, share: float) -> Message:
    """Return the verdict on a time that grows with a feature, by ``each_us`` per unit."""
    (term,) = effect.explanation.terms
    most_us = float(np.quantile(effect.excess_us, 0.98))
    steps = excess.steps["step"]
    if term.feature.kind in SECONDS:
        grows = say(
            "grows by {each:us} a minute" + MINUTES[term.feature.kind],
            each=each_us * 60,
            **({"operation": OPERATIONS[term.feature.detail]} if term.feature.kind == "since" else {}),
        )
    else:
        grows = _per_units(term, each_us)
        if term.cut >= 1 and (term.feature.values <= term.cut).mean() > LATE_FRAC:
            grows = say("{grows} beyond {first:n}", grows=grows, first=math.floor(term.cut))
    return say(
        "Time {where} {grows}, up to {most:us} beyond what a step's work explains ({span}): {share:%} of the "
        "requests' time.",
        where=PARTS[excess.part],
        grows=grows,
        most=most_us,
        span=Steps(int(steps[0]), int(steps[-1])),
        share=share,
    )


def _per_units(term: "Term", each_us: float) -> Message:
    """State how much a time grows per unit or, if a unit adds less than 10 us, per thousand or million."""
    units = next((units for units in (1, 1000) if each_us * units >= LEAST_GROWTH_US), 1_000_000)
    kind, detail = term.feature.identity
    if units > 1 and kind in ("length", *NOUNS):
        return say("grows by {each:us} for each {count}", each=each_us * units, count=term_count(term, units))
    match kind:
        case "exits":
            cause, _, loop = detail.rpartition(" ")
            noun = say("{loop} request passed over for {cause}", loop=loop, cause=CauseWord(cause))
        case "length":
            noun = say("output token of {request}", request=Request(detail))
        case "trait" | "lora":
            noun = say("of the {what}", what=term_nouns(term))
        case _:
            noun = say(NOUNS[kind][0])
    return say("grows by {each:us} for each {noun}", each=each_us, noun=noun)


def tie_clause(excess: "PartExcess", term: "Term", *, slope: bool) -> Message:
    """Return a tied condition as a clause that follows ``steps``."""
    return say("by their number of {what}", what=term_nouns(term)) if slope else term_clause(excess, term)


def mark_clause(term: "Term") -> Message:
    """Return a noun phrase for steps that have a fact, such as ``steps with preemptions``."""
    kind = term.feature.kind
    return (
        say("steps " + FLAGS[kind][0]) if kind in FLAGS else say("steps with {what}", what=term_nouns(term))
    )


def term_nouns(term: "Term") -> Message:
    """Return the noun of a feature in the plural."""
    kind, detail = term.feature.identity
    match kind:
        case "exits":
            cause, _, loop = detail.rpartition(" ")
            words = say("{loop} requests passed over for {cause}", loop=loop, cause=CauseWord(cause))
        case "request":
            words = say("{request}", request=Request(detail))
        case "length":
            words = say("output tokens of {request}", request=Request(detail))
        case "trait":
            words = say(TRAIT_WORDS[detail])
        case "lora":
            words = say("requests that use the LoRA adapter {name:code}", name=detail)
        case "clock":
            words = say("time")
        case "idle":
            words = say("the idle time before a step")
        case "since":
            words = say("the time since the last {operation}", operation=OPERATIONS[detail])
        case _ if kind in FLAGS:
            words = say("steps {which}", which=FLAGS[kind][0])
        case _:
            noun, plural = NOUNS[kind]
            words = say(plural or f"{noun}s")
    return words


def term_count(term: "Term", count: int) -> Message:
    """Return a count with the noun of the feature's unit, such as ``3 requests``."""
    kind = term.feature.kind
    if kind in ("exits", "length"):
        return say("{count:n} {what}", count=count, what=term_nouns(term))
    noun, plural = NOUNS[kind]
    return say("{count}", count=Count(count, noun, plural))


COMPARED = {
    (
        "batch",
        "new",
        "resumed",
        "running",
        "decode_only",
        "mixed",
        "first_use",
        "first_size",
        "padding",
    ): "batch",
    ("prefill_tokens", "decode_tokens", "cached", "recomputed", "capped", "throttled", "drafts"): "tokens",
    ("encoder",): "multimodal inputs",
    ("context", "length"): "context",
    ("kv_used", "preemptions", "loads", "parked", "external"): "KV cache",
    ("arrivals", "finishes", "waiting", "not_ready", "exits"): "queue",
    (
        "trait",
        "lora",
        "adapter_slots",
        "adapter_reads",
        "compiling",
        "grammars",
        "sessions",
        "request",
        "age",
    ): "requests and their options",
    ("dummies",): "dummy batches",
    ("idle", "clock", "period", "since"): "time",
}
"""Phrases for the facts that the search compares, by the kinds of the features about them."""


def compared_facts(kinds: list[str]) -> list[Message]:
    """Return phrases for the facts behind features of these kinds."""
    return [say(words) for group, words in COMPARED.items() if not {*group}.isdisjoint(kinds)]
