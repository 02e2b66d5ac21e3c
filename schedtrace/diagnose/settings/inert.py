"""Settings that were set and do nothing: read in vLLM's source, release by release."""

from collections.abc import Callable

from schedtrace.model.front_end import Configured
from schedtrace.model.message import NOTHING, Message, Number, Setting, message
from schedtrace.model.settings import EffectiveSetting
from schedtrace.model.trace import Header
from schedtrace.timeline.front_end import OFFLINE_CONTEXT

LOCAL_INTERVAL_SINCE = (0, 33)
"""Before this release only data-parallel ranks in lock-step read ``prefill_schedule_interval``."""


def why_inert(setting: EffectiveSetting, header: Header, configured: Configured | None) -> Message:
    """Why this setting has no effect; nothing where it has one, is at its default, or is switched off."""
    check = _CHECKS.get(setting.name)
    return check(setting, header, configured) if check and setting.origin != "overridden" else NOTHING


def _partial_prefills(setting: EffectiveSetting, _: Header, __: Configured | None) -> Message:
    """No release's V1 scheduler reads them; vLLM 0.27 removed them."""
    return NOTHING if setting.value == 1 else message("vLLM's V1 scheduler does not read it")


def _threshold(setting: EffectiveSetting, header: Header, _: Configured | None) -> Message:
    value, budget = setting.value, header.token_budget
    if not isinstance(value, int) or not value or budget is None or value < budget:
        return NOTHING
    return message("no effect: the token budget of {budget} limits chunks first", budget=Number(budget))


def _adaptive(setting: EffectiveSetting, header: Header, _: Configured | None) -> Message:
    if not setting.value or header.scheduler_config.get("long_prefill_token_threshold"):
        return NOTHING
    return message("no effect without {setting}", setting=Setting("long_prefill_token_threshold"))


def _active(setting: EffectiveSetting, header: Header, _: Configured | None) -> Message:
    """``max_num_active_seqs`` replaces ``max_num_seqs`` as the limit only where it is smaller."""
    if setting.value != header.scheduler_config.get("max_num_seqs"):
        return NOTHING
    return message("no effect: {setting} is the same", setting=Setting("max_num_seqs"))


def _watermark(setting: EffectiveSetting, header: Header, _: Configured | None) -> Message:
    """vLLM reserves ``int(watermark * blocks)``."""
    value, blocks = setting.value, header.kv_blocks_total
    if not isinstance(value, int | float) or not value or blocks is None or int(value * blocks) > 0:
        return NOTHING
    return message("no effect: of {blocks} blocks it keeps 0 free", blocks=Number(blocks))


def _interval(setting: EffectiveSetting, header: Header, _: Configured | None) -> Message:
    """Ranks that schedule by themselves have ``data_parallel_size`` 1 in their configuration."""
    release = _release(header.vllm_version)
    in_lock_step = header.data_parallel_size is None or header.data_parallel_size > 1
    if setting.value == 1 or in_lock_step or release is None or release >= LOCAL_INTERVAL_SINCE:
        return NOTHING
    return message("no effect in this release: only data-parallel ranks in lock-step read it")


def _queued(_: EffectiveSetting, __: Header, configured: Configured | None) -> Message:
    """``LLM`` never asks ``AsyncLLM.check_admission``."""
    if configured is None or configured.usage_context != OFFLINE_CONTEXT:
        return NOTHING
    return message("no effect offline: only a server's front end checks it")


def _utilization(setting: EffectiveSetting, header: Header, __: Configured | None) -> Message:
    if setting.origin != "given" or header.settings.get("cache_config.kv_cache_memory_bytes") is None:
        return NOTHING
    return message("no effect: {setting} decides", setting=Setting("kv_cache_memory_bytes"))


def _release(version: str) -> tuple[int, int] | None:
    """``0.32.0+cpu`` to (0, 32); None for what is no version."""
    try:
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return None


_CHECKS: dict[str, Callable[[EffectiveSetting, Header, Configured | None], Message]] = {
    "max_num_partial_prefills": _partial_prefills,
    "max_long_partial_prefills": _partial_prefills,
    "long_prefill_token_threshold": _threshold,
    "long_prefill_token_threshold_adaptive": _adaptive,
    "max_num_active_seqs": _active,
    "watermark": _watermark,
    "prefill_schedule_interval": _interval,
    "max_num_queued_reqs": _queued,
    "max_num_queued_tokens": _queued,
    "gpu_memory_utilization": _utilization,
}
