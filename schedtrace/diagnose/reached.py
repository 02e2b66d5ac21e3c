"""Use that engines make of their settings: batches in flight, drafts, captured graphs, shared prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from schedtrace.diagnose.batches_in_flight import executed_batches
from schedtrace.diagnose.kv_cache import cache_use
from schedtrace.model.cuda_graphs import graph_sizes
from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.report import EffectiveSetting
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

FEWEST_STEPS = 20
"""Minimum number of steps, or executed batches, that show the use of a setting."""
MISSED_FRAC = 0.05
"""Minimum share of the prompts' tokens in cache misses on shared prefixes for these to be reported."""


@dataclass(frozen=True)
class Reached:
    """Sums over one engine; 0 if the engine has no such events or the trace does not record them."""

    depth: int = 0
    """Configured number of batches in flight in a pipeline."""
    batches: int = 0
    """Number of batches whose execution is recorded."""
    in_flight: int = 0
    """Number of batches in flight, summed over the recorded batches."""
    drafts: int = 0
    """Number of draft tokens of finished requests."""
    accepted: int = 0
    """Number of draft tokens of finished requests that were accepted."""
    round_us: float | None = None
    """Time to verify the drafts of one decode, by the step-time model; None without a model."""
    graph_steps: int = 0
    """Number of steps without prefill that fit into a captured graph."""
    graph_tokens: int = 0
    """Number of tokens scheduled in the steps of ``graph_steps``."""
    padded_tokens: int = 0
    """Sizes in tokens of the smallest graphs that hold the steps of ``graph_steps``, summed."""
    larger_steps: int = 0
    """Number of steps without prefill that are larger than every captured graph."""
    prompt_tokens: int = 0
    """Number of prompt tokens of all requests."""
    shareable_tokens: int = 0
    """Number of prompt tokens in prefixes of earlier prompts."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""


def reached_by(timeline: Timeline) -> Reached:
    """Return the use that one engine made of its settings."""
    stages, depth = timeline.header.pipeline_parallel_size, timeline.header.batches_in_flight
    batches = executed_batches(timeline)
    if not (stages and depth and min(stages, depth) > 1):  # no pipeline
        depth, batches = 0, batches.clear()
    finishes, model = timeline.finishes, timeline.step_time
    drafts, accepted = (
        int(finishes[name].sum() or 0) if name in finishes.columns else 0
        for name in ("drafts", "drafts_accepted")
    )
    each = timeline.header.settings.get("speculative_config.num_speculative_tokens")
    round_us = model.per_decode_token_us * each if model and drafts and isinstance(each, int) else None
    graph_steps, graph_tokens, padded, larger = _graphs(timeline)
    prompt, shareable, cached = 0, 0, 0
    if {Fact.CACHE, Fact.REQUESTS, Fact.LIVES} <= timeline.facts:
        use = cache_use(timeline)
        names = ("prompt_tokens", "shareable_tokens", "cached_tokens")
        prompt, shareable, cached = (int(use[name].sum() or 0) for name in names)
    return Reached(
        depth=depth,
        batches=batches.height,
        in_flight=int(batches["in_flight"].sum()),
        drafts=drafts,
        accepted=accepted,
        round_us=round_us,
        graph_steps=graph_steps,
        graph_tokens=graph_tokens,
        padded_tokens=padded,
        larger_steps=larger,
        prompt_tokens=prompt,
        shareable_tokens=shareable,
        cached_tokens=cached,
    )


def _graphs(timeline: Timeline) -> tuple[int, int, int, int]:
    """Return the steps, tokens and padded tokens in captured graphs, and the steps too large for them."""
    sizes = graph_sizes(timeline.header)
    if not sizes:
        return 0, 0, 0, 0
    captured = pl.Series(sizes, dtype=pl.Int64)
    steps = timeline.steps.filter((pl.col("prefill_tokens") == 0) & (pl.col("used_tokens") > 0))
    place = captured.search_sorted(steps["used_tokens"].cast(pl.Int64), side="left").cast(pl.Int64)
    fits = place < captured.len()
    inside = place.filter(fits)
    tokens = int(steps["used_tokens"].filter(fits).sum())
    return inside.len(), tokens, int(captured.gather(inside).sum()), int((~fits).sum())


def reached_message(setting: EffectiveSetting, engines: Sequence[Reached]) -> Message:
    """Describe the use that all engines made of a setting; ``NOTHING`` if the traces do not show it."""
    name = setting.name

    def engine_sum(field: str) -> int:
        return sum(getattr(engine, field) for engine in engines)

    if name == "pipeline_parallel_size" and engine_sum("batches") >= FEWEST_STEPS:
        return say(
            "on average {mean:n1} of {depth:n} batches were in flight",
            mean=engine_sum("in_flight") / engine_sum("batches"),
            depth=max(engine.depth for engine in engines),
        )
    if name == "num_speculative_tokens" and engine_sum("drafts"):
        return say(
            "{frac:%} of {drafts:n draft token} were accepted[; those of a decode take {round:us} to verify]",
            frac=engine_sum("accepted") / engine_sum("drafts"),
            drafts=engine_sum("drafts"),
            round=engines[0].round_us,
        )
    if (
        name == "cudagraph_capture_sizes"
        and engine_sum("graph_steps") + engine_sum("larger_steps") >= FEWEST_STEPS
    ):
        padded = engine_sum("padded_tokens")
        parts = [
            say(
                "[{frac:%} of the tokens in graphs of {steps:n decode step} were padding]",
                frac=1 - engine_sum("graph_tokens") / padded if padded else None,
                steps=engine_sum("graph_steps"),
            ),
            say(
                "[{larger:n decode step} were larger than every graph]",
                larger=engine_sum("larger_steps") or None,
            ),
        ]
        return joined(parts, "; ")
    missed = engine_sum("shareable_tokens") - engine_sum("cached_tokens")
    if name == "enable_prefix_caching" and missed >= MISSED_FRAC * max(1, engine_sum("prompt_tokens")):
        return say(
            "prompts found {cached:n} of {shareable:n token} with which earlier ones began",
            cached=engine_sum("cached_tokens"),
            shareable=engine_sum("shareable_tokens"),
        )
    return NOTHING
