"""The settings of two runs that differ: given ones, and what vLLM resolved them to, with their origin."""

from typing import Any

from schedtrace.diagnose.settings.effective import effective_settings
from schedtrace.model.comparison import ConfigChange
from schedtrace.model.message import NOTHING, Code, Message, message
from schedtrace.read.foreign import UNKNOWN
from schedtrace.read.run import Run

NOISE = {"SCHEDTRACE_RUN_DIR", "SCHEDTRACE_TRIAL_IDS"}
OF_A_START = "_port"
"""Ends the names of fields that every start of data-parallel ranks draws anew."""
"""Variables that tell where a run was written, and nothing about it."""
NAMES = {
    "policy": "scheduling_policy",
    "cache_dtype": "kv_cache_dtype",
    "kv_blocks_total": "num_gpu_blocks",
    "token_budget": "max_num_scheduled_tokens",
}
"""Fields of vLLM's configuration and of the header whose setting has another name."""


def changed_settings(*, base: Run, new: Run) -> list[ConfigChange]:
    """Settings that differ: given ones, those that decide scheduling, then what else vLLM resolved."""
    before, after = _flat_config(base), _flat_config(new)
    given = _given(base) | _given(new)
    base_origins, new_origins = _origins(base), _origins(new)
    changes = [
        ConfigChange(
            name=name,
            base=before.get(name),
            new=after.get(name),
            given=name.rpartition(".")[2] in given or name.startswith(("workload.", "environment.")),
            base_origin=base_origins.get(_setting_of(name), NOTHING),
            new_origin=new_origins.get(_setting_of(name), NOTHING),
        )
        for name in sorted(before.keys() & after.keys() | _variables(base, new))
        if before.get(name) != after.get(name)
    ]
    return sorted(changes, key=lambda change: (not change.given, not change.base_origin))


def _origins(run: Run) -> dict[str, Message]:
    """Name of each setting that decides scheduling to where its value comes from, as far as that is known."""
    return {
        setting.name: message(
            "{origin}{context}",
            origin=setting.origin,
            context=message(" for {context}", context=Code(setting.context)) if setting.context else NOTHING,
        )
        for setting in effective_settings(run)
        if setting.origin != "unknown"
    }


def _setting_of(name: str) -> str:
    """``scheduler_config.policy`` to ``scheduling_policy``."""
    field = name.rpartition(".")[2]
    return NAMES.get(field, field)


def _variables(base: Run, new: Run) -> set[str]:
    """Environment variables of either side, if both sides tell theirs; other settings need both values."""
    if not (base.manifest and new.manifest):
        return set()
    names = base.manifest.environment.keys() | new.manifest.environment.keys()
    return {f"environment.{name}" for name in names - NOISE}


def _given(run: Run) -> set[str]:
    return set(run.manifest.engine_args_given) if run.manifest else set()


def _flat_config(run: Run) -> dict[str, Any]:
    """``section.field`` to value, from the manifest, or from the trace's header without one."""
    header = run.traces[0].header
    flat: dict[str, Any] = {
        "model": header.model,
        "vllm_version": header.vllm_version,
        "device": header.device,
        "scheduler_class": header.scheduler_class,
        "kv_blocks_total": header.kv_blocks_total,
        "token_budget": header.token_budget,
        "scheduler_config.max_num_seqs": header.max_num_running_reqs,
    }
    flat = {name: value for name, value in flat.items() if value not in {None, UNKNOWN}}
    flat |= {f"scheduler_config.{name}": value for name, value in header.scheduler_config.items()}
    manifest = run.manifest
    if manifest is not None:
        for section, fields in manifest.config_resolved.items():
            flat |= {
                f"{section}.{name}": value for name, value in fields.items() if not name.endswith(OF_A_START)
            }
        if manifest.workload is not None:
            workload = manifest.workload
            flat |= {f"workload.{name}": getattr(workload, name) for name in workload.__struct_fields__}
        flat |= {f"environment.{k}": v for k, v in manifest.environment.items() if k not in NOISE}
    return flat
