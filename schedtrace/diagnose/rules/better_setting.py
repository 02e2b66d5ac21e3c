"""``better-setting``: a setting that helps although no limit points to it; only replays find it."""

from typing import Any

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import finding_of
from schedtrace.model.report import Advice, Evidence, Finding, Gain
from schedtrace.model.trace_facts import Fact

TIMES = {"e2e_mean_ms": "requests' time", "output_tokens_per_s": "run's time"}
"""Name of the time that a gain in each metric saves."""


class BetterSetting(Evidence, kw_only=True):
    """A change that was replayed."""

    settings: dict[str, Any]
    """Arguments of vLLM with their new values; two if both together gain more than either alone."""
    saved_frac: float
    """Share of the requests' time that the change saves, or of the run's time if the engine or its clients
    set the pace.
    """


def finding(advice: Advice, gain: Gain, settings: dict[str, Any], metric: str) -> Finding:
    """Return the finding about a better setting; see ``docs/findings/better-setting.md``.

    Args:
        advice: Advice with the change.
        gain: Gain in the replay.
        settings: Changed settings, as in the evidence.
        metric: Metric, one of ``TIMES``.
    """
    return finding_of(
        BetterSetting(settings=settings, saved_frac=gain.saved_frac),
        code=RULE.code,
        engine_rank=0,
        count=0,
        trials=[],
        steps=[],
        title="{change} is better",
        verdict="On a replay of this load {change} saves {saved:%} of the {time}; no other finding "
        "proposes it.",
        values={"change": advice.message, "saved": gain.saved_frac, "time": TIMES[metric]},
        gain=gain,
        share_frac=None,
        message="Found by replaying this load with one setting changed at a time.",
        advice=[advice],
    )


RULE: Rule[object] = Rule(
    code="better-setting",
    summary="no other finding proposes it, but a replay of the load with another setting is better "
    "(--predict)",
    needs=frozenset({Fact.TIMES, Fact.LIVES, Fact.REQUESTS}),
    find=lambda _: (),  # no trace tells what another setting does: ``whatif.advice`` replays it
)
