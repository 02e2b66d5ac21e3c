"""Prompts that take most of the steps' prefill tokens: who holds the token budget."""

import polars as pl

from schedtrace.timeline.frames import Frames

MOST_FRAC = 0.5
"""Half of a step's prefill tokens."""
SHORT_FRAC = 0.25
"""A prompt is short beside one at least four times as long: else they are of a kind."""


def prefills(frames: Frames) -> pl.DataFrame:
    """One row per step and prompt that it computed a part of: ``step``, ``request_id``, ``prompt_tokens``,
    ``scheduled_tokens`` and ``computed_tokens``, as in ``timeline.requests``.
    """  # noqa: D205  # the columns are the summary
    about = frames.first_arrivals.select("request_id", "prompt_tokens")
    begun = frames.stretches.join(about.lazy(), on="request_id").filter(
        pl.col("computed_tokens") < pl.col("prompt_tokens")
    )
    # A stretch of several steps goes on computing the prompt, but may decode in its last ones.
    rows = begun.with_columns(step=pl.int_ranges("step", pl.col("last_step") + 1), at=pl.lit(0)).collect()
    return (
        rows.with_columns(number=pl.int_ranges(0, pl.col("step").list.len()))
        .explode("step", "number")
        .with_columns(pl.col("computed_tokens") + pl.col("number") * pl.col("scheduled_tokens"))
        .filter(pl.col("computed_tokens") < pl.col("prompt_tokens"))
        .select("step", "request_id", "prompt_tokens", "scheduled_tokens", "computed_tokens")
    )


def long_prefills(frames: Frames) -> pl.DataFrame:
    """Steps of whose prefill tokens one long prompt took at least half.

    A prompt is long if it is larger than the token budget and the usual prompt is short beside it: many of
    one size are a full device.

    Columns: ``step``, ``request_id``, ``prompt_tokens``, ``scheduled_tokens`` and ``prefill_tokens`` (of all
    prompts in this step).
    """
    came = frames.arrivals.filter(~pl.col("streaming_update"))
    prompts = pl.concat([frames.present["prompt_tokens"], came["prompt_tokens"]])
    usual = prompts.quantile(0.5, "lower") or 0
    return (
        prefills(frames)
        .with_columns(prefill_tokens=pl.col("scheduled_tokens").sum().over("step"))
        .filter(
            (pl.col("prompt_tokens") > frames.token_budget)
            & (SHORT_FRAC * pl.col("prompt_tokens") >= usual)
            & (pl.col("scheduled_tokens") >= MOST_FRAC * pl.col("prefill_tokens"))
        )
        .sort("step", "scheduled_tokens", descending=[False, True])
        .unique("step", keep="first", maintain_order=True)
        .select("step", "request_id", "prompt_tokens", "scheduled_tokens", "prefill_tokens")
    )
