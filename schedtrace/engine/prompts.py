"""Requests of one trial, random as in vLLM's benchmark or from a workload file."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from schedtrace.engine.run_spec import RANDOM, RunSpec, first_number
from schedtrace.errors import InputError, UsageError
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.workloads import open_workload, random_load
from schedtrace.workloads.formats import FormatOptions, WorkloadFormat, format_of
from schedtrace.workloads.random_load import random_lengths
from schedtrace.workloads.workload_files import OVERRIDDEN, counted_notes

DEFAULT_RANDOM_PROMPTS = random_load.DEFAULT_PROMPTS
DEFAULT_RANDOM_OUTPUT_LEN = random_load.DEFAULT_OUTPUT_LEN


class Prompt(msgspec.Struct, kw_only=True):
    """Request before it is tokenized: a text, or a number of random tokens."""

    text: str | None = None
    input_len: int | None = None
    output_len: int | None = None
    completion: str | None = None
    """Text of the answer; if ``output_len`` is missing, its length is the number of tokens to generate."""
    priority: int = 0
    data_parallel_rank: int | None = None
    """Data-parallel rank that gets the request; None if vLLM's front end chooses."""
    at_s: float | None = None
    """Seconds from the trial's beginning until the request is sent; None if ``request_rate`` determines this
    time."""
    after: int | None = None
    """Index of the request whose answer this turn of a session waits for; None if this request waits for
    none."""
    delay_s: float = 0.0
    """Minimum number of seconds from the answer to the request ``after`` until this request is sent."""


class PromptSet(NamedTuple):
    """Requests of a trial, with notes about them."""

    prompts: list[Prompt]
    notes: list[Message]


def load_prompts(spec: RunSpec) -> list[Prompt]:
    """Return the prompts of ``read_prompts`` without the notes."""
    return read_prompts(spec).prompts


def read_prompts(spec: RunSpec) -> PromptSet:
    """Return the prompts of one trial, the same for every trial and for every run with the same ``spec``.

    Requests of a file with arrival times are sent at these times, unless ``spec`` states otherwise.

    Raises:
        UsageError: If ``--output-len`` is missing, or an option does not apply to the data set.
        InputError: If the file is missing, cannot be read, is of no known format or has no usable request.
    """
    if spec.dataset == RANDOM:
        _refuse_options_of_files(spec)
        output_len = spec.output_len or DEFAULT_RANDOM_OUTPUT_LEN
        lengths = random_lengths(spec.input_len, output_len, range_ratio=spec.range_ratio, seed=spec.seed)
        drawn = islice(lengths, spec.num_prompts or DEFAULT_RANDOM_PROMPTS)
        return PromptSet([Prompt(input_len=prompt, output_len=output) for prompt, output in drawn], [])
    path = Path(spec.dataset)
    if not path.exists():
        msg = f"--dataset {spec.dataset}: no such file; expected 'random' or a workload file"
        raise InputError(msg)
    kind = format_of(path, FormatOptions(None, spec.output_len, spec.time_unit, spec.prefix_block))
    return _sent_by_length(spec, path, kind) if kind.prompts is None else _sent_as_texts(spec, path, kind)


def _sent_as_texts(spec: RunSpec, path: Path, kind: WorkloadFormat) -> PromptSet:
    """Return the requests of a file with prompts but without times."""
    _refuse_options_of_files(spec)
    counts: Counter[str] = Counter()
    rows = kind.prompts(path, counts) if kind.prompts is not None else iter(())
    prompts = [Prompt(**row._asdict()) for _, row in islice(rows, spec.num_prompts)]
    if not prompts:
        msg = f"{path}: no usable prompt in it"
        raise InputError(msg)
    if spec.output_len is not None:
        counts[OVERRIDDEN] = sum(
            prompt.completion is not None or prompt.output_len not in {None, spec.output_len}
            for prompt in prompts
        )
        prompts = [msgspec.structs.replace(prompt, output_len=spec.output_len) for prompt in prompts]
    elif any(prompt.output_len is None and prompt.completion is None for prompt in prompts):
        msg = f"{path}: some prompts have no output_len or output_tokens; give --output-len"
        raise UsageError(msg)
    count = spec.num_prompts or len(prompts)
    repeated = [prompts[i % len(prompts)] for i in range(count)]
    return PromptSet(repeated, [*kind.notes, *counted_notes(counts)])


def _refuse_options_of_files(spec: RunSpec) -> None:
    """Refuse options that apply only to a file with times.

    Raises:
        UsageError: If such an option is set; the text names it.
    """
    for name in ("speedup", "time_unit", "prefix_block"):
        if getattr(spec, name) is not None:
            msg = f"--{name.replace('_', '-')}: {spec.dataset} has no arrival times"
            raise UsageError(msg)


