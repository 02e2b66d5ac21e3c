"""Specification of a run with vLLM's arguments, and messages between supervisor and engine process."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from schedtrace.model.manifest import TrialResult

RANDOM = "random"

Positive = Annotated[int, msgspec.Meta(ge=1)]
AboveZero = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class RunSpec(msgspec.Struct, kw_only=True):
    """Specification of a run: workload, trials and vLLM's own arguments."""

    engine_args: list[str]
    """Command-line arguments for vLLM as typed, including ``--model``."""
    dataset: str = RANDOM
    """Data set: ``random``, or a workload file."""
    input_len: Positive = 1024
    output_len: Positive | None = None
    """Number of tokens to generate; None: 128 for random prompts, otherwise the data set's own lengths."""
    num_prompts: Positive | None = None
    """Number of prompts; None for 1000 random prompts, or for all prompts of a data set."""
    range_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    request_rate: AboveZero | None = None
    """Requests per second; None for the file's own times, or for all at once if the file has none or
    ``at_once`` is set."""
    at_once: bool = False
    """Whether ``--request-rate inf`` is set."""
    speedup: AboveZero | None = None
    """Factor by which the gaps between the file's own times are shortened."""
    time_unit: Literal["s", "ms", "us"] | None = None
    """Unit of the file's times; None to infer it."""
    prefix_block: Positive | None = None
    """Number of tokens of each block that has an id in the file; None to infer it."""
    burstiness: AboveZero = 1.0
    trials: Positive = 1
    warmup: Annotated[int, msgspec.Meta(ge=0)] = 1
    prequeue: bool = False
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    keep_prefix_cache: bool = False
    hash_ids: bool = False
    lines: Literal["delta", "full"] | None = None
    """Form of the trace's lines; None for the value of ``SCHEDTRACE_LINES``, by default ``delta``."""
    trace: str | None = None
    """Bounds of the trace, in the syntax of ``model.trace_bounds``; None for a plain file without bounds."""
    executor: Literal["simulated"] | None = None
    """Executor to use; None for vLLM's own, which runs the model."""
    gpu: str | None = None
    """Name of the GPU to simulate; this field and the next two apply only to the simulated executor."""
    step_times: str | None = None
    """File of saved step times."""
    noise: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


OWN_OPTIONS = tuple(
    f"--{name.replace('_', '-')}"
    for name in (*RunSpec.__struct_fields__[1:], "model", "output", "label", "force", "config")
    if name != "at_once"
)
"""Options of ``schedtrace run`` itself; all other options are vLLM's."""


class Phase(msgspec.Struct, tag="phase"):
    """Event: the engine process has reached this phase of its start."""

    name: str


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """Event: the engine has started."""

    vllm_version: str
    torch_version: str | None
    device: str
    front_end: str
    engine_args_given: dict[str, Any]
    engine_args_chosen: dict[str, Any]
    config_resolved: dict[str, Any]
    environment: dict[str, str]
    num_prompts: int
    input_tokens: int | None
    output_tokens: int | None
    own_times: bool = False
    """Whether requests are sent at the file's own times."""


class Progress(msgspec.Struct, tag="progress"):
    """Event: number of finished requests of the current trial."""

    finished: int


class TrialDone(msgspec.Struct, tag="trial"):
    """Event: a trial is over."""

    result: TrialResult


class Stopped(msgspec.Struct, tag="stopped"):
    """Event: the engine has shut down properly."""


class Failed(msgspec.Struct, tag="failed"):
    """Event: the engine process has failed."""

    message: str
    usage: bool = False
    """Whether the arguments were wrong; otherwise the engine failed."""


class RunTrial(msgspec.Struct, tag="run_trial"):
    """Command: run this trial (0 is the warm-up)."""

    trial: int


class StopCommand(msgspec.Struct, tag="stop"):
    """Command: shut the engine down and end."""


class Start(msgspec.Struct, tag="start"):
    """First command: start the engine."""

    spec: RunSpec


Event = Phase | Ready | Progress | TrialDone | Stopped | Failed
Command = Start | RunTrial | StopCommand


_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def option_of(engine_args: list[str], name: str) -> str | None:
    """Return the last value of ``--name``, written with dashes or underscores; None if it is absent."""
    option_value = None
    for at, argument in enumerate(engine_args):
        key, _, value = argument.partition("=")
        if key.replace("_", "-") == name:
            option_value = value or (engine_args[at + 1] if at + 1 < len(engine_args) else None)
    return option_value


def any_given(engine_args: list[str], names: Iterable[str]) -> bool:
    """Return whether any of these options is set: with a value, as a flag, or in parts (``--name.key``)."""
    keys = {re.split(r"[=.]", argument, maxsplit=1)[0].replace("_", "-") for argument in engine_args}
    return not keys.isdisjoint(names)


def switched_off(engine_args: list[str], name: str) -> bool:
    """Return whether ``--no-name`` is set and no ``--name`` follows it."""
    off = f"--no-{name.removeprefix('--')}"
    switches = [key for argument in engine_args if (key := argument.replace("_", "-")) in {name, off}]
    return switches[-1:] == [off]


def number_of(engine_args: list[str], name: str) -> int | None:
    """Return the integer value of ``--name`` as vLLM reads it: ``16k``, ``1G``; ``auto`` is -1.

    None if the option is absent or has no such value; vLLM then reports the error.
    """
    text = (option_of(engine_args, name) or "").strip()
    if text.lower() == "auto":
        return -1
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    if match is None or ("." in match[1] and not match[2].islower()):
        return None
    return int(float(match[1]) * _UNITS[match[2]]) if match[2] else int(match[1])


def first_number(engine_args: list[str], *names: str) -> int:
    """Return the integer value of an option with several names; 1 if it is absent or not a number."""
    return next((number for name in names if (number := number_of(engine_args, name))), 1)


def model_of(engine_args: list[str]) -> str | None:
    """Return the value of ``--model``."""
    return option_of(engine_args, "--model")


def model_is_local(engine_args: list[str]) -> bool:
    """Return whether both model and tokenizer are in local folders."""
    model = model_of(engine_args)
    elsewhere = any(argument.startswith("--tokenizer") for argument in engine_args)
    return model is not None and Path(model).is_dir() and not elsewhere
