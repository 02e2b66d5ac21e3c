"""The settings that decided scheduling, with their origin: what was given is not always what runs."""

from collections.abc import Sequence
from typing import Any

from schedtrace.diagnose.settings.inert import why_inert
from schedtrace.diagnose.settings.origin import configured_by, with_origin
from schedtrace.diagnose.settings.used import Use, used
from schedtrace.diagnose.settings.values import VALUES
from schedtrace.model.message import joined
from schedtrace.model.settings import EffectiveSetting
from schedtrace.model.trace import Header
from schedtrace.read.run import Run


def effective_settings(run: Run, engines: Sequence[Use] = ()) -> list[EffectiveSetting]:
    """The settings of a run's engines, which are the same for all ranks, in the order of ``VALUES``.

    Args:
        run: With the front end's record, or without: then the origin is known only of what the manifest says
            was given.
        engines: What each used, to say it of a limit; none: only where it comes from.
    """
    header = run.traces[0].header
    found = []
    for name, value_of in VALUES.items():
        value = value_of(header)
        if name == "data_parallel_size" and value is not None:  # independent ranks know of themselves only
            value = max(value, run.engines)
        if _is_plain(value):
            found.append(with_origin(name, value, run))
    for setting in found:
        inert = why_inert(setting, header, configured_by(run))
        setting.inert = bool(inert)
        setting.explanation = joined([setting.explanation, inert, used(setting, engines)], "; ")
    return [setting for setting in found if _says_something(setting, header)]


def _is_plain(value: Any) -> bool:
    """Whether a header's value is known, and one that vLLM can have written."""
    if isinstance(value, list):
        return all(type(size) is int for size in value)
    return isinstance(value, bool | int | float | str)


def _says_something(setting: EffectiveSetting, header: Header) -> bool:
    """False for an empty list, a second name of the same limit, and what another setting has replaced."""
    if setting.value == []:
        return False
    if setting.origin not in {"default", "derived", "unknown"}:
        return True
    if setting.name == "max_num_scheduled_tokens":
        return setting.value != header.scheduler_config.get("max_num_batched_tokens")
    return setting.name != "gpu_memory_utilization" or not VALUES["kv_cache_memory_bytes"](header)
