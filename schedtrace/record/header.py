"""Header of a trace: versions, host, device and every setting that affects scheduling.

An untested release of vLLM (``docs/compatibility.md``) is recorded in the same way, with a notice, because
recording verifies its assumptions whenever it starts.
"""

import contextlib
import dataclasses
import os
import platform
import time
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

from schedtrace.model.printable import hide_secrets
from schedtrace.model.trace import SCHEMA_VERSION, Header
from schedtrace.model.trace_facts import CacheGroup
from schedtrace.record import clocks
from schedtrace.record.allocation import managers_of, not_own, stand_in
from schedtrace.record.clocks import Anchor
from schedtrace.record.marks.exits import places, sees_preemptions, unknown_guards
from schedtrace.record.marks.guards import registered_guards
from schedtrace.record.marks.marking import Instrumented
from schedtrace.record.queues import Queues
from schedtrace.record.settings import Settings
from schedtrace.record.vllms_own import TESTED_RELEASES, is_own, is_tested, package_version, vllm_version
from schedtrace.version import __version__


def notices_about(version: str) -> list[str]:
    """Return the notices about this release of vLLM; empty if the release was tested."""
    if is_tested(version):
        return []
    tested = ", ".join(TESTED_RELEASES)
    return [f"vLLM {version} has not been tested with this version of schedtrace (tested: {tested})"]


def make_header(
    scheduler: Any, traced: type, chosen: Settings, anchor: Anchor, *, attached: bool = False
) -> Header:
    """Return the header of a scheduler's trace.

    Args:
        scheduler: Scheduler of vLLM.
        traced: Class that records the scheduler.
        chosen: Settings of the recording, from the environment or a client.
        anchor: Moment at which the trace's clock is 0.
        attached: Whether the scheduler has run before.

    Raises:
        AttributeError: If ``scheduler`` lacks an attribute that every V1 scheduler of vLLM has.
    """
    config = scheduler.vllm_config
    parallel = config.parallel_config
    chosen_class = next(c for c in traced.__mro__ if not c.__module__.startswith("schedtrace.record."))
    instrumented: Instrumented = traced._schedtrace_instrumented  # type: ignore[attr-defined]  # of such a class
    facts: dict[str, Any] = {}
    failed: list[str] = []
    try:
        facts = engine_facts(scheduler)
    except Exception as error:
        failed = [f"the engine's settings and cache groups could not be read: {error!r}"]
    return Header(
        schema_version=SCHEMA_VERSION,
        schedtrace_version=__version__,
        vllm_version=vllm_version(),
        torch_version=package_version("torch"),
        python_version=platform.python_version(),
        host=platform.node(),
        device=device_name(config),
        pid=os.getpid(),
        engine_rank=data_parallel_rank(parallel),
        wall_anchor_us=anchor.wall_us,
        **clocks.facts(anchor),
        clock="virtual" if getattr(time, "virtual", False) else "monotonic",  # a simulation replaces it
        scheduler_class=f"{chosen_class.__module__}.{chosen_class.__qualname__}",
        async_scheduling=getattr(scheduler.scheduler_config, "async_scheduling", None),
        exits_via="source" if instrumented.classes and not instrumented.refused else "inferred",
        exit_sites=places(instrumented.sites),
        unknown_guards=unknown_guards(instrumented.sites),
        foreign_queues=Queues(scheduler).foreign(scheduler),
        registered_causes={guard.cause: guard.meaning for guard in registered_guards().guards},
        model=str(config.model_config.model),
        max_model_len=scheduler.max_model_len,
        token_budget=scheduler.max_num_scheduled_tokens,
        max_num_running_reqs=scheduler.max_num_running_reqs,
        block_size=getattr(scheduler, "block_size", None),
        kv_blocks_total=getattr(
            getattr(scheduler.kv_cache_manager, "block_pool", None), "num_gpu_blocks", None
        ),
        enable_prefix_caching=getattr(scheduler.cache_config, "enable_prefix_caching", None),
        scheduler_config=hide_secrets(plain_fields(scheduler.scheduler_config)),
        attached=attached,
        trial_ids=chosen.trial_ids,
        hashed_ids=chosen.hash_ids,
        preemptions_recorded=_preemptions_recorded(scheduler, instrumented),
        notices=_notices(scheduler, instrumented) + failed,
        device_memory_bytes=device_memory_bytes(config),
        **facts,
    )


