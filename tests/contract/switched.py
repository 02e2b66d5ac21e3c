"""An engine that is attached to, measured and detached from between its steps."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from schedtrace.record.live.attachment import Attachment
from tests.contract.deciding import Deciding
from tests.toys import Now, core_of


class Switched(Deciding):
    """Does something with its attachment before some of its steps.

    Args:
        before: What it does, by the number of the step.
        options: Of the engine.
    """

    def __init__(
        self, before: Mapping[int, Callable[[Attachment], Any]] = MappingProxyType({}), **options: Any
    ) -> None:
        super().__init__(**options)
        self.before, self.calls = before, 0
        self.core = core_of(self)
        self.attachment = Attachment(self.core, Now())

    def schedule(self, *args: Any) -> Any:
        self.before.get(self.calls, lambda _: None)(self.attachment)
        self.calls += 1
        return super().schedule(*args)
