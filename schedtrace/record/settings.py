"""Settings of recordings, as environment variables, which reach every process of vLLM."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from schedtrace.model.trace_bounds import DEFAULT, PLAIN, Bounds, bounds, memory_bounds
from schedtrace.record import switches
from schedtrace.record.run_folders import claim_run_dir
from schedtrace.record.switches import (
    DIR,
    KEEP,
    NotUnderstoodError,
    environment_value,
    keeps_in_memory,
)

TRIAL_IDS = "SCHEDTRACE_TRIAL_IDS"
"""Variable that ``schedtrace run`` sets because its request ids contain the trial."""

HASH_IDS = "SCHEDTRACE_HASH_IDS"
"""Variable that makes schedtrace write request ids as hashes: yes (1, true, on)."""


LINES = "SCHEDTRACE_LINES"
"""Variable with the form of lines: with ``full``, every step is written in full; otherwise most steps are
written as changes."""

TRACE = "SCHEDTRACE_TRACE"
"""Variable with the bounds of a trace, such as ``maxsize=1G,maxage=12h``; ``plain``: one file without bounds.
"""


SNAPSHOT_ON = "SCHEDTRACE_SNAPSHOT_ON"
"""Variable with the rules for automatic snapshots, such as ``ttft>5s,e2e>60s,preemptions>100/10s``."""


_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
DEFAULT_RULES = "preemptions>100/10s"
RULES_EXPECTED = "expected 'off' or some of ttft>TIME, e2e>TIME and preemptions>NUMBER/TIME, with commas"
_RULE = re.compile(r"(?:(ttft|e2e)>|preemptions>(\d{1,9})/)(\d{1,9}(?:\.\d{1,9})?)(ms|s|m)")


@dataclass(frozen=True)
class Rules:
    """Objectives whose violation triggers a snapshot; None for those that are not set."""

    ttft_s: float | None = None
    """Seconds from a request's arrival to its first token or, if it got none, to its end."""
    e2e_s: float | None = None
    """Seconds from the arrival of a request to its end."""
    preemptions: tuple[int, float] | None = None
    """Number of preemptions, and the seconds within which more of them trigger a snapshot."""

    def __bool__(self) -> bool:
        return self != Rules()

    def broken_by(self, finish: Any) -> str | None:
        """Return the latency objective that a finished request missed, such as ``ttft>5s``, or None."""
        waited_until_us = finish.first_token_us if finish.output_tokens else finish.finished_us
        for name, limit_s, end_us in (
            ("ttft", self.ttft_s, waited_until_us),
            ("e2e", self.e2e_s, finish.finished_us),
        ):
            came_us = finish.arrived_us
            if limit_s is not None and None not in {came_us, end_us} and end_us - came_us > limit_s * 1e6:
                return f"{name}>{limit_s:g}s"
        return None


NO_RULES = Rules()


def rules(text: str) -> Rules:
    """Return the rules that the user set.

    Raises:
        ValueError: If the variable is invalid; the text says what is expected.
    """
    fields: dict[str, Any] = {}
    for part in [] if text.strip().lower() in switches.NO else text.split(","):
        match = _RULE.fullmatch(part.strip())
        if match is None:
            raise ValueError(RULES_EXPECTED)
        seconds = float(match[3]) * _SECONDS[match[4]]
        if match[1]:
            fields[f"{match[1]}_s"] = seconds
        else:
            fields["preemptions"] = (int(match[2]), seconds)
    return Rules(**fields)


@dataclass(frozen=True)
class Settings:
    """Place and options of this process's recordings."""

    run_dir: Path
    trial_ids: bool
    hash_ids: bool
    lines: str = "delta"
    """``delta`` or ``full``."""
    bounds: Bounds | None = None
    """Bounds of a trace in parts; None for one plain file."""
    in_memory: bool = False
    """Whether the parts stay in memory until a snapshot is requested."""
    snapshot_on: Rules = NO_RULES
    """Rules for automatic snapshots."""
    keeps_lines: bool = True
    """Whether there is a trace; if not, only metrics and spans are made from the lines."""
    makes_spans: bool = False
    """Whether lines are needed although there is no trace, because the states of requests become spans."""


def hashes_ids() -> bool:
    """Return whether request ids are to be written as hashes.

    Raises:
        NotUnderstoodError: If the variable is invalid.
    """
    return switches.is_on(HASH_IDS)


def hides_ids() -> bool:
    """Return whether output for users hides request ids; true also if the variable is invalid."""
    try:
        return hashes_ids()
    except NotUnderstoodError:
        return True


def line_format() -> str:
    """Return ``delta`` or ``full``.

    Raises:
        NotUnderstoodError: If the variable is neither.
    """
    text = environment_value(LINES).lower() or "delta"
    if text not in {"delta", "full"}:
        msg = f"{LINES}={environment_value(LINES)}: expected delta or full"
        raise NotUnderstoodError(msg)
    return text


_T = TypeVar("_T")


def _understood(variable: str, text: str, parse: Callable[[str], _T]) -> _T:
    try:
        return parse(text)
    except ValueError as error:
        msg = f"{variable}={text}: {error}"
        raise NotUnderstoodError(msg) from None


def bounds_from_environment() -> Bounds | None:
    """Return the bounds of a trace; by default, a server keeps the last GiB.

    Raises:
        NotUnderstoodError: If a variable is invalid.
    """
    if keeps_in_memory():
        return _understood(KEEP, environment_value(KEEP), memory_bounds)
    default = DEFAULT if environment_value(DIR) else PLAIN
    return _understood(TRACE, environment_value(TRACE) or default, bounds)


def from_environment() -> Settings:
    """Return the settings of this process; claim the run folder if no other process has done so.

    Raises:
        NotUnderstoodError: If a variable is invalid.
    """
    return Settings(
        run_dir=claim_run_dir(),
        trial_ids=switches.is_on(TRIAL_IDS),
        hash_ids=hashes_ids(),
        lines=line_format(),
        bounds=bounds_from_environment(),
        in_memory=keeps_in_memory(),
        snapshot_on=_understood(SNAPSHOT_ON, environment_value(SNAPSHOT_ON) or DEFAULT_RULES, rules),
    )
