"""What a trace does not say about its load, and what was assumed."""

from collections.abc import Iterator

import polars as pl

from schedtrace.model.manifest import Manifest
from schedtrace.model.message import Count, Message
from schedtrace.model.say import say
from schedtrace.read.trace import Trace
from schedtrace.workloads.prefixes import CHARACTERS, MOST_BLOCKS, found_elsewhere

ONE_OF_SEVERAL = "One engine of {ranks}: the load is what reached this one."

_CUT_SHORT, _ENDED = pl.col("cut_short"), pl.col("status").is_not_null()
_OF_REQUESTS = {
    "without a recorded arrival: taken from the queue's.": pl.col("arrived_us").is_null(),
    "without the time of reaching the input queue: taken from when the scheduler got it, which is up to a "
    "step later.": pl.col("input_queue_us").is_null(),
    "aborted or failed: what more they would have generated is not known. They run until the recorded abort, "
    "at most to their limit.": _CUT_SHORT & _ENDED,
    "had not ended when the record ends: aborted there.": _CUT_SHORT & ~_ENDED,
    "generated nothing: taken as 1 token.": ~_CUT_SHORT & (pl.col("output_tokens") == 0),
    "asked for prompt log-probabilities and did not read the prefix cache; here they do.": (
        pl.col("prompt_logprobs").is_not_null()
    ),
    "with a grammar: how long it took to compile is not in the load.": pl.col("structured"),
}
"""What is said of those requests for which this is true."""


def recorded_notes(
    trace: Trace, requests: pl.DataFrame, block: int | None, manifest: Manifest | None
) -> Iterator[Message]:
    """The notes on a recorded load.

    Args:
        trace: One engine's.
        requests: Of the load: arrivals with their ends.
        block: Tokens of a block of the prefixes; None: these are unknown.
        manifest: Of the run; None: not at hand.
    """
    for what, which in _OF_REQUESTS.items():
        if count := requests.filter(which).height:
            yield say(f"{{requests:n request}} {what}", requests=count)
    yield from _prefixes(trace, requests, block)
    yield from _engine(trace)
    if manifest is None and trace.header.trial_ids:
        yield say("Without run.json it is not known whether requests were queued before the first step.")


def _prefixes(trace: Trace, requests: pl.DataFrame, block: int | None) -> Iterator[Message]:
    size = block or trace.header.block_size
    if not trace.header.enable_prefix_caching or not size:
        return
    if block is None:
        if requests.filter(pl.col("prompt_tokens") >= size).height:
            yield say(
                "Which prompts began alike is not recorded, though prefix caching was on: none share one."
            )
        return
    unknown = requests.filter(pl.col("prefix_hashes").is_null() & (pl.col("prompt_tokens") >= size)).height
    if unknown:
        yield say(
            "{requests:n request} whose prompt's beginning is not recorded: they share no prefix.",
            requests=unknown,
        )
    hashed = pl.col("prefix_hashes").str.len_bytes() == MOST_BLOCKS * CHARACTERS
    if longer := requests.filter(hashed & (pl.col("prompt_tokens") >= (MOST_BLOCKS + 1) * size)).height:
        yield say(
            "{requests:n request} with prompts of more than {blocks:n block}: what they share "
            "beyond is not recorded.",
            requests=longer,
            blocks=MOST_BLOCKS,
        )
    if elsewhere := found_elsewhere(requests, trace.arrivals, size):
        yield say(
            "{requests:n request} found more of their prompt in the cache than other prompts "
            "begin with, such as an earlier answer: a replay computes that again.",
            requests=elsewhere,
        )


def _engine(trace: Trace) -> Iterator[Message]:
    if there := trace.present.height:
        yield say(
            "{there:n request} {were} there when the recording began: the replay begins with an empty "
            "engine, without them.",
            there=there,
            were="was" if there == 1 else "were",
        )
    if sessions := trace.arrivals.filter("streaming_update")["request_id"].n_unique():
        template = "{sessions:n streaming session}: only the first part of each is in the load."
        yield say(template, sessions=sessions)
    if trace.steps["encoder_slots_free"].is_not_null().any():
        yield say("The model has an encoder: images and audio of the prompts are not recorded.")
    external = pl.LazyFrame(schema={"external_tokens": pl.Int64})
    brought = trace.large.get("admitted", external).filter(pl.col("external_tokens") > 0)
    if count := brought.select(pl.len()).collect().item():
        template = "{requests:n request} got tokens from a KV connector, which the load does not have."
        yield say(template, requests=count)
    if (ranks := trace.header.data_parallel_size or 1) > 1:
        yield say(ONE_OF_SEVERAL, ranks=Count(ranks, "data-parallel rank"))
    if trace.problems.missing_steps or trace.problems.garbled_lines:
        yield say("Lines of the trace are missing: so may be requests that arrived there.")