def _sent_by_length(spec: RunSpec, path: Path, kind: WorkloadFormat) -> PromptSet:
    """Return the requests of a file with lengths, each with its time or with the answer that it waits for."""
    own_times = kind.timed and spec.request_rate is None and not spec.at_once and not spec.prequeue
    if spec.speedup is not None and not kind.timed:
        _refuse_options_of_files(spec)
    if spec.speedup is not None and not own_times:
        msg = "--speedup shortens the gaps of the file: it cannot go with --request-rate or --prequeue"
        raise UsageError(msg)
    load = open_workload(
        path,
        num_prompts=spec.num_prompts,
        output_len=spec.output_len,
        speedup=spec.speedup,
        prequeue=not own_times,
        time_unit=spec.time_unit,
        prefix_block=spec.prefix_block,
    )
    if load.later_turns and spec.prequeue:
        msg = f"--prequeue queues all requests at once, and turns of {path} wait for answers"
        raise UsageError(msg)
    places = {request.request_id: place for place, request in enumerate(load)} if load.later_turns else {}
    prompts = [
        Prompt(
            input_len=request.prompt_tokens,
            output_len=request.output_tokens,
            at_s=request.arrived_us / 1e6 if own_times else None,
            after=None if request.after is None else places[request.after],
            delay_s=request.delay_us / 1e6,
        )
        for request in load
    ]
    notes = list(load.notes)
    if own_times:
        first_turns = [prompt.at_s or 0.0 for prompt in prompts if prompt.after is None]
        notes.append(
            say(
                "{requests:n request} are sent at the times in {file:code}, over {span:us}[, and "
                "{turns:n turn} after answers]; --speedup shortens the gaps, --request-rate inf sends all at "
                "once.",
                requests=len(first_turns),
                file=path.name,
                span=max(first_turns) * 1e6,
                turns=load.later_turns or None,
            )
        )
    elif kind.timed:
        notes.append(say("The arrival times in {file:code} are not used.", file=path.name))
    if load.prefix_block is not None:
        notes.append(say("Prompts are random: what they share in {file:code} is not sent.", file=path.name))
    return PromptSet(prompts, notes)


def check_ranks(spec: RunSpec, prompts: list[Prompt]) -> None:
    """Refuse a request for a rank that does not exist.

    Raises:
        UsageError: If there is such a request; the text names the rank and the number of ranks.
    """
    wanted = max((prompt.data_parallel_rank or 0 for prompt in prompts), default=0)
    size = first_number(spec.engine_args, "--data-parallel-size", "-dp")
    if 0 < size <= wanted:
        msg = (
            f"{spec.dataset}: a request asks for data_parallel_rank {wanted}, and there are {size} "
            f"(ranks count from 0): give --data-parallel-size {wanted + 1} or more"
        )
        raise UsageError(msg)


class PromptRequest(msgspec.Struct):
    """Request in the form that vLLM's front end accepts."""

    prompt: Any
    input_tokens: int | None
    """Number of prompt tokens; None for a text, which the front end tokenizes as in production."""
    output_len: int
    priority: int
    data_parallel_rank: int | None = None
    at_s: float | None = None
    after: int | None = None
    """Index of the request whose answer this request waits for; None if it waits for none."""
    delay_s: float = 0.0


def make_requests(
    prompts: list[Prompt], *, seed: int, vocab_size: int, tokenizer: Any
) -> list[PromptRequest]:
    """Return the requests: a text stays unchanged, and a length becomes that many random tokens.

    Token ids are drawn independently, so lengths are exact and prompts share a prefix only by chance. (vLLM's
    benchmark decodes and encodes its ids again, which may change a prompt's length.)

    Raises:
        UsageError: If there is a text, but the engine has no tokenizer.
    """
    import numpy as np

    draw = np.random.default_rng(seed)
    special = getattr(tokenizer, "all_special_ids", None) or []
    ordinary = np.setdiff1d(np.arange(vocab_size), np.asarray(special, dtype=int))
    requests = []
    for prompt in prompts:
        if prompt.text is None:
            ids = draw.choice(ordinary, size=prompt.input_len).tolist()
            content: Any = {"prompt_token_ids": ids}
            count = prompt.input_len
        else:
            if tokenizer is None:
                msg = "this data set has texts, but the model folder has no tokenizer files"
                raise UsageError(msg)
            content, count = prompt.text, None
        output_len = prompt.output_len
        if output_len is None:
            output_len = max(1, len(tokenizer.encode(prompt.completion, add_special_tokens=False)))
        requests.append(
            PromptRequest(
                content,
                count,
                output_len,
                prompt.priority,
                prompt.data_parallel_rank,
                prompt.at_s,
                prompt.after,
                prompt.delay_s,
            )
        )
    return requests