def _notices(scheduler: Any, instrumented: Instrumented) -> list[str]:
    """Return the notices before the first step of a recording, mainly about facts that it will lack."""
    notices = notices_about(vllm_version())
    notices += [f"exits cannot be recorded from {refused}" for refused in instrumented.refused]
    notices += [f"guards of another package cannot be loaded: {why}" for why in registered_guards().failed]
    manager: Any = type(scheduler.kv_cache_manager)  # hashable, as every class
    foreign = not_own(scheduler.kv_cache_manager)
    if refused := stand_in(manager).refused or (foreign and f"{foreign}: it is not vLLM's own"):
        notices.append(f"which limit makes an allocation fail cannot be told from {refused}")
    pool = getattr(scheduler.kv_cache_manager, "block_pool", None)
    if pool is not None and not is_own(pool):
        notices.append(f"free KV blocks are not recorded: {type(pool).__qualname__} is not vLLM's own")
    if not _preemptions_recorded(scheduler, instrumented):
        notices.append("this scheduler has no _preempt_request: preemptions are not recorded")
    if not hasattr(scheduler, "_free_request"):
        notices.append("this scheduler has no _free_request: finished requests are not recorded")
    return notices


def _preemptions_recorded(scheduler: Any, instrumented: Instrumented) -> bool:
    """Return whether preemptions are recorded, by a hooked method or by marks in ``schedule()`` itself."""
    return hasattr(scheduler, "_preempt_request") or sees_preemptions(instrumented.sites)


def data_parallel_rank(parallel: Any) -> int:
    """Return the data-parallel rank; independent dense ranks store it only in ``data_parallel_index``."""
    index = getattr(parallel, "data_parallel_index", None)
    return int(index or getattr(parallel, "data_parallel_rank", None) or 0)


def plain_fields(config: Any) -> dict[str, Any]:
    """Return a configuration's fields; any value but a bool, number, text or None is converted to text."""
    fields = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        plain = value is None or isinstance(value, bool | int | float | str)
        fields[field.name] = value if plain else str(value)
    return fields


def device_name(config: Any) -> str:
    """Return vLLM's name of the device, or its type, or the name of the simulated device."""
    from vllm.platforms import current_platform

    with contextlib.suppress(Exception):
        return str(config.additional_config["schedtrace"]["device"])
    try:
        return str(current_platform.get_device_name())
    except Exception:
        return str(getattr(current_platform, "device_type", "unknown"))


def device_memory_bytes(config: Any) -> int | None:
    """Return the memory of a GPU in bytes; None on a CPU, for a simulated device, or if unknown."""
    from vllm.platforms import current_platform

    try:
        if current_platform.device_type == "cpu" or "schedtrace" in (config.additional_config or {}):
            return None
        return int(current_platform.get_device_total_memory())
    except Exception:
        return None


WHOLE = ("cache_config", "parallel_config", "speculative_config")
"""Sections of vLLM's configuration of which every setting is recorded, like ``scheduler_config``."""
LISTED = {
    "lora_config": ("max_loras", "max_cpu_loras", "max_lora_rank"),
    "kv_transfer_config": ("kv_connector", "kv_role", "kv_load_failure_policy"),
    "speculative_config": ("max_num_new_slots_for_drafting",),
    "compilation_config": ("cudagraph_mode", "max_cudagraph_capture_size", "cudagraph_capture_sizes"),
    "model_config": (
        "enforce_eager",
        "dtype",
        "quantization",
        "runner_type",
        "is_hybrid",
        "renderer_num_workers",
    ),
}
"""Settings recorded in addition to ``WHOLE``; most concern a model's execution, and vLLM derives some."""
OF_EXPERTS = ("step_interval", "use_async", "policy", "communicator")
"""Recorded settings of expert load balancing (EPLB), if it is on."""
MOST_ENTRIES = 512
"""Maximum length of a list that is recorded; vLLM captures graphs of about 70 sizes."""
ENVIRONMENT = ("VLLM_CPU_KVCACHE_SPACE",)
"""Recorded environment variables that override a setting of vLLM."""
OF_CONFIG = ("num_lookahead_tokens", "num_speculative_tokens", "use_v2_model_runner")
OF_SCHEDULER = (
    "num_lookahead_tokens",
    "num_spec_tokens",
    "draft_slots",
    "num_prefill_lookahead",
    "max_num_encoder_input_tokens",
    "use_eagle",
    "use_eagle_block_drop",
)


def engine_facts(scheduler: Any) -> dict[str, Any]:
    """Return the fields of the header that depend on what this scheduler's vLLM provides."""
    config = scheduler.vllm_config
    parallel = getattr(config, "parallel_config", None)
    executor = getattr(getattr(scheduler, "structured_output_manager", None), "executor", None)
    return {
        "cache_groups": cache_groups(scheduler),
        "kv_block_bytes": kv_block_bytes(scheduler),
        "batches_in_flight": batches_in_flight(config),
        "pipeline_parallel_size": getattr(parallel, "pipeline_parallel_size", None),
        "data_parallel_size": getattr(parallel, "data_parallel_size", None),
        "grammar_threads": getattr(executor, "_max_workers", None),
        "settings": settings(scheduler),
    }


def batches_in_flight(config: Any) -> int | None:
    """Return the maximum number of batches in flight as ``EngineCore`` determines it."""
    if isinstance(batches := getattr(config, "max_concurrent_batches", None), int):
        return batches
    stages = getattr(getattr(config, "parallel_config", None), "pipeline_parallel_size", None)
    if stages is None:
        return None
    overlapped = getattr(config.scheduler_config, "async_scheduling", False)
    return 2 if overlapped and stages == 1 else int(stages)


