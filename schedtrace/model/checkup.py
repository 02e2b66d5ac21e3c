"""Document that ``schedtrace doctor`` prints: what it checked, and what is wrong."""

from typing import Literal

import msgspec

CHECKUP_SCHEMA_VERSION = 1

State = Literal["ok", "note", "wrong"]


class Check(msgspec.Struct, kw_only=True):
    """Check of a fact that determines what can be recorded."""

    name: str
    """Subject of the check: ``vllm``, ``exits``, ``allocations``, ``hooks``, ``recording``, ``replay``,
    ``device``, ``plugin``, ``settings``, ``socket``, ``disk``, ``clocks``, ``extras``, ``engines``,
    ``engine``, ``version`` or ``metrics``.
    """
    state: State
    """``note``: recording works, but you should know this. ``wrong``: something cannot be recorded, or does
    not work.
    """
    text: str
    """Result of the check."""
    advice: str = ""
    """Action to take; empty if none is needed."""


class Checkup(msgspec.Struct, kw_only=True):
    """Document that ``schedtrace doctor`` prints."""

    schema_version: int = CHECKUP_SCHEMA_VERSION
    """Version of this format; 1."""
    checks: list[Check]
    """All checks, in the order in which they were made."""

    @property
    def is_healthy(self) -> bool:
        """Whether no check found anything wrong."""
        return all(check.state != "wrong" for check in self.checks)
