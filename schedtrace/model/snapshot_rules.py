"""When a flight recorder writes a snapshot by itself: ``ttft>5s,e2e>60s,preemptions>100/10s``."""

import re
from dataclasses import dataclass
from typing import Any

SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
DEFAULT = "preemptions>100/10s"
EXPECTED = "expected 'off' or some of ttft>TIME, e2e>TIME and preemptions>NUMBER/TIME, with commas"
_RULE = re.compile(r"(?:(ttft|e2e)>|preemptions>(\d{1,9})/)(\d{1,9}(?:\.\d{1,9})?)(ms|s|m)")


@dataclass(frozen=True)
class Rules:
    """Objectives whose violation is worth a snapshot; None: not judged."""

    ttft_s: float | None = None
    """From the arrival of a request to its first token."""
    e2e_s: float | None = None
    """From its arrival to its end."""
    preemptions: tuple[int, float] | None = None
    """More than so many within so many seconds."""

    def __bool__(self) -> bool:
        return self != Rules()

    def broken_by(self, finish: Any) -> str | None:
        """Which latency objective a request has missed that is done, as it was given."""
        for name, limit_s, end_us in (
            ("ttft", self.ttft_s, finish.first_token_us),
            ("e2e", self.e2e_s, finish.finished_us),
        ):
            came_us = finish.arrived_us
            if limit_s is not None and None not in {came_us, end_us} and end_us - came_us > limit_s * 1e6:
                return f"{name}>{limit_s:g}s"
        return None


NONE = Rules()


def rules(text: str) -> Rules:
    """What was asked for.

    Raises:
        ValueError: it is not understood; the text says what is expected.
    """
    found: dict[str, Any] = {}
    for part in [] if text == "off" else text.split(","):
        match = _RULE.fullmatch(part.strip())
        if match is None:
            raise ValueError(EXPECTED)
        seconds = float(match[3]) * SECONDS[match[4]]
        if match[1]:
            found[f"{match[1]}_s"] = seconds
        else:
            found["preemptions"] = (int(match[2]), seconds)
    return Rules(**found)
