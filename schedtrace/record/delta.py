"""A step's line told by what differs from the step before."""

from operator import attrgetter
from typing import Any

from schedtrace.model.trace import BEFORE_FIELDS, CARRIED_FIELDS, EVENT_FIELDS, OWN_FIELDS, RowChanges, Step

_OWN = [name for name in Step.__struct_fields__ if name in OWN_FIELDS]
_EVENTS = sorted(EVENT_FIELDS)
_carried, _events = attrgetter(*CARRIED_FIELDS), attrgetter(*_EVENTS)
_NONE = RowChanges()


class Deltas:
    """The latest step, which the next delta refers to."""

    def __init__(self) -> None:
        self._latest: Step | None = None
        self._carried: tuple[Any, ...] = ()

    @property
    def begun(self) -> bool:
        """Whether there is a step that a delta could refer to."""
        return self._latest is not None

    def follow(self, step: Step) -> None:
        """This step has a line in full."""
        self._latest, self._carried = step, _carried(step)

    def delta(self, step: Step, changes: RowChanges | None) -> dict[str, Any]:
        """The ``Delta`` of a step as a dict, ready to be encoded.

        Args:
            step: Without its requests.
            changes: Of the requests; None: there are none.

        Raises:
            ValueError: no step came before.
        """
        before, carried_before = self._latest, self._carried
        if before is None:
            msg = "no step came before"
            raise ValueError(msg)
        self.follow(step)
        line: dict[str, Any] = {"type": "delta"} | {name: getattr(step, name) for name in _OWN}
        if step.output_us is not None:
            line["output_us"], line["update_us"] = step.output_us, step.update_us
            if step.output_tokens != step.total_requests:
                line["output_tokens"] = step.output_tokens
            if step.execute_us is not None:
                line["execute_after_us"], line["execute_us"] = step.execute_after_us, step.execute_us
        if self._carried != carried_before:
            triples = zip(CARRIED_FIELDS, self._carried, carried_before, strict=True)
            line |= {name: value for name, value, old in triples if value != old}
        for name, after in BEFORE_FIELDS.items():
            if (value := getattr(step, name)) != getattr(before, after):
                line[name] = value
        line |= {name: value for name, value in zip(_EVENTS, _events(step), strict=True) if value}
        if changes is not None and changes != _NONE:
            line["changes"] = changes
        return line
