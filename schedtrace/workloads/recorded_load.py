"""Loads of recorded trials: their requests at their times and, for a replay by step, at their steps.

The load of several engines has the requests of all engines on one clock, each with its rank. Notes state what
a trace does not record about a load, and the assumptions. Hashes of prompts in a trace are converted to
identities of blocks.
"""

import math
from base64 import b64decode
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import polars as pl

from schedtrace.errors import InputError, UsageError
from schedtrace.model.manifest import Manifest
from schedtrace.model.message import Count, Message
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import FIRST_BLOCKS, MARK_CHARACTERS, MARKED_BLOCKS, marks_within
from schedtrace.read.trace import Trace
from schedtrace.timeline.frames import make_gone, offset
from schedtrace.timeline.timeline import WARMUP_TRIAL, make_timeline
from schedtrace.workloads.clients import clients_of
from schedtrace.workloads.workload import LoadRequest, Pass, Workload, make_workload

MARK_BYTES = 3
"""Number of bytes of a mark's hash."""


def identities(hashes: str | None) -> tuple[int, ...]:
    """Return a number for each block up to the last mark; equal beginnings of prompts get equal numbers.

    The number of a marked block is its hash. For a block between two marks, only the next mark shows whether
    two prompts share the block, so its number encodes that mark's hash and the distance from it.
    """
    digests = b64decode(hashes or "")
    marks = [int.from_bytes(digests[at : at + MARK_BYTES]) for at in range(0, len(digests), MARK_BYTES)]
    blocks = marks[:FIRST_BLOCKS]
    for mark, end in zip(marks[FIRST_BLOCKS:], MARKED_BLOCKS[FIRST_BLOCKS:], strict=False):
        blocks += [mark | before << 8 * MARK_BYTES for before in reversed(range(end - len(blocks)))]
    return tuple(blocks)


def prefix_block(header: Header, requests: pl.DataFrame) -> int | None:
    """Return the number of tokens of a hashed block: the size that explains every prompt's number of hashes.

    vLLM hashes blocks of ``block_size`` or, if cache groups differ, smaller blocks. Return None if no hashes
    are recorded, or no size in the header fits.
    """
    hashed = requests.filter(pl.col("prefix_hashes").is_not_null())
    if not hashed.height:
        return None
    groups = [group.block_size for group in header.cache_groups]
    unit = header.settings.get("cache_config.prefix_match_unit")
    sizes = [
        size
        for size in (unit, header.block_size, *groups, math.gcd(*groups))
        if isinstance(size, int) and size > 0
    ]
    marks = pl.col("prefix_hashes").str.len_bytes() // MARK_CHARACTERS
    for size in dict.fromkeys(sizes):
        blocks = pl.col("prompt_tokens") // size
        marked = pl.lit(pl.Series(MARKED_BLOCKS)).search_sorted(blocks, side="right")
        first_only = pl.min_horizontal(blocks, FIRST_BLOCKS)  # as trace schema 3 has it
        if hashed.select(((marks == marked) | (marks == first_only)).all()).item():
            return size
    return None


