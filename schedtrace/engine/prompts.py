"""The requests of one trial: random as in vLLM's benchmark, or those of a workload file."""

from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from schedtrace.engine.run_spec import RANDOM, RunSpec, first_number
from schedtrace.errors import InputError, UsageError
from schedtrace.workloads import open_workload, random_load
from schedtrace.workloads.formats import OwnRow, format_of, own_rows
from schedtrace.workloads.random_load import random_lengths
from schedtrace.workloads.sharegpt import exchanges

DEFAULT_RANDOM_PROMPTS = random_load.DEFAULT_PROMPTS
DEFAULT_RANDOM_OUTPUT_LEN = random_load.DEFAULT_OUTPUT_LEN


class Prompt(OwnRow, kw_only=True):
    """One request before it is tokenized: a text, or a number of random tokens."""

    completion: str | None = None
    """Without ``output_len`` as many tokens are generated as it has."""


def load_prompts(spec: RunSpec) -> list[Prompt]:
    """The prompts of one trial, the same for every trial and for every run with the same ``spec``.

    Of a trace with arrival times only the lengths are taken: ``--request-rate`` says when requests arrive.

    Raises:
        UsageError: ``--output-len`` is missing.
        InputError: the file is missing, cannot be read, is of no known format or has no usable request.
    """
    if spec.dataset == RANDOM:
        return _random(spec)
    path = Path(spec.dataset)
    if not path.exists():
        msg = f"--dataset {spec.dataset}: no such file; expected 'random' or a workload file"
        raise InputError(msg)
    match format_of(path).source:
        case "sharegpt":
            prompts = [
                Prompt(text=question, completion=answer)
                for _, question, answer in islice(exchanges(path), spec.num_prompts)
            ]
        case "jsonl":
            prompts = [
                Prompt(**msgspec.structs.asdict(row)) for _, row in islice(own_rows(path), spec.num_prompts)
            ]
        case _:
            prompts = [
                Prompt(input_len=request.prompt_tokens, output_len=request.output_tokens)
                for request in open_workload(path, num_prompts=spec.num_prompts)
            ]
    if not prompts:
        msg = f"{path}: no usable prompt in it"
        raise InputError(msg)
    if spec.num_prompts is not None:
        prompts = [prompts[i % len(prompts)] for i in range(spec.num_prompts)]
    if spec.output_len is not None:
        prompts = [msgspec.structs.replace(prompt, output_len=spec.output_len) for prompt in prompts]
    elif any(prompt.output_len is None and prompt.completion is None for prompt in prompts):
        msg = f"{path}: some prompts have no output_len; give --output-len"
        raise UsageError(msg)
    return prompts


def check_ranks(spec: RunSpec, prompts: list[Prompt]) -> None:
    """Refuse a request for an engine that there will not be.

    Raises:
        UsageError: which rank, and how many there are.
    """
    wanted = max((prompt.data_parallel_rank or 0 for prompt in prompts), default=0)
    size = first_number(spec.engine_args, "--data-parallel-size", "-dp")
    if 0 < size <= wanted:
        msg = (
            f"{spec.dataset}: a request asks for data_parallel_rank {wanted}, and there are {size} "
            f"(ranks count from 0): give --data-parallel-size {wanted + 1} or more"
        )
        raise UsageError(msg)


def _random(spec: RunSpec) -> list[Prompt]:
    output_len = spec.output_len or DEFAULT_RANDOM_OUTPUT_LEN
    lengths = random_lengths(spec.input_len, output_len, range_ratio=spec.range_ratio, seed=spec.seed)
    count = spec.num_prompts or DEFAULT_RANDOM_PROMPTS
    return [Prompt(input_len=prompt, output_len=output) for prompt, output in islice(lengths, count)]


class Request(msgspec.Struct):
    """One request as it is handed to vLLM's front end."""

    prompt: Any
    input_tokens: int | None
    """None: a text, which the front end tokenizes as in production."""
    output_len: int
    priority: int
    data_parallel_rank: int | None = None


def make_requests(prompts: list[Prompt], *, seed: int, vocab_size: int, tokenizer: Any) -> list[Request]:
    """Random tokens for lengths; texts as they are.

    Random prompts are token ids, each drawn for itself, so lengths are exact and no two prompts share a
    prefix. (vLLM's benchmark decodes and encodes its ids again, which may change a prompt's length.)

    Raises:
        UsageError: a text, but the engine has no tokenizer.
    """
    import numpy as np

    draw = np.random.default_rng(seed)
    special = getattr(tokenizer, "all_special_ids", None) or []
    ordinary = np.setdiff1d(np.arange(vocab_size), np.asarray(special, dtype=int))
    requests = []
    for prompt in prompts:
        if prompt.text is None:
            ids = draw.choice(ordinary, size=prompt.input_len).tolist()
            given: Any = {"prompt_token_ids": ids}
            count = prompt.input_len
        else:
            if tokenizer is None:
                msg = "this data set has texts, but the model folder has no tokenizer files"
                raise UsageError(msg)
            given, count = prompt.text, None
        output_len = prompt.output_len
        if output_len is None:
            output_len = max(1, len(tokenizer.encode(prompt.completion, add_special_tokens=False)))
        requests.append(Request(given, count, output_len, prompt.priority, prompt.data_parallel_rank))
    return requests
