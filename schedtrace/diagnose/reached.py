"""What engines reached of their settings: batches in flight, drafts, captured graphs, shared beginnings."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from schedtrace.diagnose.batches_in_flight import executed_batches
from schedtrace.diagnose.cache_use import cache_use
from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.report import EffectiveSetting
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

FEWEST_STEPS = 20
"""Steps that show what a setting reached."""
MISSED_FRAC = 0.05
"""Share of the prompts' tokens below which a missed beginning is not stated."""


@dataclass(frozen=True)
class Reached:
    """Sums over one engine; 0 where it has none of it, or the trace does not record it."""

    depth: int = 0
    """Batches in flight that a pipeline is configured for."""
    batches: int = 0
    """Batches whose execution is recorded."""
    in_flight: int = 0
    """Batches in flight, added up over these."""
    drafts: int = 0
    accepted: int = 0
    round_us: float | None = None
    """Time that verifying the drafts of one decode takes, by the model of step times; None: no model."""
    graph_steps: int = 0
    """Steps without prefill that fit into a captured graph."""
    graph_tokens: int = 0
    """Tokens that these scheduled."""
    padded_tokens: int = 0
    """Tokens of the smallest graphs that hold them."""
    larger_steps: int = 0
    """Steps without prefill that are larger than every captured graph."""
    prompt_tokens: int = 0
    shareable_tokens: int = 0
    cached_tokens: int = 0


def reached_by(timeline: Timeline) -> Reached:
    """Return what one engine reached."""
    depth, batches = _pipeline(timeline)
    finishes, model = timeline.finishes, timeline.step_time
    drafts, accepted = (
        int(finishes[name].sum() or 0) if name in finishes.columns else 0
        for name in ("drafts", "drafts_accepted")
    )
    each = timeline.header.settings.get("speculative_config.num_speculative_tokens")
    round_us = model.per_decode_token_us * each if model and drafts and isinstance(each, int) else None
    graph_steps, graph_tokens, padded, larger = _graphs(timeline)
    prompt, shareable, cached = _beginnings(timeline)
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


def _pipeline(timeline: Timeline) -> tuple[int, pl.DataFrame]:
    """Return the batches in flight that a pipeline is configured for, and its executed batches."""
    stages, depth = timeline.header.pipeline_parallel_size, timeline.header.batches_in_flight
    batches = executed_batches(timeline)
    is_pipeline = bool(stages and depth and min(stages, depth) > 1)
    return (depth or 0, batches) if is_pipeline else (0, batches.clear())


def _graphs(timeline: Timeline) -> tuple[int, int, int, int]:
    """Return steps, tokens and padded tokens in captured graphs, and the steps that are larger than all."""
    settings = timeline.header.settings
    sizes = settings.get("compilation_config.cudagraph_capture_sizes")
    mode = settings.get("compilation_config.cudagraph_mode")
    if not isinstance(sizes, list) or not sizes or mode in {None, "NONE"}:
        return 0, 0, 0, 0
    captured = pl.Series(sorted(size for size in sizes if isinstance(size, int)), dtype=pl.Int64)
    steps = timeline.steps.filter((pl.col("prefill_tokens") == 0) & (pl.col("used_tokens") > 0))
    place = captured.search_sorted(steps["used_tokens"].cast(pl.Int64), side="left").cast(pl.Int64)
    fits = place < captured.len()
    inside = place.filter(fits)
    tokens = int(steps["used_tokens"].filter(fits).sum())
    return inside.len(), tokens, int(captured.gather(inside).sum()), int((~fits).sum())


def _beginnings(timeline: Timeline) -> tuple[int, int, int]:
    """Return prompt tokens, those with which earlier prompts began, and those found; 0: not recorded."""
    if not {Fact.CACHE, Fact.REQUESTS, Fact.LIVES} <= timeline.facts:
        return 0, 0, 0
    use = cache_use(timeline)
    names = ("prompt_tokens", "shareable_tokens", "cached_tokens")
    prompt, shareable, cached = (int(use[name].sum() or 0) for name in names)
    return prompt, shareable, cached


def reached(setting: EffectiveSetting, engines: Sequence[Reached]) -> Message:
    """Return what all engines reached of a setting; nothing where the traces do not show it."""
    name = setting.name

    def total(field: str) -> int:
        return sum(getattr(engine, field) for engine in engines)

    if name == "pipeline_parallel_size" and total("batches") >= FEWEST_STEPS:
        return say(
            "on average {mean:n1} of {depth:n} batches were in flight",
            mean=total("in_flight") / total("batches"),
            depth=max(engine.depth for engine in engines),
        )
    if name == "num_speculative_tokens" and total("drafts"):
        return say(
            "{frac:%} of {drafts:n draft token} were accepted[; those of a decode take {round:us} to verify]",
            frac=total("accepted") / total("drafts"),
            drafts=total("drafts"),
            round=engines[0].round_us,
        )
    if name == "cudagraph_capture_sizes" and total("graph_steps") + total("larger_steps") >= FEWEST_STEPS:
        padded = total("padded_tokens")
        parts = [
            say(
                "[{frac:%} of the tokens in graphs of {steps:n decode step} were padding]",
                frac=1 - total("graph_tokens") / padded if padded else None,
                steps=total("graph_steps"),
            ),
            say(
                "[{larger:n decode step} were larger than every graph]", larger=total("larger_steps") or None
            ),
        ]
        return joined(parts, "; ")
    missed = total("shareable_tokens") - total("cached_tokens")
    if name == "enable_prefix_caching" and missed >= MISSED_FRAC * max(1, total("prompt_tokens")):
        return say(
            "prompts found {cached:n} of {shareable:n token} with which earlier ones began",
            cached=total("cached_tokens"),
            shareable=total("shareable_tokens"),
        )
    return NOTHING
