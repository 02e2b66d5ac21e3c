"""Prediction of a recorded load on another configuration: the document of ``replay``."""

from enum import StrEnum
from typing import Any

import msgspec

from schedtrace.model.message import Message
from schedtrace.model.sweep_result import Bound


class Objective(StrEnum):
    """Objective that advice must improve."""

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
"""Settings of ranks that a replay accepts besides vLLM's, and their values."""


class SettingChange(msgspec.Struct, kw_only=True):
    """A changed setting."""

    name: str
    """Name of vLLM's argument."""
    recorded: Any
    value: Any


class Figure(msgspec.Struct, kw_only=True):
    """A metric, as mean over the trials."""

    name: str
    unit: str
    higher_is_better: bool | None
    recorded: float | None
    replayed: float | None
    """The recorded configuration in virtual time, with the same step times as ``changed``."""
    changed: float | None
    change_frac: float | None
    """Change from ``replayed`` to ``changed``; errors of the step times affect both."""
    low_frac: float | None = None
    high_frac: float | None = None
    """90 % interval of ``change_frac``; null if the trace allows none."""


class Prediction(msgspec.Struct, kw_only=True):
    """Recorded load, replayed as it was and with changes."""

    label: str
    path: str
    vllm_version: str
    """Release of vLLM whose scheduler decided."""
    recorded_version: str
    """Release of vLLM that was recorded."""
    changes: list[SettingChange]
    step_times: str
    """Source of the step times, as a sentence."""
    kv_blocks: int
    kv_blocks_recorded: bool
    trials: int
    requests: int
    same_steps: int | None
    """Replayed steps that schedule the same requests with the same tokens as the recorded steps."""
    compared_steps: int | None
    decided: list[Figure]
    """Figures that scheduling decides."""
    measured: list[Figure]
    """Figures of time that follow from these decisions."""
    by_arrival: bool
    """Whether requests arrive while others run, so that decisions also depend on the step times."""
    outside_frac: float | None
    """Share of the changed replay's steps that lie outside the recorded range; null without changes."""
    notes: list[Message] = []
    folders: list[str] = []
    """Runs that were written: as recorded, and with the changes."""


class Proposal(msgspec.Struct, kw_only=True):
    """A proposed configuration, replayed."""

    changes: list[SettingChange]
    """Changes to the recorded configuration."""
    meets_slo: bool
    """Whether every bound would hold."""
    goodput_requests_per_s: float
    """Requests per second that meet every bound."""
    bounds_ms: list[float | None]
    """Values of the bounded latencies, in the order of the objective."""
    figures: list[Figure]
    """Throughput and latencies against the replay of the recorded configuration."""
    extrapolated_frac: float | None
    """Share of the steps outside the recorded range."""
    removed: list[str]
    """Codes of root causes in the replay as recorded that this replay does not have."""
    appeared: list[str]
    """Codes of root causes in this replay that the replay as recorded does not have."""


class Proposals(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace advise``."""

    label: str
    """Label of the run."""
    path: str
    """Its folder."""
    slo: list[Bound]
    """Bounds as given on the command line."""
    tried: int
    """Number of replayed configurations, including the recorded one."""
    meets_slo: bool
    """Whether the recorded configuration, replayed, meets every bound."""
    goodput_requests_per_s: float
    """Goodput of the recorded configuration, replayed."""
    bounds_ms: list[float | None]
    """Values of the bounded latencies under the recorded configuration, replayed."""
    proposals: list[Proposal]
    """At most three, the best first."""
    commands: list[str]
    """Commands that test the first proposal on the real machine: a run, and its comparison with this run."""
    step_times: str
    """Source of the step times, as a sentence."""
    notes: list[Message]
    """Notes on facts missing in the load, and the assumptions in their place."""


def as_options(changes: dict[str, Any]) -> list[str]:
    """Return settings as vLLM's command line takes them: ``--max-num-seqs 64``, ``--no-async-scheduling``."""
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
