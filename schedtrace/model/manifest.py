"""The files of a run folder: ``run.json``, ``front-end-<pid>.jsonl`` and the names of its traces.

``run.json`` describes a run, its origin and how it ended. A trace is one file, ``engine-0.jsonl``, or parts
``engine-0.000000.jsonl.zst`` and so on; the path of a trace in parts has ``*`` for the number.
"""

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from schedtrace.errors import InputError
from schedtrace.model import safe_files
from schedtrace.model.printable import json_of
from schedtrace.model.safe_files import opened

PLAIN = "engine-*.jsonl"
PARTS = "engine-*.jsonl.zst"
_PART = re.compile(r"(engine-[^.]*)\.(\d{6,}|\*)\.jsonl\.zst")


def plain_name(rank: int) -> str:
    """Return the file name of an engine's trace that is one plain file."""
    return f"engine-{rank}.jsonl"


def part_name(rank: int, number: int | None = None) -> str:
    """Return the name of a part of an engine's trace; None stands for all parts."""
    return f"engine-{rank}.{'*' if number is None else f'{number:06}'}.jsonl.zst"


def is_in_parts(path: Path) -> bool:
    """Return whether a path is that of a part, or stands for all parts of a trace."""
    return _PART.fullmatch(path.name) is not None


def is_trace(path: Path) -> bool:
    """Return whether a path's name is that of a trace or of a part."""
    return path.match(PLAIN) or is_in_parts(path)


def trace_of(path: Path) -> Path:
    """Return the path of the trace that a file belongs to; a plain file is its own trace."""
    match = _PART.fullmatch(path.name)
    return path if match is None else path.with_name(f"{match[1]}.*.jsonl.zst")


def plain_of(trace: Path) -> str:
    """Return the name of the plain file with the same lines as this trace."""
    match = _PART.fullmatch(trace.name)
    return trace.name if match is None else f"{match[1]}.jsonl"


def part_number(part: Path) -> int:
    """Return a part's number; 0 for a plain file."""
    match = _PART.fullmatch(part.name)
    return int(match[2]) if match and match[2] != "*" else 0


def files_of(trace: Path) -> list[Path]:
    """Return the files of a trace in the order of their numbers; an empty list if all parts are gone."""
    match = _PART.fullmatch(trace.name)
    if match is None or match[2] != "*":
        return [trace]
    parts = [path for path in trace.parent.glob(PARTS) if trace_of(path) == trace]
    return sorted(parts, key=part_number)


def traces_in(folder: Path) -> list[Path]:
    """Return the traces in a folder in the order of ranks."""
    traces = {*folder.glob(PLAIN), *map(trace_of, filter(is_in_parts, folder.glob(PARTS)))}
    return sorted(traces, key=_rank)


def _rank(trace: Path) -> tuple[int, str]:
    digits = "".join(character for character in trace.name.split(".")[0] if character.isdigit())
    return int(digits or 0), trace.name


SCHEMA_VERSION = 1
OFFLINE = "LLMEngine"
ONLINE = "AsyncLLM"
FILE_NAME = "run.json"
LARGEST = 2**26
"""Maximum bytes of a manifest that are read; a longer manifest is therefore invalid."""

Status = Literal["starting", "running", "finished", "interrupted", "failed", "attached"]
ENDED_EARLY = frozenset({"running", "interrupted", "failed"})
"""Statuses of a run whose last trial may be incomplete."""


