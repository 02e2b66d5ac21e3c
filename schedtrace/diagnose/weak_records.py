"""Sentences on a record that lacks facts: what it cannot show, what it shows, and what would show more."""

import polars as pl

from schedtrace.diagnose.rules import RANK_RULES, RULES
from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.report import NotJudged
from schedtrace.model.say import say
from schedtrace.model.trace_facts import SHOWS_LIMITS, Fact, in_order
from schedtrace.timeline.timeline import Timeline

MOST_STEPS = 3
"""Maximum number of steps with new requests that are named; further ones are only counted."""
RECORD_IT = say(
    "To know, record the engine: {attach:code} (a server that runs) or {run:code} (a benchmark).",
    attach="schedtrace attach --for 60s",
    run="schedtrace run",
)


def unjudged(facts: frozenset[Fact], engines: int) -> list[NotJudged]:
    """Return the rules that need facts which a record lacks."""
    rules = RULES | RANK_RULES if engines > 1 else RULES
    return [
        NotJudged(code=rule.code, missing=in_order(rule.needs - facts))
        for rule in rules.values()
        if rule.needs - facts
    ]


def cannot_tell(facts: frozenset[Fact]) -> Message:
    """Return a sentence if a record does not show what limits the engine, with what it lacks."""
    return say(
        "[This record cannot tell what limits the engine: it lacks {missing}.]",
        missing=", ".join(in_order(SHOWS_LIMITS - facts)),
    )


def left_open(facts: frozenset[Fact]) -> Message:
    """Return a sentence on missing facts that would show what limits the engine, or nothing if none is."""
    needed = frozenset[Fact]().union(*(rule.needs for rule in RULES.values()))
    return say(
        "[This record lacks {missing}: what these would show is not judged.]",
        missing=", ".join(in_order(needed - facts)),
    )


def contents(timeline: Timeline) -> Message:
    """Return the sizes of steps, KV cache usage and admissions of one engine, as far as recorded."""
    steps = timeline.steps.filter(pl.col("total_requests") > 0)
    if steps.is_empty():
        return NOTHING
    requests, tokens = _ends(steps, "total_requests"), _ends(steps, "used_tokens")
    usage = None
    if "kv_cache_usage_frac" in steps.columns:
        usage = _ends(steps.with_columns(pl.col("kv_cache_usage_frac").round(2)), "kv_cache_usage_frac")
    sizes = say(
        "It shows {steps:n step}[ of {requests}][ and {tokens}][; KV cache usage {usage}].",
        steps=steps.height,
        requests=say("[{low:n} to ]{high:n request}", low=requests[0], high=requests[1])
        if requests
        else None,
        tokens=say("[{low:n} to ]{high:n token}", low=tokens[0], high=tokens[1]) if tokens else None,
        usage=say("[{low:%} to ]{high:%}", low=usage[0], high=usage[1]) if usage else None,
    )
    return joined([sizes, _admissions(steps)])


def _ends(steps: pl.DataFrame, column: str) -> tuple[float | None, float] | None:
    """Return the smallest and the largest value of a column, only one if equal; None if not recorded."""
    low, high = steps.select(low=pl.col(column).min(), high=pl.col(column).max()).row(0)
    return None if high is None else (low if low < high else None, high)


def _admissions(steps: pl.DataFrame) -> Message:
    """Describe how many new requests each step admitted; return nothing if this is not recorded."""
    admits = steps.filter(pl.col("num_new") > 0)
    if steps["num_new"].null_count() or admits.is_empty():
        return NOTHING
    each = [
        say("{num_new:n} in {step:step}[ ({used_tokens:n} of {token_budget:n token})]", **row)
        for row in admits.head(MOST_STEPS)
        .select("num_new", "step", "used_tokens", "token_budget")
        .iter_rows(named=True)
    ]
    rest = admits.slice(MOST_STEPS)
    each.append(say("[{new:n} in {steps:n later step}]", new=int(rest["num_new"].sum()), steps=rest.height))
    return say("New requests: {each}.", each=joined(each, ", "))
