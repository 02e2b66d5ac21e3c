"""What a run is asked to do, and the messages between the supervisor and its engine process."""

from typing import Annotated, Any, Literal

import msgspec

from schedtrace.model.manifest import TrialResult

RANDOM = "random"

Positive = Annotated[int, msgspec.Meta(ge=1)]
AboveZero = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class RunSpec(msgspec.Struct, kw_only=True):
    """One run: workload, trials and vLLM's own arguments."""

    engine_args: list[str]
    """vLLM's command-line arguments as given, ``--model`` included."""
    dataset: str = RANDOM
    """``random``, a ShareGPT ``.json``, or a ``.jsonl`` with prompts or lengths."""
    input_len: Positive = 1024
    output_len: Positive | None = None
    """Tokens to generate; None: 128 for random prompts, the data set's own lengths otherwise."""
    num_prompts: Positive | None = None
    """None: 1000 random prompts, or all of a data set."""
    range_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    request_rate: AboveZero | None = None
    burstiness: AboveZero = 1.0
    trials: Positive = 1
    warmup: Annotated[int, msgspec.Meta(ge=0)] = 1
    prequeue: bool = False
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    keep_prefix_cache: bool = False
    hash_ids: bool = False
    lines: Literal["delta", "full"] | None = None
    """Every step in full, or as what it changes; None: as ``SCHEDTRACE_LINES`` says, else ``delta``."""
    trace: str | None = None
    """How much of the trace is kept, as ``model.trace_bounds`` understands it; None: all, in a plain file."""
    executor: Literal["simulated"] | None = None
    """None: vLLM's own, with the model."""
    gpu: str | None = None
    """Of the simulated executor, as the next two."""
    step_times: str | None = None
    """File of saved step times."""
    noise: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


OWN_OPTIONS = tuple(
    f"--{name.replace('_', '-')}"
    for name in (*RunSpec.__struct_fields__[1:], "model", "output", "label", "force", "config")
)
"""Of ``schedtrace run``; every other option is vLLM's."""


class Phase(msgspec.Struct, tag="phase"):
    """The engine process has come this far with its start."""

    name: str


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """The engine is up."""

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


class Progress(msgspec.Struct, tag="progress"):
    """Requests of the current trial that are finished."""

    finished: int


class TrialDone(msgspec.Struct, tag="trial"):
    """One trial is over."""

    result: TrialResult


class Stopped(msgspec.Struct, tag="stopped"):
    """The engine is shut down in order."""


class Failed(msgspec.Struct, tag="failed"):
    """The engine process gives up."""

    message: str
    usage: bool = False
    """The arguments were wrong, rather than the engine broken."""


class RunTrial(msgspec.Struct, tag="run_trial"):
    """Command: run this trial (0: the warm-up)."""

    trial: int


class Stop(msgspec.Struct, tag="stop"):
    """Command: shut the engine down and end."""


class Start(msgspec.Struct, tag="start"):
    """Command, the first: start the engine."""

    spec: RunSpec


Event = Phase | Ready | Progress | TrialDone | Stopped | Failed
Command = Start | RunTrial | Stop