class RunWorkload(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Requests of one trial, and the way in which they are sent."""

    dataset: str
    num_prompts: int
    input_tokens: int | None = None
    """Prompt tokens per trial; None if only the engine's front end tokenizes."""
    output_tokens: int | None = None
    """Requested output tokens per trial: the sum of ``max_tokens``."""
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float = 0.0
    """Share by which random lengths may be above or below ``input_len`` and ``output_len``."""
    request_rate: float | None = None
    """Requests per second; None if all requests are sent at once, or at the file's times."""
    own_times: bool = False
    """Whether requests are sent at the times in the file."""
    speedup: float | None = None
    """Factor by which the gaps between the file's times are shortened."""
    burstiness: float = 1.0
    prequeue: bool = False
    seed: int = 0
    warmup_requests: int = 0
    keep_prefix_cache: bool = False
    notes: list[str] = []
    """Notes on data that was left out or assumed when the file was read."""


class TrialResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Result of a trial as the front end measured it; the trace has the rest."""

    trial: int
    elapsed_s: float
    num_requests: int
    input_tokens: int
    output_tokens: int
    prefix_cache_reset: bool | None = None
    """Whether the cache was emptied before this trial; None if the run did not ask for it."""


class Manifest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Description of a run. Fields are added with a default, never renamed or retyped."""

    schema_version: int = SCHEMA_VERSION
    schedtrace_version: str
    status: Status
    label: str | None = None
    started_at: str
    """Start of the run in ISO 8601, UTC."""
    command: list[str] = []
    host: str | None = None
    cpu_count: int | None = None
    python_version: str | None = None
    vllm_version: str | None = None
    torch_version: str | None = None
    device: str | None = None
    environment: dict[str, str] = {}
    """Variables ``VLLM_*``, and schedtrace's own, of the front end's process, with secrets hidden."""
    front_end: str | None = None
    """``LLMEngine`` (used by ``LLM.generate``) or ``AsyncLLM`` (used by ``vllm serve``)."""
    engine_args_given: dict[str, Any] = {}
    engine_args_chosen: dict[str, Any] = {}
    """Arguments that schedtrace added because it could determine their values (such as a CPU's KV cache
    size)."""
    config_resolved: dict[str, Any] = {}
    """vLLM's own configuration after it resolved every default: section -> field -> value."""
    workload: RunWorkload | None = None
    trials_asked: int | None = None
    trials: list[TrialResult] = []
    error: str | None = None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``run.json`` so that a reader sees the old or the new version, never a part of one.

    Raises:
        OSError: If the disk is full, or the folder is gone or read-only; the old file stays.
    """
    safe_files.replace(folder / FILE_NAME, msgspec.json.format(json_of(manifest), indent=2) + b"\n")


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a run folder; None if there is none.

    Raises:
        InputError: If the manifest exists but cannot be parsed.
    """
    path = folder / FILE_NAME
    try:
        with opened(path) as file:
            content = file.read(LARGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror})"
        raise InputError(msg) from error
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{path}: not a manifest of a schedtrace run ({error})"
        raise InputError(msg) from error
    if manifest.schema_version > SCHEMA_VERSION:
        msg = (
            f"{path}: written by schedtrace {manifest.schedtrace_version} with schema version "
            f"{manifest.schema_version}, this one reads up to {SCHEMA_VERSION}; upgrade schedtrace"
        )
        raise InputError(msg)
    return manifest


OFFLINE_CONTEXT = "LLM_CLASS"
"""Usage context in which vLLM runs ``LLM(...)``."""


class Configured(msgspec.Struct, omit_defaults=True, tag="configured", tag_field="type", kw_only=True):
    """Configuration that vLLM made from the arguments of an engine."""

    at_unix_us: int
    usage_context: str | None = None
    """Usage context of vLLM: ``LLM_CLASS``, ``OPENAI_API_SERVER`` or ``ENGINE_CONTEXT``."""
    given: dict[str, Any] = {}
    """Arguments that differ from vLLM's default; secrets are hidden, and structured values are not shown."""
    derived: dict[str, Any] = {}
    """Arguments of the scheduler and the cache that were not set, with the values that vLLM chose."""
    context_defaults: dict[str, dict[str, int]] = {}
    """Defaults of ``max_num_seqs`` and ``max_num_batched_tokens`` on this platform, by usage context (vLLM
    0.12 and newer). vLLM adapts these to the model and to other arguments.
    """


class RequestRefusal(msgspec.Struct, omit_defaults=True, tag="refused", tag_field="type", kw_only=True):
    """Request that the front end rejected before it reached an engine."""

    at_unix_us: int
    reason: str
    """Limit that the request exceeded: ``max_num_queued_reqs`` or ``max_num_queued_tokens``."""


FrontEndLine = Configured | RequestRefusal