def cache_groups(scheduler: Any) -> list[CacheGroup]:
    """Return the KV cache groups; empty if this release does not expose them."""
    groups = getattr(getattr(scheduler, "kv_cache_config", None), "kv_cache_groups", ())
    managers = managers_of(scheduler.kv_cache_manager)
    described = []
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        manager = managers[number] if number < len(managers) else None
        described.append(
            CacheGroup(
                kind=type(spec).__name__.removesuffix("Spec"),
                block_size=getattr(manager, "block_size", spec.block_size),
                layers=len(group.layer_names),
                window=getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None),
                speculative_blocks=getattr(spec, "num_speculative_blocks", None),
                cache_mode=getattr(spec, "mamba_cache_mode", None),
                admission_cap=getattr(manager, "max_admission_blocks_per_request", None),
                retained_tokens=getattr(spec, "extra_retained_tokens", None) or None,
                checkpoint_blocks=(
                    getattr(spec, "num_prefill_checkpoint_blocks", 0)
                    if hasattr(spec, "mamba_cache_mode")
                    else None
                ),
            )
        )
    return described


def kv_block_bytes(scheduler: Any) -> int | None:
    """Return the bytes of one KV block on a device, computed as in ``vllm/v1/core/kv_cache_utils.py``.

    Since vLLM 0.32 all tensors are views of one allocation; before that, each tensor was a separate
    allocation, except in a packed layout, whose tensors state the stride of a whole block.
    """
    config = getattr(scheduler, "kv_cache_config", None)
    tensors, blocks = getattr(config, "kv_cache_tensors", None), getattr(config, "num_blocks", 0)
    if not tensors or not blocks:
        return None
    if hasattr(tensors[0], "layer_stride"):
        return int(max(tensor.size for tensor in tensors) // blocks)
    packed = max(getattr(tensor, "block_stride", 0) for tensor in tensors)
    return int(packed or sum(tensor.size for tensor in tensors) // blocks)


def settings(scheduler: Any) -> dict[str, Any]:
    """Return this release's settings as a mapping from ``part.name`` to value.

    Unset settings are left out, except in the parts that ``WHOLE`` lists.
    """
    config = scheduler.vllm_config
    values: dict[str, Any] = {}
    for part, names in LISTED.items():
        if (owner := getattr(config, part, None)) is not None:
            values |= _values(owner, f"{part}.", names)
    parallel = getattr(config, "parallel_config", None)
    if getattr(parallel, "enable_eplb", False):
        values |= _values(getattr(parallel, "eplb_config", None), "eplb_config.", OF_EXPERTS)
    values |= _values(config, "", OF_CONFIG) | _values(scheduler, "scheduler.", OF_SCHEDULER)
    values |= {f"environment.{name}": os.environ.get(name) or None for name in ENVIRONMENT}
    values = {name: value for name, value in values.items() if value is not None}
    for part in WHOLE:
        whole = all_settings(getattr(config, part, None))
        values |= {f"{part}.{name}": value for name, value in whole.items()}
    as_resolved = all_settings(getattr(scheduler, "kv_cache_config", None))
    of_cache = {f"cache_config.{name}": value for name, value in as_resolved.items()}
    return values | {name: value for name, value in of_cache.items() if name in values}


def all_settings(config: Any) -> dict[str, Any]:
    """Return the public settings of a configuration dataclass that are JSON values and not secret.

    A text is recorded only if the setting's type lists it as a choice; any other text may be a name, a path
    or an address. Ports are left out, and so are values that vLLM derives instead of taking them as
    arguments.
    """
    if not dataclasses.is_dataclass(config):
        return {}
    try:
        types = get_type_hints(type(config))
    except Exception:  # an annotation names what is imported for type checkers only
        types = {}
    return {
        field.name: _plain(value)
        for field in dataclasses.fields(config)
        if field.init and not field.name.startswith("_") and not field.name.endswith("_port")
        if _is_recordable(value := getattr(config, field.name, None), types.get(field.name, field.type))
    }


def _is_recordable(value: Any, annotation: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= MOST_ENTRIES and all(_is_recordable(entry, annotation) for entry in value)
    if isinstance(value, str) and not isinstance(value, Enum):
        return value in _choices(annotation)
    return value is None or isinstance(value, bool | int | float | Enum)


def _choices(annotation: Any) -> set[Any]:
    """Return the values that a type annotation lists in ``Literal`` types."""
    if get_origin(annotation) is Literal:
        return {*get_args(annotation)}
    return set().union(*map(_choices, get_args(annotation)))


def _values(owner: Any, prefix: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {f"{prefix}{name}": _plain(getattr(owner, name)) for name in names if hasattr(owner, name)}


def _plain(value: Any) -> Any:
    """Return a value in JSON form; an enumeration member becomes its name."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(getattr(value, "name", value)).removeprefix("torch.")
