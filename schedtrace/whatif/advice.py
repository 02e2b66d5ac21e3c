"""Advice by trial: which change of one setting is best for a recorded load, by replaying each of a menu.

The findings name causes; the replay picks the change, by what clients feel: the mean end-to-end latency where
requests come at their own times, the time until all are done where the engine or its clients set the pace.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from schedtrace.diagnose.gains import came_at_once
from schedtrace.diagnose.rules import better_setting
from schedtrace.diagnose.rules.allowed import why_no_async_scheduling
from schedtrace.errors import NeverEndsError, UsageError
from schedtrace.model.message import NOTHING, Message, Number, Setting, Share, given, joined, message
from schedtrace.model.prediction import Figure, Objective, Prediction
from schedtrace.model.report import Advice, Finding, Gain
from schedtrace.whatif.menu import KV_BLOCKS, Change, family, menu
from schedtrace.whatif.prediction import Predictor, Recorded

RESAMPLES = 4
"""Of the step times, for each change that is advised: fewer than for a replay of its own."""
LEAST_FRAC = 0.02
"""A smaller change is none."""
FELT_FRAC = 0.05
"""A smaller change of another figure is not said."""
MOST_ADVICE = 3
"""Settings that are advised, besides two of them together."""
ENOUGH_FRAC = 0.97
"""Of what the best value of a setting gains: the smallest change that reaches it is advised."""
SAID = ("steps", "preemptions", "recomputed tokens")
"""What scheduling decides, and a reader asks about."""
FIGURES = {
    Objective.LATENCY: "E2E mean",
    Objective.MAKESPAN: "makespan",
    Objective.THROUGHPUT: "output",
}
"""Of a prediction: the figure that an objective is about."""
GAINS = {"E2E mean": "e2e_mean_ms", "makespan": "output_tokens_per_s", "output": "output_tokens_per_s"}
"""The metric that a gain of it names."""

Progress = Callable[[int, int], None]
"""Called with the number of the replay that begins, and of how many."""


@dataclass(frozen=True)
class Trial:
    """What came of one change, or of two together."""

    changes: tuple[Change, ...]
    saved_frac: float
    """Of the objective: 0.2 is a fifth less time; minus infinity: the load never ends."""

    @property
    def family(self) -> str:
        """Of its first change."""
        return family(self.changes[0][0])


def judged(
    findings: list[Finding],
    base: Recorded,
    *,
    objective: Objective | None = None,
    progress: Progress = lambda *_: None,
) -> list[Finding]:
    """The findings with the changes that help this load most, the best one first.

    Advice that names a value which a replay can drive is a trial among the others: it stays only if it is
    the best of its kind. What a replay cannot drive stays as it is, without a gain of its own beside one
    that was replayed.

    Args:
        findings: Ranked, of one run.
        base: Its recorded load.
        objective: None: latency where requests come at their own times, else the
            time until all are done.
        progress: Told of each replay.

    Raises:
        InputError: the replay of the load as recorded is too far from what was recorded.
        UsageError: it never ends.
    """
    name = FIGURES[objective] if objective else _usual(base)
    with Predictor(base, resamples=RESAMPLES) as predictor:
        predictor.require_reproduced(name)
        search = Search(predictor, name, progress)
        proposed = [
            (advice.setting, advice.value)
            for finding in findings
            for advice in finding.advice
            if advice.setting is not None and advice.value is not None and _can_tell(advice.setting, base)
        ]
        chosen = search.best([*menu(base, predictor.options), *proposed])
        best = sorted(chosen, key=lambda trial: -trial.saved_frac)
        given = [_given(trial, predictor, name) for trial in best]
    return _attached(findings, given, search)


def _can_tell(setting: str, base: Recorded) -> bool:
    """Whether a replay shows what a setting does; prompts without recorded hashes share nothing in one."""
    if setting == "enable_prefix_caching":
        return all(load.prefix_block is not None for load in base.loads)
    return setting != "async_scheduling" or not why_no_async_scheduling(base.timelines[0])


def _usual(base: Recorded) -> str:
    """The objective that suits a load."""
    paced = any(load.closed is not None for load in base.loads)
    return "makespan" if paced or all(map(came_at_once, base.timelines)) else "E2E mean"


class Search:
    """Replays changes and keeps what came of them.

    Args:
        predictor: Of the load.
        name: The figure to be improved.
        progress: Told of each replay.
    """

    def __init__(self, predictor: Predictor, name: str, progress: Progress = lambda *_: None) -> None:
        self._predictor, self.name, self._progress = predictor, name, progress
        self._expected = 0
        self.tried: dict[tuple[Change, ...], Trial | None] = {}
        """None: vLLM refuses it, or a replay cannot make it."""

    def best(self, changes: list[Change]) -> list[Trial]:
        """The best change of each setting, the best first; then two of them together if that gains more."""
        self._expected = len(changes) + 2 * MOST_ADVICE
        for change in changes:
            self._try(change)
        for trial in self._of_families()[:MOST_ADVICE]:
            for value in self._between(trial.changes[0]):
                self._try((trial.changes[0][0], value))
        singles = [self._least_of(trial) for trial in self._of_families()][:MOST_ADVICE]
        pairs = [
            together
            for one, other in itertools.combinations(singles, 2)
            if (together := self._try(*one.changes, *other.changes)) is not None
        ]
        best = max(pairs, key=lambda trial: trial.saved_frac, default=None)
        if best is not None and best.saved_frac >= singles[0].saved_frac + LEAST_FRAC:
            singles.append(best)
        return singles

    @property
    def families(self) -> set[str]:
        """Kinds of settings of which a change was replayed."""
        return {trial.family for trial in self.tried.values() if trial is not None}

    def refuted(self, change: Change) -> Trial | None:
        """The trial of a change that does not help; None: it helps, or it could not be tried."""
        trial = self.tried.get((change,))
        return trial if trial is not None and trial.saved_frac < LEAST_FRAC else None

    def _try(self, *changes: Change) -> Trial | None:
        if changes not in self.tried:
            self._progress(len(self.tried) + 1, max(self._expected, len(self.tried) + 1))
            try:
                prediction = self._predictor.predict(dict(changes), resamples=0)
            except NeverEndsError:
                self.tried[changes] = Trial(changes, -math.inf)
            except UsageError:
                self.tried[changes] = None
            else:
                change = _figure(prediction, self.name)
                self.tried[changes] = Trial(changes, -change) if change is not None else None
        return self.tried[changes]

    def _of_families(self) -> list[Trial]:
        """The best trial of each kind of setting that helps, the best first."""
        best: dict[str, Trial] = {}
        for trial in self._helpful():
            held = best.get(trial.family)
            if held is None or trial.saved_frac > held.saved_frac:
                best[trial.family] = trial
        return sorted(best.values(), key=lambda trial: -trial.saved_frac)

    def _helpful(self) -> Iterator[Trial]:
        for trial in self.tried.values():
            if trial is not None and len(trial.changes) == 1 and trial.saved_frac >= LEAST_FRAC:
                yield trial

    def _between(self, change: Change) -> list[int]:
        """Values half-way to the next ones that were tried, on a logarithmic scale; none of a switch."""
        name, best = change
        now = self._predictor.options.get("num_blocks" if name == KV_BLOCKS else name)
        if isinstance(best, bool) or not isinstance(best, int) or not best or not isinstance(now, int):
            return []
        values = {
            value for ((tried, value),) in (key for key in self.tried if len(key) == 1) if tried == name
        }
        others = sorted(value for value in {*values, now} if value and value != best)
        below, above = ([one for one in others if one < best][-1:], [one for one in others if one > best][:1])
        return [middle for other in (*below, *above) if (middle := round(math.sqrt(best * other))) != other]

    def _least_of(self, best: Trial) -> Trial:
        """The smallest change of that setting which gains nearly as much."""
        name = best.changes[0][0]
        now = self._predictor.options.get("num_blocks" if name == KV_BLOCKS else name) or 0
        enough = [
            trial
            for trial in self._helpful()
            if trial.changes[0][0] == name and trial.saved_frac >= ENOUGH_FRAC * best.saved_frac
        ]
        if not all(isinstance(trial.changes[0][1], int) for trial in enough):
            return best
        return min(enough, key=lambda trial: abs(trial.changes[0][1] - now))


def _figure(prediction: Prediction, name: str) -> float | None:
    """The relative change of the time that a figure stands for; a rate is the time that its work takes."""
    figure = next((figure for figure in prediction.measured if figure.name == name), None)
    if figure is None or figure.change_frac is None:
        return None
    return 1 / (1 + figure.change_frac) - 1 if figure.higher_is_better else figure.change_frac


@dataclass(frozen=True)
class _Given:
    trial: Trial
    advice: Advice
    gain: Gain
    saved_frac: float
    """Of the objective, by the middle that is said."""


def _given(trial: Trial, predictor: Predictor, name: str) -> _Given:
    """Advice with its gain, its interval and what else it changes."""
    prediction = predictor.predict(dict(trial.changes))
    figure = next(figure for figure in prediction.measured if figure.name == name)
    change, low, high = figure.change_frac, figure.low_frac, figure.high_frac
    saved_frac = -(_figure(prediction, name) or 0.0)
    if name == "makespan":  # said as the rate that it is the inverse of
        change, low, high = (None if one is None else 1 / (1 + one) - 1 for one in (change, high, low))
    is_time = GAINS[name] == "e2e_mean_ms"
    gain = Gain(
        metric=GAINS[name],
        change_frac=change or 0.0,
        low_frac=low,
        high_frac=high,
        before=figure.replayed if is_time else None,
        after=figure.changed if is_time else None,
        saved_frac=saved_frac,
        method="replay",
    )
    single = len(trial.changes) == 1
    setting, value = trial.changes[0]
    return _Given(
        trial,
        Advice(
            message=joined([_setting(*one, predictor.options) for one in trial.changes], " with "),
            setting=setting if single else None,
            value=value if single else None,
            costs=_costs(prediction, name),
            tested=_outcome(prediction, "" if len(trial.changes) > 1 else name),
        ),
        gain,
        saved_frac,
    )


def _setting(name: str, value: Any, options: dict[str, Any]) -> Message:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return message("{option}", option=Setting(f"--{option}" if value else f"--no-{option}"))
    now = options.get("num_blocks" if name == KV_BLOCKS else name)
    said = [one if isinstance(one, str) else Number(one or 0) for one in (value, now)]
    return message("{option} {value} (now {now})", option=Setting(f"--{option}"), value=said[0], now=said[1])


def _attached(findings: list[Finding], given: list[_Given], search: Search) -> list[Finding]:
    """Each advice at the finding whose limit it moves, or at one of its own."""
    found = [_without_tried(finding, search) for finding in findings]
    for one in given:
        place = next((at for at, finding in enumerate(findings) if _is_about(finding, one.trial)), None)
        if place is None:
            settings = dict(one.trial.changes)
            found.append(better_setting.finding(one.advice, one.gain, settings, one.saved_frac))
            continue
        at = found[place]
        replayed = at.gain is not None and at.gain.method == "replay"
        found[place] = msgspec.structs.replace(
            at,
            advice=[*at.advice, one.advice] if replayed else [one.advice, *at.advice],
            gain=at.gain if replayed else one.gain,
        )
    return sorted(found, key=lambda finding: (not finding.title, not finding.leads, -finding.weight))


def _is_about(finding: Finding, trial: Trial) -> bool:
    """Whether a root cause's own advice names a setting of this kind."""
    return bool(finding.title) and any(trial.family in _families(advice) for advice in finding.advice)


