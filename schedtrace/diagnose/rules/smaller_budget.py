"""A smaller token budget whose steps compute prompts as fast as larger steps, so that decodes run more often.

A device that reads its weights while it computes hides the prefill of small steps. A step beyond that size
delays the decodes in it, and computes no token sooner.
"""

from typing import NamedTuple

import polars as pl

from schedtrace.diagnose.fixed_share import BREAK_EVEN_FRAC, throughput_counts
from schedtrace.diagnose.gains import RAN, THERE, host_us
from schedtrace.diagnose.offered_load import offered_load
from schedtrace.diagnose.rules.allowed_settings import batched_tokens, smallest_batched_tokens
from schedtrace.diagnose.rules.common import advise
from schedtrace.diagnose.waits import mean
from schedtrace.model.report import Advice
from schedtrace.timeline.step_time import median
from schedtrace.timeline.timeline import Timeline, made_once

FEWEST_STEPS, FEWEST_SIZED = 20, 5
"""Fewest steps with decodes and prefill that show the saving of a smaller budget, and of about its size."""
MOST_TIMES = 2
"""Largest ratio of a budget to the recorded steps that speak for it."""
LEAST_SAVED_FRAC = 0.02
"""Least share of the requests' time for which a smaller budget is worth a restart."""


class SmallerBudget(NamedTuple):
    """Budget whose steps compute prompts about as fast as larger steps do, by steps that a trace records."""

    tokens: int
    size: int
    """Mean tokens of recorded steps of about this size."""
    step_us: float
    """Mean time of recorded steps of about this size."""
    larger_us: float
    """Mean time of the larger steps."""
    saved_frac: float
    """Share of the requests' time that it saves at least."""

    def advice(self, timeline: Timeline) -> Advice:
        """Return ``--max-num-batched-tokens`` with this budget."""
        return advise(
            "{option} {value:n} (now {now:n}): steps of about {size:n token} took {step_us:us}, larger ones "
            "{larger_us:us} on average, so smaller steps compute prompts about as fast, and "
            "decodes run more often",
            self,
            setting="max_num_batched_tokens",
            value=self.tokens,
            now=batched_tokens(timeline),
            costs="More steps: more work for the host.",
        )


@made_once
def smaller_budget(timeline: Timeline) -> SmallerBudget | None:
    """Return the token budget whose recorded steps show the largest saving of the requests' time.

    Prefill in smaller steps needs more of them. A step more costs every request present the time that the
    step takes beyond its share of the prefill, and gives each decoding request a token, which otherwise takes
    a step of its own. None where throughput counts, also because more load comes than is served, or if no
    recorded size saves ``LEAST_SAVED_FRAC``.
    """
    least = smallest_batched_tokens(timeline)
    steps = timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("busy_us") > 0))
    alone = steps.filter(pl.col("prefill_tokens") == 0)["busy_us"]
    mixed = steps.filter(pl.col("prefill_tokens") > 0).sort("used_tokens")
    if least is None or mixed.height < FEWEST_STEPS or alone.is_empty():
        return None
    if throughput_counts(timeline) or offered_load(timeline).grows:
        return None
    limit, best = int(mixed["used_tokens"].max()) // 2, None  # type: ignore[arg-type]  # of integers
    while limit >= 1:
        sized = mixed.filter(pl.col("used_tokens") >= limit).head(FEWEST_SIZED)
        budget = _saving(timeline, sized, mixed, least, median(alone))
        if budget is not None and (best is None or budget.saved_frac > best.saved_frac):
            best = budget
        limit //= 2
    return best if best is not None and best.saved_frac >= LEAST_SAVED_FRAC else None


def _saving(
    timeline: Timeline, sized: pl.DataFrame, mixed: pl.DataFrame, least: int, decode_us: float
) -> SmallerBudget | None:
    """Return the saving of a budget of the size of some steps; None if smaller steps are not shown to help.

    Args:
        timeline: The engine's trace.
        sized: Recorded steps of about this size.
        mixed: Steps with decodes and prefill.
        least: Smallest budget that vLLM accepts.
        decode_us: Time of a step that only decodes.
    """
    size = round(mean(sized, pl.col("used_tokens")) or 0)
    tokens = max(size, least, 2 * int(mixed["decode_tokens"].max()))  # type: ignore[arg-type]  # of integers
    larger = mixed.filter(pl.col("used_tokens") > tokens)
    if larger.height < FEWEST_SIZED or tokens > MOST_TIMES * size:
        return None
    prefill, larger_us = mean(larger, pl.col("prefill_tokens")) or 0.0, mean(larger, pl.col("busy_us")) or 0.0
    part = pl.col("prefill_tokens") / prefill
    own_us = mean(sized.filter(part < 1), (pl.col("busy_us") - part * larger_us) / (1 - part))
    if own_us is None:
        return None
    host = host_us(timeline) / timeline.steps.filter(RAN > 0).height
    decoding = mean(larger, pl.min_horizontal("decode_tokens", RAN)) or 0.0
    costs_us = (max(0.0, own_us) + host) * (mean(larger, THERE) or 0.0)
    if costs_us > BREAK_EVEN_FRAC * decoding * decode_us:
        return None
    chunk = tokens - (mean(larger, pl.col("decode_tokens")) or 0.0)
    more_steps = larger.height * (prefill / chunk - 1) if chunk > 0 else 0.0
    saved_us = more_steps * (decoding * decode_us - costs_us)
    step_us = mean(sized, pl.col("busy_us")) or 0.0
    return SmallerBudget(tokens, size, step_us, larger_us, saved_us / max(1, timeline.requests_us))
