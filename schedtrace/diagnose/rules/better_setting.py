"""``better-setting``: a setting that helps although no limit points to it; only replays find it."""

from typing import Any

from schedtrace.diagnose.rules.common import severity_by_weight
from schedtrace.model.facts import Fact
from schedtrace.model.message import Share, message
from schedtrace.model.report import Advice, Evidence, Finding, Gain

CODE = "better-setting"
SUMMARY = "no other finding proposes it, but a replay of the load with another setting is better (--predict)"
NEEDS = (Fact.TIMES, Fact.LIVES, Fact.REQUESTS)
LEAST_FRAC = 0.02
"""A change that saves less is none; by the middle that is said, it only may help."""
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


def finding(advice: Advice, gain: Gain, settings: dict[str, Any]) -> Finding:
    """See ``docs/findings/better-setting.md``.

    Args:
        advice: The change.
        gain: Of its replay, in a metric of ``TIMES``.
        settings: As the evidence.
    """
    change, time = advice.message, TIMES[gain.metric]
    title = message("{change} is better", change=change)
    verdict = message(
        "On a replay of this load {change} saves {saved} of the {time}; no other finding proposes it.",
        change=change,
        saved=Share(gain.saved_frac),
        time=time,
    )
    if gain.saved_frac < LEAST_FRAC:
        title = message("{change} may be better", change=change)
        verdict = message(
            "On a replay of this load {change} may save some of the {time}: no step showed what more tokens "
            "cost.",
            change=change,
            time=time,
        )
    return Finding(
        code=CODE,
        severity=severity_by_weight(gain, None),
        title=title,
        verdict=verdict,
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
        evidence=BetterSetting(settings=settings, saved_frac=gain.saved_frac),
    )
