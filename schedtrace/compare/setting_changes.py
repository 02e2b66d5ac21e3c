"""Settings in which two runs differ: explicit and resolved settings, with their origin."""

import re
from typing import Any

from schedtrace.diagnose.effective_settings import effective_settings
from schedtrace.diagnose.setting_origins import configured_by
from schedtrace.model.comparison import ConfigChange
from schedtrace.model.manifest import Manifest
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.say import say
from schedtrace.read.foreign import UNKNOWN
from schedtrace.read.run import Run

OWN = "SCHEDTRACE_"
"""Prefix of the variables that control recording and do not affect vLLM."""
OF_A_START = "_port"
"""Suffixes of the fields that every start of data-parallel ranks draws anew."""
ADDRESS = {"port", "host", "uds"}
"""Options that state where a server listens."""
OPTION = re.compile(r"--?[A-Za-z]")
NAMES = {
    "policy": "scheduling_policy",
    "cache_dtype": "kv_cache_dtype",
    "kv_blocks_total": "num_gpu_blocks",
    "token_budget": "max_num_scheduled_tokens",
}
"""Names of settings for fields of vLLM's configuration and of the header that have another name."""


def changed_settings(*, base: Run, new: Run) -> list[ConfigChange]:
    """Return settings that differ: explicit options, workload, environment, then what vLLM resolved.

    Of what vLLM resolved, the settings that decide scheduling come first.
    """
    before, after = _flat_config(base), _flat_config(new)
    explicit = _given(base) | _given(new)
    base_origins, new_origins = _origins(base), _origins(new)
    changes = [
        ConfigChange(
            name=name,
            base=before.get(name),
            new=after.get(name),
            given=_setting_of(name) in explicit or name.startswith(("workload.", "environment.")),
            base_origin=base_origins.get(_setting_of(name), NOTHING),
            new_origin=new_origins.get(_setting_of(name), NOTHING),
        )
        for name in sorted(before.keys() & after.keys() | _variables(base, new))
        if before.get(name) != after.get(name)
    ]
    compared = {_setting_of(name) for name in before.keys() & after.keys()}
    changes = _once(changes) + _options(base, new, compared)
    return sorted(changes, key=lambda change: (_group(change), not change.base_origin))


def _group(change: ConfigChange) -> int:
    """Return the group in the list: options, the workload, the environment, what vLLM resolved."""
    if not change.given:
        return 3
    return {"workload": 1, "environment": 2}.get(change.name.partition(".")[0], 0)


def _once(changes: list[ConfigChange]) -> list[ConfigChange]:
    """Return the changes without second names for the same setting."""
    by_value: dict[tuple[str, str], ConfigChange] = {}
    for change in changes:
        by_value.setdefault((_setting_of(change.name), repr((change.base, change.new))), change)
    return list(by_value.values())


def _options(base: Run, new: Run, compared: set[str]) -> list[ConfigChange]:
    """Return the options in which two servers' commands differ and whose settings nothing else records."""
    before, after = (_command_options(run.manifest) for run in (base, new))
    if before is None or after is None:
        return []
    says = {True: say("given"), False: say("not given")}
    return [
        ConfigChange(
            name=f"--{name.replace('_', '-')}",
            base=before.get(name),
            new=after.get(name),
            given=True,
            base_origin=says[name in before],
            new_origin=says[name in after],
        )
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and name not in compared | ADDRESS
    ]


def _command_options(manifest: Manifest | None) -> dict[str, str] | None:
    """Return the options of a server's command by name; None for no server, or an unknown command.

    The arguments of ``schedtrace run`` are in ``engine_args_given``, and its own options in the workload.
    """
    if manifest is None or manifest.status != "attached" or not manifest.command:
        return None
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in manifest.command[1:]:
        if OPTION.match(word):
            name, equals, value = word.lstrip("-").partition("=")
            values = options[name.replace("-", "_")] = [value] if equals else []
        else:
            values.append(word)
    return {name: " ".join(words) for name, words in options.items()}


def _origins(run: Run) -> dict[str, Message]:
    """Name of each setting that decides scheduling to where its value comes from, as far as that is known."""
    return {
        setting.name: say("{origin}[ for {context:code}]", setting)
        for setting in effective_settings(run)
        if setting.origin != "unknown"
    }


def _setting_of(name: str) -> str:
    """Return ``scheduling_policy`` for ``scheduler_config.policy``."""
    field = name.rpartition(".")[2]
    return NAMES.get(field, field)


def _variables(base: Run, new: Run) -> set[str]:
    """Return environment variables of either side, if both record theirs; other settings need both values."""
    if not (base.manifest and new.manifest):
        return set()
    names = base.manifest.environment.keys() | new.manifest.environment.keys()
    return {f"environment.{name}" for name in names if not name.startswith(OWN)}


def _given(run: Run) -> set[str]:
    """Return the names of explicit vLLM arguments."""
    configured = configured_by(run)
    of_run = run.manifest.engine_args_given if run.manifest else {}
    return {_setting_of(name) for name in (*of_run, *(configured.given if configured else ()))}


def _flat_config(run: Run) -> dict[str, Any]:
    """Return values by ``section.field``, from the manifest, else from the trace's header."""
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
    flat |= {name: value for name, value in header.settings.items() if not name.endswith(OF_A_START)}
    manifest = run.manifest
    if manifest is not None:
        for section, fields in manifest.config_resolved.items():
            flat |= {
                f"{section}.{name}": value for name, value in fields.items() if not name.endswith(OF_A_START)
            }
        if manifest.workload is not None:
            workload = manifest.workload
            flat |= {f"workload.{name}": getattr(workload, name) for name in workload.__struct_fields__}
        flat |= {f"environment.{k}": v for k, v in manifest.environment.items() if not k.startswith(OWN)}
    return flat
