"""``better-setting``: a setting that helps although no limit points to it; only replays find it."""

from typing import Any

from schedtrace.diagnose.rules.common import severity_by_weight
from schedtrace.model.facts import Fact
from schedtrace.model.message import Share, message
from schedtrace.model.report import Advice, Evidence, Finding, Gain

CODE = "better-setting"
SUMMARY = "no limit points to it, but a replay of the load with another setting is better (--predict)"
NEEDS = (Fact.TIMES, Fact.LIVES, Fact.REQUESTS)
LEAST_FRAC = 0.02
"""So much has to be saved by the middle that is said, or the change only may help."""
KNOWN = (
    "{change} is better",
    "No limit points to it, but on a replay of this load {change} saves {saved} of the {time}.",
)
UNKNOWN = (
    "{change} may be better",
    "No limit points to it, but {change} may save some of the {time}: no step showed what more tokens cost.",
)
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
    known = saved_frac >= LEAST_FRAC
    title, verdict = KNOWN if known else UNKNOWN
    return Finding(
        code=CODE,
        severity=severity_by_weight(gain, None),
        title=message(title, change=advice.message),
        verdict=message(
            verdict,
            change=advice.message,
            **({"saved": Share(saved_frac)} if known else {}),
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
