"""What a recorded load would do on another configuration: the document of ``replay``."""

from enum import StrEnum
from typing import Any

import msgspec

from schedtrace.model.message import Message
from schedtrace.model.sweep_result import Bound


class Objective(StrEnum):
    """What a change has to make better to be advised."""

    LATENCY = "latency"
    """The mean end-to-end latency."""
    MAKESPAN = "makespan"
    """The time until all requests are done."""
    THROUGHPUT = "throughput"
    """Output tokens a second."""


OF_RANKS: dict[str, tuple[Any, ...]] = {
    "router": ("vllm", "round-robin", "least-running", "least-tokens"),
    "balance_ranks": (True, False),
}
"""Settings that a replay takes beside vLLM's, and their values."""


class SettingChange(msgspec.Struct, kw_only=True):
    """One setting that is changed."""

    name: str
    """As vLLM's argument is called."""
    recorded: Any
    value: Any


class Figure(msgspec.Struct, kw_only=True):
    """One metric, mean over the trials."""

    name: str
    unit: str
    higher_is_better: bool | None
    recorded: float | None
    replayed: float | None
    """The recorded configuration in virtual time, with the same step times as ``changed``."""
    changed: float | None
    change_frac: float | None
    """``changed`` against ``replayed``: what the step times get wrong is in both."""
    low_frac: float | None = None
    high_frac: float | None = None
    """90 % interval of ``change_frac``; null where the trace gives no ground for one."""


class Prediction(msgspec.Struct, kw_only=True):
    """A recorded load, replayed as it was and with changes."""

    label: str
    path: str
    vllm_version: str
    """Whose scheduler decided."""
    recorded_version: str
    """Of the vLLM that was recorded."""
    changes: list[SettingChange]
    step_times: str
    """Where the durations come from."""
    kv_blocks: int
    kv_blocks_recorded: bool
    trials: int
    requests: int
    same_steps: int | None
    """Of the recorded steps, replayed by step: how many have the same requests with the same tokens."""
    compared_steps: int | None
    decided: list[Figure]
    """What scheduling decides."""
    measured: list[Figure]
    """What follows in time."""
    by_arrival: bool
    """Requests arrive while others run, so that what is decided depends on the step times, too."""
    outside_frac: float | None
    """Share of the changed replay's steps that lie outside what was recorded; null without changes."""
    notes: list[Message] = []
    folders: list[str] = []
    """Runs that were written: as recorded, and with the changes."""


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
