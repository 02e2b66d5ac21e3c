"""``better-setting``: a setting that helps although no limit points to it; only replays find it."""

from typing import Any

from schedtrace.diagnose.rules.common import severity_by_weight
from schedtrace.model.facts import Fact
from schedtrace.model.message import Share, message
from schedtrace.model.report import Advice, Evidence, Finding, Gain

CODE = "better-setting"
SUMMARY = "no limit points to it, but a replay of the load with another setting is better (--predict)"
NEEDS = (Fact.TIMES, Fact.LIVES, Fact.REQUESTS)
TIMES = {"e2e_mean_ms": "requests' time", "output_tokens_per_s": "run's time"}
"""What a gain of a metric saves."""


class BetterSetting(Evidence, kw_only=True):
    """A change that was replayed."""

    settings: dict[str, Any]
    """Arguments of vLLM to their new values: one or two."""
    saved_frac: float
    """Of the requests' time, or of the run's."""


def find(_: object) -> list[Finding]:
    """Nothing: a trace does not tell what another setting would do; ``whatif.advice`` replays that."""
    return []


def finding(advice: Advice, gain: Gain, settings: dict[str, Any], saved_frac: float) -> Finding:
    """See ``docs/findings/better-setting.md``.

    Args:
        advice: The change.
        gain: Of its replay, in a metric of ``TIMES``.
        settings: As the evidence.
        saved_frac: Likewise.
    """
    return Finding(
        code=CODE,
        severity=severity_by_weight(gain, None),
        title=message("{change} is better", change=advice.message),
        verdict=message(
            "No limit points to it, but on a replay of this load {change} saves {saved} of the {time}.",
            change=advice.message,
            saved=Share(saved_frac),
            time=TIMES[gain.metric],
        ),
        gain=gain,
        cause=None,
        via="recorded",
        engine_rank=0,
        count=0,
        trials=[],
        steps=[],
        tokens=0,
        message=message("Found by replaying this load with one setting changed at a time."),
        advice=[advice],
        evidence=BetterSetting(settings=settings, saved_frac=saved_frac),
    )
