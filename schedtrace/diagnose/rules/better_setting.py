"""``better-setting``: a setting that helps although no limit points to it; only replays find it."""

from typing import Any

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import finding_of
from schedtrace.model.report import Advice, Evidence, Finding, Gain
from schedtrace.model.trace_facts import Fact

TIMES = {"e2e_mean_ms": "requests' time", "output_tokens_per_s": "run's time"}
"""Name of the time that a gain of each metric saves."""


class BetterSetting(Evidence, kw_only=True):
    """A change that was replayed."""

    settings: dict[str, Any]
    """Arguments of vLLM with their new values; two if both together gain more than either alone."""
    saved_frac: float | None
    """Share of the requests' time that the change saves, or of the run's time if the engine or its clients
    set the pace; None: it may save nothing.
    """


def finding(
    advice: Advice, gain: Gain | None, settings: dict[str, Any], metric: str, most_frac: float
) -> Finding:
    """See ``docs/findings/better-setting.md``.

    Args:
        advice: Advice with the change.
        gain: Gain in the replay; None if no recorded step shows whether there is one.
        settings: Changed settings, as in the evidence.
        metric: Metric, one of ``TIMES``.
        most_frac: Largest share of its time that the change saves.
    """
    helps, sentence = "is better", "{saved:%} of the {time}; no other finding proposes it."
    if gain is None:
        helps = "may be better"
        sentence = "up to {saved:%} of the {time}, or nothing: no step showed what more tokens cost."
    return finding_of(
        BetterSetting(settings=settings, saved_frac=gain.saved_frac if gain else None),
        code=RULE.code,
        engine_rank=0,
        count=0,
        trials=[],
        steps=[],
        title="{change} {helps}",
        verdict="On a replay of this load {change} saves " + sentence,
        values={
            "change": advice.message,
            "helps": helps,
            "saved": gain.saved_frac if gain else most_frac,
            "time": TIMES[metric],
        },
        gain=gain,
        share_frac=None if gain else most_frac,
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
