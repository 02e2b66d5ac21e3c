"""What a recorded load would do on another configuration: the document of ``replay``."""

from enum import StrEnum
from typing import Any

import msgspec

from schedtrace.model.message import Message


class Objective(StrEnum):
    """What a change has to make better to be advised."""

    LATENCY = "latency"
    """The mean end-to-end latency."""
    MAKESPAN = "makespan"
    """The time until all requests are done."""
    THROUGHPUT = "throughput"
    """Output tokens a second."""


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
