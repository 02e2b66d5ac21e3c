"""A ``schedule()`` call as its difference from the step before, and the meaning of each absent field."""

from typing import Any

import msgspec

from schedtrace.model.trace import Line, Step

EVENT_FIELDS = frozenset(
    {
        "preempted",
        "arrived",
        "finished",
        "dummy_batches",
        "dummy_us",
        "dummies",
        "syncs",
        "controls",
        "kv_sends",
        "admitted",
        "refusals",
        "kv_loads",
        "grammars",
        "set_aside",
    }
)
"""Fields about one step alone; if absent from a delta, they have their defaults."""
BEFORE_FIELDS = {
    "num_running_before": "num_running_after",
    "num_waiting_before": "num_waiting_after",
    "kv_blocks_free_before": "kv_blocks_free_after",
}
"""Fields that, if absent from a delta, have the value that the named other field has in the step before."""
OUTPUT_FIELDS = frozenset({"output_us", "update_us", "output_tokens", "execute_after_us", "execute_us"})
"""Fields about the output; if they are absent from a delta, the output is not back, or the fields are
unknown. If only ``output_tokens`` is absent, its value is that of ``total_requests``."""
OWN_FIELDS = frozenset({"step", "start_us", "schedule_us"})
"""Fields that every delta contains."""
CARRIED_FIELDS = tuple(
    name
    for name in Step.__struct_fields__
    if name not in {*EVENT_FIELDS, *BEFORE_FIELDS, *OUTPUT_FIELDS, *OWN_FIELDS, "requests", "changes"}
)
"""Fields that, if absent from a delta, have the same value as in the step before."""


def _delta() -> type[msgspec.Struct]:
    """Return the struct of a delta: ``Step`` without ``requests``; only ``OWN_FIELDS`` are required."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(Step):
        if field.name in OWN_FIELDS:
            fields.append((field.name, field.type))
        elif field.name in EVENT_FIELDS or field.name == "changes":
            default = field.default
            if default is msgspec.NODEFAULT:
                default = msgspec.field(default_factory=field.default_factory)
            fields.append((field.name, field.type, default))
        elif field.name != "requests":
            fields.append((field.name, field.type | msgspec.UnsetType, msgspec.UNSET))
    return msgspec.defstruct(
        "Delta", fields, bases=(Line,), tag="delta", kw_only=True, omit_defaults=True, module=__name__
    )


Delta = _delta()
"""A ``schedule()`` call, as the difference from the step with the preceding number.

``changes`` lists the requests' differences; if absent, there are none. The constants above state what the
absence of any other field means.
"""
