"""The types of those settings in a header's ``scheduler_config`` that the analysis calculates with."""

from typing import Any

import msgspec


class KnownSettings(msgspec.Struct):
    """Names and types are those of vLLM's ``SchedulerConfig``; every other field may be anything."""

    max_num_seqs: int | None = None
    max_num_active_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_scheduled_tokens: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    long_prefill_token_threshold: int | None = None
    enable_chunked_prefill: bool | None = None
    scheduler_reserve_full_isl: bool | None = None
    policy: str | None = None
    watermark: float | None = None
    prefill_schedule_interval: int | None = None


def check_settings(scheduler_config: dict[str, Any]) -> None:
    """Refuse settings that vLLM cannot have written.

    Raises:
        msgspec.ValidationError: a type is another one, with its place.
    """
    known = {name: scheduler_config.get(name) for name in KnownSettings.__struct_fields__}
    msgspec.convert(known, KnownSettings)
