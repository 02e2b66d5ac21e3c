"""Advice that is tested before it is given: each proposed setting, on a replay of the same load."""

import msgspec

from schedtrace.errors import NeverEndsError, UsageError
from schedtrace.model.message import Message, Number, Setting, Share, given, joined, message
from schedtrace.model.prediction import Figure, Prediction
from schedtrace.model.report import Advice, Finding, Gain
from schedtrace.whatif.prediction import Predictor, Recorded

RESAMPLES = 4
"""Of the step times, for each advice: fewer than for a replay of its own, so that many fit into a minute."""
METRICS = {"output": "output_tokens_per_s", "TTFT p50": "ttft_p50_ms", "TPOT p50": "tpot_p50_ms"}
"""Figures of a prediction, by the metric of a gain that they are."""
FELT_AS = {"prefill-stall": "tpot_p50_ms"}
"""Findings that state no gain of their own, by the figure in which they are felt."""
SAID = ("steps", "preemptions", "recomputed tokens")
LEAST_FRAC = 0.02
"""A smaller change is none."""
FELT_FRAC = 0.05
"""A smaller change of another figure is not said."""
ONE_MACHINE = "cpu"
"""Where worker and engine share the processors, overlapping them is no matter of scheduling."""


def judged(findings: list[Finding], base: Recorded) -> list[Finding]:
    """Root causes with the predicted gain of their advice, ranked by it, without advice that does not help.

    Args:
        findings: Ranked, of one engine.
        base: Its recorded load.
    """
    with Predictor(base, resamples=RESAMPLES) as predictor:
        found = [_judged(finding, predictor, base) for finding in findings]
    return sorted(found, key=lambda finding: (not finding.title, not finding.leads, -finding.weight))


def _judged(finding: Finding, predictor: Predictor, base: Recorded) -> Finding:
    kept: list[Advice] = []
    gains: list[Gain] = []
    refuted: list[Message] = []
    for advice in finding.advice:
        if advice.setting is None or advice.value is None or _shares_processors(advice, base):
            kept.append(advice)
            continue
        try:
            prediction = predictor.predict({advice.setting: advice.value})
        except NeverEndsError:
            refuted.append(_refuted(advice, message("the load never ends")))
            continue
        except UsageError:
            kept.append(advice)  # it acts by what a replay does not have, a GPU's memory for instance
            continue
        gain = _gain(finding, prediction)
        if gain is None:
            kept.append(advice)
        elif _helps(gain):
            kept.append(msgspec.structs.replace(advice, tested=_outcome(prediction, gain)))
            gains.append(gain)
        else:
            refuted.append(_refuted(advice, message("{change}", change=Share(gain.change_frac, signed=True))))
    return msgspec.structs.replace(
        finding,
        advice=kept,
        refuted=[*finding.refuted, *refuted],
        gain=max(gains, key=lambda gain: gain.saved_frac) if gains else None if refuted else finding.gain,
    )


def _shares_processors(advice: Advice, base: Recorded) -> bool:
    return advice.setting == "async_scheduling" and base.header.device == ONE_MACHINE


def _gain(finding: Finding, prediction: Prediction) -> Gain | None:
    """In the metric that the finding is about; where nothing says which, throughput or the first token."""
    figures = {METRICS[figure.name]: figure for figure in prediction.measured if figure.name in METRICS}
    usual = "ttft_p50_ms" if prediction.by_arrival else "output_tokens_per_s"
    metric = finding.gain.metric if finding.gain else FELT_AS.get(finding.code, usual)
    figure = figures.get(metric) or figures.get(usual)
    time = next((figure for figure in prediction.measured if figure.name == "E2E mean"), None)
    if figure is None or figure.change_frac is None or time is None or time.change_frac is None:
        return None
    saved = -time.change_frac
    if metric == "output_tokens_per_s":
        saved = 1 - 1 / (1 + figure.change_frac)
    latency = metric != "output_tokens_per_s"
    return Gain(
        metric=metric,
        change_frac=figure.change_frac,
        low_frac=figure.low_frac,
        high_frac=figure.high_frac,
        before=figure.replayed if latency else None,
        after=figure.changed if latency else None,
        saved_frac=max(0.0, saved),
        method="replay",
    )


def _better(gain: Gain) -> float:
    """The relative change, positive where it is an improvement."""
    return gain.change_frac if gain.metric == "output_tokens_per_s" else -gain.change_frac


def _helps(gain: Gain) -> bool:
    return _better(gain) >= LEAST_FRAC


def _outcome(prediction: Prediction, gain: Gain) -> Message:
    """What else becomes of the load with it: other times by which it is felt, and what scheduling decides."""
    changed = [
        message(
            "{name} {change}",
            name=figure.name,
            change=Share(figure.change_frac, signed=True),
        )
        for figure in prediction.measured
        if METRICS.get(figure.name, gain.metric) != gain.metric
        and figure.change_frac is not None
        and abs(figure.change_frac) >= FELT_FRAC
    ]
    changed += [
        message(
            "{name} {before} -> {after}",
            name=figure.name,
            before=Number(_round(figure.replayed)),
            after=Number(_round(figure.changed)),
        )
        for figure in prediction.decided
        if figure.name in SAID and _differs(figure)
    ]
    if prediction.outside_frac:
        share = Share(prediction.outside_frac)
        changed.append(message("{share} of its steps lie outside what was recorded", share=share))
    if not changed:
        return message("Replayed on this load.")
    return message("Replayed on this load: {changes}.", changes=joined(changed, ", "))


def _differs(figure: Figure) -> bool:
    return _round(figure.replayed) != _round(figure.changed)


def _round(value: float | None) -> int:
    return round(value or 0.0)


def _option(setting: str) -> str:
    if setting == "balance_ranks":
        return "--scheduler-cls schedtrace.balance.BalanceScheduler"
    return f"--{setting.replace('_', '-')}"


def _refuted(advice: Advice, outcome: Message) -> Message:
    return message(
        "{setting} {value} was tried on a replay of this load and does not help: {outcome}.",
        setting=Setting(_option(advice.setting or "")),
        value=given(float(advice.value))
        if not isinstance(advice.value, bool) and advice.value is not None
        else "",
        outcome=outcome,
    )
