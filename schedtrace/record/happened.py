"""What one step has beside its decisions, in plain values."""

from typing import Any

import msgspec

from schedtrace.model.trace_facts import Admission, Grammar, HeadRefusal, KvLoad, SetAside
from schedtrace.record import holdings


class Happened(msgspec.Struct, gc=False):
    """What one step has of it, if anything."""

    admitted: list[Admission] = []
    refusals: list[holdings.Snapshot] = []
    kv_loads: list[KvLoad] = []
    grammars: list[Grammar] = []
    set_aside: list[SetAside] = []

    def lines(self) -> dict[str, list[Any]]:
        """Fields of a ``Step`` (writer's thread)."""
        refusals: list[HeadRefusal] = list(map(holdings.line, self.refusals))
        return {
            "admitted": self.admitted,
            "refusals": refusals,
            "kv_loads": self.kv_loads,
            "grammars": self.grammars,
            "set_aside": self.set_aside,
        }
