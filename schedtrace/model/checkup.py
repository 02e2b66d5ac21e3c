"""The answer of ``schedtrace doctor``: what was checked before a recording, and what is wrong."""

from typing import Literal

import msgspec

CHECKUP_SCHEMA_VERSION = 1

State = Literal["ok", "note", "wrong"]


class Check(msgspec.Struct, kw_only=True):
    """Fact that decides what can be recorded."""

    name: str
    """Subject of the check: ``vllm``, ``exits``, ``allocations``, ``hooks``, ``recording``, ``replay``,
    ``device``, ``plugin``, ``settings``, ``socket``, ``disk``, ``clocks``, ``extras``, ``engines``,
    ``engine``, ``version`` or ``metrics``.
    """
    state: State
    """``note``: recording works, but you should know this. ``wrong``: something is not recorded, or not
    possible.
    """
    text: str
    """What was seen."""
    advice: str = ""
    """What to do; empty if nothing has to be done."""


class Checkup(msgspec.Struct, kw_only=True):
    """Document that ``schedtrace doctor`` prints."""

    schema_version: int = CHECKUP_SCHEMA_VERSION
    """Version of this format; 1."""
    checks: list[Check]
    """All checks, in the order in which they were made."""

    @property
    def is_healthy(self) -> bool:
        """Return whether nothing is wrong."""
        return all(check.state != "wrong" for check in self.checks)
