"""The fields of a step: of its line or, where a delta leaves them out, of the step before."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from msgspec import UNSET

from schedtrace.model.trace import BEFORE_FIELDS, CARRIED_FIELDS, Delta, Step

FIELDS = tuple(
    name for name in Step.__struct_fields__ if name in Delta.__struct_fields__ and name != "changes"
)
"""Of a step, its requests left out."""
_AT = {name: at for at, name in enumerate(FIELDS)}
_NOTHING = len(FIELDS)
_IF_ABSENT = [
    _AT[name] if name in CARRIED_FIELDS else _AT[BEFORE_FIELDS[name]] if name in BEFORE_FIELDS else _NOTHING
    for name in FIELDS
]
"""Place in the step before of what an absent field is; one behind its end for those that are null then."""

Values = Sequence[Any]
"""Of ``FIELDS``, in their order."""
values_of = attrgetter(*FIELDS)
"""``Values`` of a full line."""


def rebuilt(delta: Any, before: Values) -> Values:
    """The values of a delta's step.

    Args:
        delta: As read.
        before: Of the step before.
    """
    known = (*before, None)
    told = values_of(delta)
    values = [known[at] if value is UNSET else value for value, at in zip(told, _IF_ABSENT, strict=True)]
    if delta.output_tokens is UNSET and values[_AT["output_us"]] is not None:
        values[_AT["output_tokens"]] = values[_AT["total_requests"]]
    return values


def value(values: Values, name: str) -> Any:
    """One of them."""
    return values[_AT[name]]