def _families(advice: Advice) -> set[str]:
    """What it acts on, or would if a value were known."""
    if advice.setting:
        return {family(advice.setting)}
    named = (part.name for part in advice.message.parts() if isinstance(part, Setting))
    return {family(name.removeprefix("--").replace("-", "_")) for name in named}


def _without_tried(finding: Finding, search: Search) -> Finding:
    """Without the advice that was replayed; what did not help is said, and the estimate beside it goes."""
    kept: list[Advice] = []
    refuted: list[Message] = []
    for advice in finding.advice:
        change = (advice.setting or "", advice.value)
        if advice.setting is None and search.families & _families(advice):
            continue  # values were found or not
        if search.tried.get((change,)) is None:
            kept.append(advice)
        elif (trial := search.refuted(change)) is not None:
            refuted.append(_refuted(trial, search.name))
    if len(kept) == len(finding.advice):
        return finding
    return msgspec.structs.replace(finding, advice=kept, gain=None, refuted=[*finding.refuted, *refuted])


def _outcome(prediction: Prediction, name: str) -> Message:
    """What scheduling decides otherwise, and the times that get better besides the objective."""
    changed = [
        *(_changed(figure) for figure in _felt(prediction, name) if not _is_worse(figure)),
        *(
            message(
                "{name} {before} -> {after}",
                name=figure.name,
                before=Number(_round(figure.replayed)),
                after=Number(_round(figure.changed)),
            )
            for figure in prediction.decided
            if figure.name in SAID and _round(figure.replayed) != _round(figure.changed)
        ),
    ]
    if prediction.outside_frac:
        share = Share(prediction.outside_frac)
        changed.append(message("{share} of its steps lie outside what was recorded", share=share))
    if not changed:
        return message("Replayed on this load.")
    return message("Replayed on this load: {changes}.", changes=joined(changed, ", "))


