"""The requests of one trial: random as in vLLM's benchmark, ShareGPT, or a JSONL file of one's own."""

from pathlib import Path
from typing import Any

import msgspec

from schedtrace.engine.spec import RANDOM, Positive, RunSpec
from schedtrace.errors import InputError, UsageError

DEFAULT_RANDOM_PROMPTS = 1000
DEFAULT_RANDOM_OUTPUT_LEN = 128
"""Both as in ``vllm bench throughput``."""


class Prompt(msgspec.Struct, kw_only=True):
    """One request before it is tokenized: a text, or a number of random tokens."""

    text: str | None = None
    input_len: int | None = None
    output_len: int | None = None
    """None: as many tokens as ``completion`` has."""
    completion: str | None = None
    priority: int = 0


class Row(msgspec.Struct):
    """One line of a JSONL data set: ``prompt`` or ``input_len``, and how much to generate."""

    prompt: str | None = None
    input_len: Positive | None = None
    output_len: Positive | None = None
    priority: int = 0


def load_prompts(spec: RunSpec) -> list[Prompt]:
    """The prompts of one trial, the same for every trial and for every run with the same ``spec``.

    Raises:
        UsageError: the data set is of no kind known here, or ``--output-len`` is missing.
        InputError: it is missing, malformed or empty.
    """
    if spec.dataset == RANDOM:
        return _random(spec)
    path = Path(spec.dataset)
    if path.suffix not in {".json", ".jsonl"}:
        msg = f"--dataset {spec.dataset}: expected 'random', a ShareGPT .json or a .jsonl file"
        raise UsageError(msg)
    try:
        content = path.read_bytes()
    except OSError as error:
        msg = f"--dataset {path}: {error.strerror}"
        raise InputError(msg) from error
    prompts = _sharegpt(path, content) if path.suffix == ".json" else _jsonl(path, content)
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


def _random(spec: RunSpec) -> list[Prompt]:
    """Lengths uniform in ``[len * (1 - range_ratio), len * (1 + range_ratio)]``, as vLLM's benchmark."""
    import random

    draw = random.Random(spec.seed)  # noqa: S311  # a workload, not a secret
    output_len = spec.output_len or DEFAULT_RANDOM_OUTPUT_LEN

    def length(mean: int) -> int:
        spread = int(mean * spec.range_ratio)
        return max(1, draw.randint(mean - spread, mean + spread))

    return [
        Prompt(input_len=length(spec.input_len), output_len=length(output_len))
        for _ in range(spec.num_prompts or DEFAULT_RANDOM_PROMPTS)
    ]


class Turn(msgspec.Struct):
    """One side of a ShareGPT conversation."""

    value: str


class Conversation(msgspec.Struct):
    """One entry of a ShareGPT file."""

    conversations: list[Turn] = []


def _sharegpt(path: Path, content: bytes) -> list[Prompt]:
    """First question and answer of every conversation that has both."""
    try:
        entries = msgspec.json.decode(content, type=list[Conversation])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{path}: not a ShareGPT file, a list of {{'conversations': [{{'value': ...}}, ...]}} ({error})"
        raise InputError(msg) from error
    pairs = [entry.conversations[:2] for entry in entries if len(entry.conversations) > 1]
    return [Prompt(text=question.value, completion=answer.value) for question, answer in pairs]


def _jsonl(path: Path, content: bytes) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=Row)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            msg = f"{path}:{number}: {error}"
            raise InputError(msg) from error
        if (row.prompt is None) == (row.input_len is None):
            msg = f"{path}:{number}: give either prompt (a text) or input_len (a number of random tokens)"
            raise InputError(msg)
        prompts.append(
            Prompt(text=row.prompt, input_len=row.input_len, output_len=row.output_len, priority=row.priority)
        )
    return prompts


class Request(msgspec.Struct):
    """One request as it is handed to vLLM's front end."""

    prompt: Any
    input_tokens: int | None
    """None: a text, which the front end tokenizes as in production."""
    output_len: int
    priority: int


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
        requests.append(Request(given, count, output_len, prompt.priority))
    return requests