def found_elsewhere(requests: pl.DataFrame, every: pl.DataFrame, block: int) -> int:
    """Return how many requests found more of their prompt cached than it shares with any other prompt.

    Args:
        requests: Requests of one trial, with ``prefix_hashes`` and ``cached_tokens``.
        every: All arrivals of the trace.
        block: Number of tokens of a hashed block.
    """
    texts = sorted(every["prefix_hashes"].drop_nulls().to_list())
    hits = requests.filter(pl.col("prefix_hashes").is_not_null() & (pl.col("cached_tokens") >= block))
    count = 0
    for text, cached in hits.select("prefix_hashes", "cached_tokens").iter_rows():
        key = text[: marks_within(cached // block) * MARK_CHARACTERS]
        second = bisect_left(texts, key) + 1
        count += second >= len(texts) or not texts[second].startswith(key)
    return count


CUT_SHORT = ("ABORTED", "ERROR")
"""Statuses of requests that did not end normally."""
_FINISHED = (
    "status",
    "finished_us",
    "output_tokens",
    "cached_tokens",
    "abort_us",
    "drafts",
    "drafts_accepted",
)


def from_trace(trace: Trace, trial: int | None = None, *, manifest: Manifest | None = None) -> Workload:
    """Return the load of one trial, or of a whole trace without trials.

    The output of a request that was aborted, failed or had not ended is unknown. Such a request gets its
    ``max_tokens`` as output, and is aborted at the recorded time. Requests that were present when the
    recording began are left out, because a replay cannot restore the tokens that they had computed.

    Args:
        trace: Trace of one engine.
        trial: Trial; None for the first trial after the warm-up, which is 0.
        manifest: Manifest of the run, which states whether requests were queued before the first step.

    Raises:
        UsageError: If there is no such trial.
        InputError: If the record has no requests, or only those of the warm-up.
    """
    trials = trials_of(trace)
    if not trials:
        place = "came while this was recorded" if trace.present.height else f"in this {trace.record}"
        msg = f"{trace.path}: no requests {place}, so no load"
        raise InputError(msg)
    if trial is None:
        measured = [number for number in trials if number != WARMUP_TRIAL]
        if not measured:
            msg = f"{trace.path}: only the warm-up is recorded; ask for trial {WARMUP_TRIAL} to get it"
            raise InputError(msg)
        trial = measured[0]
    elif trial not in trials:
        trials_listed = ", ".join(str(number) for number in trials if number is not None) or "no trials"
        msg = f"{trace.path}: no trial {trial}; it has {trials_listed}"
        raise UsageError(msg)
    return _load(trace, trial, manifest)


def loads_of(trace: Trace, *, manifest: Manifest | None = None) -> list[Workload]:
    """Return the load of each trial, in order, without the warm-up; one load if there are no trials.

    Raises:
        InputError: As for ``from_trace``.
    """
    measured = [trial for trial in trials_of(trace) if trial != WARMUP_TRIAL]
    return [_load(trace, trial, manifest) for trial in measured] or [from_trace(trace)]


def trials_of(trace: Trace) -> list[int | None]:
    """Return the trials with requests, including the warm-up; ``[None]`` if requests name no trial."""
    if not trace.arrivals.height:
        return []
    trials = trace.arrivals["trial"].drop_nulls().unique().sort().to_list()
    return trials or [None]


def _load(trace: Trace, trial: int | None, manifest: Manifest | None) -> Workload:
    prequeue = manifest is not None and manifest.workload is not None and manifest.workload.prequeue
    requests = _requests(trace, trial)
    block = prefix_block(trace.header, requests)
    rows = _timed(requests, trace, trial, prequeue=prequeue)

    def recorded_requests() -> Iterator[LoadRequest]:
        for row in rows.iter_rows(named=True):
            yield LoadRequest(
                request_id=row["request_id"] if not row["nth"] else f"{row['request_id']}#{row['nth'] + 1}",
                arrived_us=row["arrived"],
                prompt_tokens=row["prompt_tokens"],
                output_tokens=row["output"],
                max_tokens=row["max_tokens"],
                priority=row["priority"],
                lora=row["lora"],
                prefix=identities(row["prefix_hashes"]) if block else (),
                front_end_us=row["front_end"],
                queued_step=row["queued_step"],
                abort_us=row["abort"],
                abort_step=row["abort_step"],
                answered_us=row["answered"],
                structured=row["structured"],
                draft_acceptance=row["accepted"],
            )

    name = trace.path.parent.name or trace.path.stem
    return make_workload(
        name if trial is None else f"{name}, trial {trial}",
        "recorded",
        recorded_requests,
        prefix_block=block,
        notes=_notes(trace, requests, block, manifest),
        began_us=int(requests.select(_arrived().min()).item()),
        of_server=trial is None,
        clients=clients_of(
            rows["arrived"].to_list(), rows["answered"].to_list(), rows["abort"].is_not_null().to_list()
        ),
    )


def _requests(trace: Trace, trial: int | None) -> pl.DataFrame:
    """Return the arrivals of a trial in the order of the queue, each with the request's end.

    ``nth``: number of earlier requests with the same id; ``gone_us``: time at which the request ended in a
    gap of the trace; ``cut_short``: whether the request did not end normally.
    """
    nth = pl.int_range(pl.len()).over("request_id").alias("nth")
    ends = trace.finishes.select("request_id", nth, *_FINISHED)
    first = trace.arrivals.filter(~pl.col("streaming_update")).with_columns(nth)
    gone = pl.DataFrame(schema={"request_id": pl.String, "gone_us": pl.Int64})
    if not trace.gaps.is_empty():
        gone = make_gone(make_timeline(trace, whole=True)).select("request_id", "gone_us")
    first = first.join(gone, on="request_id", how="left", maintain_order="left")
    rows = first.join(ends, on=["request_id", "nth"], how="left", maintain_order="left")
    return rows.filter(pl.col("trial").eq_missing(trial)).with_columns(
        cut_short=pl.col("status").is_null() | pl.col("status").is_in(CUT_SHORT)
    )


def _arrived() -> pl.Expr:
    return pl.min_horizontal("arrived_us", "input_queue_us", "queued_us")


def _timed(requests: pl.DataFrame, trace: Trace, trial: int | None, *, prequeue: bool) -> pl.DataFrame:
    """Return times since the load began, and numbers of steps since the trial's first step.

    If clocks disagree, the order of the queue is kept: no request reaches the engine before the one ahead of
    it.
    """
    steps = trace.steps.filter(pl.col("trial").eq_missing(trial)).sort("step")
    first, count, end_us = 0, 0, None
    if steps.height:
        first = steps["step"][0]
        count = steps["step"][-1] - first + 1  # including steps whose lines are missing
        end_us = steps.select(pl.max_horizontal("start_us", "output_us").max()).item()
    reached = pl.coalesce("input_queue_us", "queued_us").cum_max()
    if prequeue:
        reached = reached.max()
    began = _arrived().min()
    room = pl.lit(trace.header.max_model_len, pl.Int64) - pl.col("prompt_tokens")
    most = pl.coalesce("max_tokens", room, "output_tokens")
    output = pl.when("cut_short").then(pl.max_horizontal(most, "output_tokens")).otherwise("output_tokens")
    dropped = pl.when("cut_short").then(pl.coalesce("finished_us", "gone_us", pl.lit(end_us, pl.Int64)))
    left = pl.when("cut_short").then(pl.coalesce("abort_us", dropped))
    rows = requests.with_columns(
        arrived=(_arrived() - began).cast(pl.Float64),
        front_end=(reached - _arrived()).cast(pl.Float64),
        queued_step=(pl.col("step").fill_null(first + count) - first).clip(0),
        output=output.fill_null(1).clip(1),
        dropped=dropped,
        abort=(left - began).cast(pl.Float64),
        answered=(pl.coalesce(left, "finished_us") - began).cast(pl.Float64),
        accepted=pl.when(pl.col("drafts") > 0).then(pl.col("drafts_accepted") / pl.col("drafts")),
    )
    begun = pl.concat([pl.Series([0]), steps["step"] - first + 1])
    begun = begun.gather(steps["start_us"].search_sorted(rows["dropped"].fill_null(0), side="left"))
    never_ended = pl.col("cut_short") & pl.col("finished_us").is_null()
    was_dropped = pl.col("dropped").is_not_null()
    return rows.with_columns(abort_step=pl.when(never_ended).then(count).when(was_dropped).then(begun))


ONE_OF_SEVERAL = "One engine of {ranks}: the load is what reached this one."

_CUT_SHORT, _ENDED = pl.col("cut_short"), pl.col("status").is_not_null()
_OF_REQUESTS = {
    "without a recorded arrival: taken from the queue's.": pl.col("arrived_us").is_null(),
    "without the time of reaching the input queue: taken from when the scheduler got it, which is up to a "
    "step later.": pl.col("input_queue_us").is_null(),
    "aborted or failed: what more they would have generated is not known. They run until the recorded abort, "
    "at most to their limit.": _CUT_SHORT & _ENDED,
    "had not ended when the record ends: aborted there.": _CUT_SHORT & ~_ENDED & pl.col("gone_us").is_null(),
    "ended where steps of the trace are missing, or may have: aborted where that begins.": (
        pl.col("gone_us").is_not_null()
    ),
    "generated nothing: taken as 1 token.": ~_CUT_SHORT & (pl.col("output_tokens") == 0),
    "asked for prompt log-probabilities and did not read the prefix cache; here they do.": (
        pl.col("prompt_logprobs").is_not_null()
    ),
    "with a grammar: how long it took to compile is not in the load.": pl.col("structured"),
}
"""Notes about requests, each with the condition that these requests meet."""


def _notes(
    trace: Trace, requests: pl.DataFrame, block: int | None, manifest: Manifest | None
) -> Iterator[Message]:
    """Yield notes on facts about the load that a trace does not record, and on the assumptions made.

    Args:
        trace: Trace of one engine.
        requests: Arrivals of the load, with their ends.
        block: Tokens per block of the prefixes; None if prefixes are unknown.
        manifest: Manifest of the run; None if there is none.
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
                "Which prompts began alike is not recorded, although prefix caching was on: "
                "the replay shares no prefixes."
            )
        return
    unknown = requests.filter(pl.col("prefix_hashes").is_null() & (pl.col("prompt_tokens") >= size)).height
    if unknown:
        yield say(
            "{requests:n request} whose prompt's beginning is not recorded: they share no prefix.",
            requests=unknown,
        )
    # more: not in schema 3
    hashed = pl.col("prefix_hashes").str.len_bytes() == FIRST_BLOCKS * MARK_CHARACTERS
    beyond = pl.col("prompt_tokens") >= MARKED_BLOCKS[FIRST_BLOCKS] * size
    if longer := requests.filter(hashed & beyond).height:
        yield say(
            "{requests:n request} with prompts of more than {blocks:n block}: what they share "
            "beyond these is not recorded.",
            requests=longer,
            blocks=FIRST_BLOCKS,
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
            "{there:n request} {were} present when the recording began: the replay begins with an empty "
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
    if trace.problems.is_incomplete:
        yield say(
            "Lines of the trace are missing[, {steps:n step} among them]; requests that arrived in them may "
            "be missing, too.",
            steps=trace.problems.missing_steps or None,
        )


def loads_of_run(traces: Sequence[Trace], *, manifest: Manifest | None = None) -> list[Workload]:
    """Return the load of each trial of a run, in order and without the warm-up.

    Each request has its rank and, for ranks in lock-step, the pass before which it arrived.

    Args:
        traces: Traces of all engines of the run, in the order of ranks.
        manifest: Manifest of the run.

    Raises:
        InputError: If no engine has requests, or only those of the warm-up.
    """
    if len(traces) == 1:
        return loads_of(traces[0], manifest=manifest)
    trials = sorted({trial for trace in traces for trial in trials_of(trace)}, key=lambda trial: trial or 0)
    measured = [trial for trial in trials if trial != WARMUP_TRIAL]
    if not measured:
        msg = f"{traces[0].path.parent}: no requests of a trial, so no load"
        raise InputError(msg)
    return [load_of_ranks(traces, trial, manifest=manifest) for trial in measured]


def load_of_ranks(
    traces: Sequence[Trace], trial: int | None, *, manifest: Manifest | None = None
) -> Workload:
    """Return the load of one trial of a run; see ``loads_of_run``."""
    if len(traces) == 1:
        return from_trace(traces[0], trial, manifest=manifest)
    loads = {
        rank: from_trace(trace, trial, manifest=manifest)
        for rank, trace in enumerate(traces)
        if trial in trials_of(trace)
    }
    began = {
        rank: (load.began_us or 0) + offset(traces[rank].header, traces[0].header).us
        for rank, load in loads.items()
    }
    first_us = min(began.values())
    passes = {rank: _passes(traces[rank], trial) for rank in loads}
    first_wave = min((of_rank[0][0] for of_rank in passes.values() if of_rank), default=0)
    requests: list[LoadRequest] = []
    for rank, load in loads.items():
        of = partial(_pass, passes[rank], first_wave)
        later = began[rank] - first_us
        requests += (
            msgspec.structs.replace(
                request,
                data_parallel_rank=rank,
                arrived_us=request.arrived_us + later,
                abort_us=None if request.abort_us is None else request.abort_us + later,
                answered_us=None if request.answered_us is None else request.answered_us + later,
                queued_pass=of(request.queued_step),
                abort_pass=of(request.abort_step) if request.abort_step else None,
            )
            for request in load
        )
    requests.sort(key=lambda request: request.reached_us)
    name = traces[0].path.parent.name
    return make_workload(
        name if trial is None else f"{name}, trial {trial}",
        "recorded",
        partial(iter, requests),
        prefix_block=next(iter(loads.values())).prefix_block,
        notes=_joint_notes(loads.values(), requests),
        began_us=first_us,
        of_server=trial is None,
        clients=clients_of(
            [request.arrived_us for request in requests],
            [request.answered_us for request in requests],
            [request.abort_us is not None for request in requests],
        ),
    )


def without_ranks(load: Workload) -> Workload:
    """Return the load with the ranks removed from its requests."""

    def recorded_requests() -> Iterator[LoadRequest]:
        for request in load:
            yield msgspec.structs.replace(request, data_parallel_rank=None)

    return replace(load, read=recorded_requests)


def _passes(trace: Trace, trial: int | None) -> list[Pass]:
    """Return the pass of each ``schedule()`` call; empty without lock-step or if lines are missing."""
    steps = trace.steps.filter(pl.col("trial").eq_missing(trial)).sort("step")
    whole = steps.height and steps["step"][-1] - steps["step"][0] + 1 == steps.height
    if not whole or steps["wave"].null_count() or steps["step_counter"].null_count():
        return []
    return list(steps.select("wave", "step_counter").iter_rows())


def _pass(passes: Sequence[Pass], first_wave: int, step: int | None) -> Pass | None:
    """Return the pass of the load for a step; for a time after the last step, the next pass."""
    if not passes or step is None:
        return None
    wave, counter = passes[min(step, len(passes) - 1)]
    return wave - first_wave, counter + (step >= len(passes))


def _joint_notes(loads: Iterable[Workload], requests: Sequence[LoadRequest]) -> Iterator[Message]:
    """Yield the notes of all ranks, with numbers of requests added up."""
    by_template: dict[str, list[Message]] = {}
    for load in loads:
        for note in load.notes:
            by_template.setdefault(note.template, []).append(note)
    by_template.pop(ONE_OF_SEVERAL, None)
    for template, notes in by_template.items():
        arguments = dict(notes[0].arguments)
        counts = [note.arguments.get("requests") for note in notes]
        numbers = [count.count for count in counts if isinstance(count, Count)]
        if numbers:
            arguments["requests"] = Count(sum(numbers), "request")
        yield say(template, **arguments)
    if len({request.data_parallel_rank for request in requests if request.prefix}) > 1:
        yield say(
            "Which prompts on different ranks begin alike is not recorded: routed anew, they share no prefix."
        )