def _costs(prediction: Prediction, name: str) -> Message:
    """What gets worse, in figures."""
    worse = [_changed(figure) for figure in _felt(prediction, name) if _is_worse(figure)]
    return message("{worse}.", worse=joined(worse, ", ")) if worse else NOTHING


def _felt(prediction: Prediction, name: str) -> list[Figure]:
    return [
        figure
        for figure in prediction.measured
        if figure.name != name and figure.name in FELT and abs(figure.change_frac or 0.0) >= FELT_FRAC
    ]


FELT = ("output", "TTFT p50", "TPOT p50", "E2E mean")
"""Figures that clients feel."""


def _is_worse(figure: Figure) -> bool:
    return ((figure.change_frac or 0.0) > 0) != bool(figure.higher_is_better)


def _changed(figure: Figure) -> Message:
    change = Share(figure.change_frac or 0.0, signed=True)
    return message("{name} {change}", name=figure.name, change=change)


def _round(value: float | None) -> int:
    return round(value or 0.0)


def _option(setting: str) -> str:
    if setting == "balance_ranks":
        return "--scheduler-cls schedtrace.balance.BalanceScheduler"
    return f"--{setting.replace('_', '-')}"


def _refuted(trial: Trial, name: str) -> Message:
    setting, value = trial.changes[0]
    outcome = message("{name} {change}", name=name, change=Share(-trial.saved_frac, signed=True))
    if math.isinf(trial.saved_frac):
        outcome = message("the load never ends")
    return message(
        "{setting} {value} was tried on a replay of this load and does not help: {outcome}.",
        setting=Setting(_option(setting)),
        value=given(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else "",
        outcome=outcome,
    )
