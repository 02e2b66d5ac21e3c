"""What ``advise`` proposes: configurations that would serve a recorded load better."""

from typing import Any

import msgspec

from schedtrace.model.message import Message
from schedtrace.model.prediction import Figure, SettingChange
from schedtrace.model.sweep import Bound


class Proposal(msgspec.Struct, kw_only=True):
    """One configuration, replayed."""

    changes: list[SettingChange]
    """Of the recorded configuration."""
    meets_slo: bool
    """Whether every bound would hold."""
    goodput_requests_per_s: float
    """Requests a second that meet every bound themselves."""
    bounds_ms: list[float | None]
    """What the objective bounds, in its order."""
    figures: list[Figure]
    """Throughput and latencies against the recorded configuration, replayed likewise."""
    extrapolated_frac: float | None
    """Share of the steps outside what was recorded."""
    removed: list[str]
    """Codes of root causes that the replay as recorded has, and this one has not."""
    appeared: list[str]
    """The other way round."""


class Proposals(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace advise``."""

    label: str
    """Of the run."""
    path: str
    """Its folder."""
    slo: list[Bound]
    """As given."""
    tried: int
    """Configurations that were replayed, the recorded one included."""
    meets_slo: bool
    """Whether the recorded configuration does, replayed."""
    goodput_requests_per_s: float
    """Of it."""
    bounds_ms: list[float | None]
    """Of it, what the objective bounds."""
    proposals: list[Proposal]
    """At most three, the best first."""
    commands: list[str]
    """That try the first one on the real machine: a run, and what compares it with the recorded one."""
    step_times: str
    """Where they come from, in a sentence."""
    notes: list[Message]
    """What the load does not say, and what was assumed."""


def as_options(changes: dict[str, Any]) -> list[str]:
    """Settings as vLLM's command line takes them: ``--max-num-seqs 64``, ``--no-async-scheduling``."""
    options: list[str] = []
    for name, value in changes.items():
        if name == "balance_ranks":
            options += ["--scheduler-cls", "schedtrace.balance.BalanceScheduler"] if value else []
            continue
        option = name.replace("_", "-")
        options += (
            [f"--{option}" if value else f"--no-{option}"]
            if isinstance(value, bool)
            else [f"--{option}", str(value)]
        )
    return options
