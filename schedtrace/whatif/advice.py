"""Advice by trial: the best change of one setting for a recorded load, found by replaying a menu of changes.

The findings name causes; the replays select the change, by what clients notice: the mean end-to-end latency
if requests arrive at their own times, or the time until all are done if the engine or its clients set the
pace.
"""

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from schedtrace.diagnose.rules import better_setting, client_limited
from schedtrace.diagnose.rules.allowed_settings import kv_bytes, kv_space, why_no_async_scheduling
from schedtrace.model.message import NOTHING, Message, Number, Setting, given, joined
from schedtrace.model.report import Advice, Finding, Gain
from schedtrace.model.say import say
from schedtrace.model.what_if import CONCURRENCY, Configuration, Figure, Objective, Replays
from schedtrace.whatif.part import part_of, usual_figure
from schedtrace.whatif.prediction import Predictor, RecordedLoad
from schedtrace.whatif.replays import BLOCKS
from schedtrace.whatif.search import LEAST_FRAC, Progress, Search, Trial, family, menu, saved_frac

RESAMPLES = 4
"""Number of resamples of the step times for each advised change; ``replay`` uses more."""
CLIENTS_FEEL = ("output", "TTFT p50", "TPOT p50")
"""Figures that show the effect of another number of clients."""
FELT_FRAC = 0.05
"""Minimum relative change with which another figure is reported."""
SAID = ("steps", "preemptions", "recomputed tokens")
"""Figures that scheduling determines and that are reported."""
FIGURES = {
    Objective.LATENCY: "E2E mean",
    Objective.MAKESPAN: "makespan",
    Objective.THROUGHPUT: "output",
}
"""Figure of a prediction for each objective."""
GAINS = {"E2E mean": "e2e_mean_ms", "makespan": "output_tokens_per_s", "output": "output_tokens_per_s"}
"""Metric in which a gain is stated, for each figure."""


def judged(
    findings: list[Finding],
    base: RecordedLoad,
    *,
    objective: Objective | None = None,
    progress: Progress = lambda *_: None,
) -> tuple[list[Finding], Replays]:
    """Return the findings with the changes that help this load most, best first, and all replays.

    Advice with a value that a replay can set is tried like the menu's changes, and stays only if it is the
    best of its kind. Advice without a value is dropped if values of its settings were tried; other advice
    stays. A finding that loses any advice also loses its estimated gain.

    Args:
        findings: Ranked findings of one run.
        base: Recorded load of the run.
        objective: Objective; None for the latency if requests come at their own times, otherwise for the time
            until all requests are finished.
        progress: Function called at each replay.

    Raises:
        InputError: If the baseline replay is too far from the recording.
        UsageError: If the baseline replay never ends.
    """
    base = part_of(base, findings)
    name = FIGURES[objective] if objective else usual_figure(base)
    with Predictor(base, resamples=RESAMPLES) as predictor:
        baseline = predictor.require_reproduced(name)
        search = Search(predictor, name, progress)
        proposed = [
            (advice.setting, advice.value)
            for finding in findings
            if (finding.code, finding.cause) not in base.absent
            for advice in finding.advice
            if advice.setting is not None and advice.value is not None and _can_tell(advice.setting, base)
        ]
        chosen = search.best([*menu(base, predictor.options), *proposed])
        findings = [_with_concurrency(finding, base, search) for finding in findings]
        best = sorted(chosen, key=lambda trial: -trial.estimate_frac)
        configurations = dict(search.configurations)
        for place, trial in enumerate(best, 1):
            configuration = predictor.predict(trial.configuration.changes)
            configurations[trial.changes] = msgspec.structs.replace(configuration, place=place)
        advised = [_advised(trial, configurations[trial.changes], search, base) for trial in best]
        document = predictor.document([*configurations.values()], baseline)
        document.no_advice = None if chosen else _no_advice(search)
    document.objective = name
    if search.misfit_frac and not chosen:
        return [_without_estimate(finding, search) for finding in findings], document
    tried = [finding for finding in findings if (finding.code, finding.cause) not in base.absent]
    untried = [finding for finding in findings if finding not in tried]
    ranked = sorted([*attach_advice(tried, advised, search), *untried], key=lambda finding: finding.place)
    return ranked, document


def _no_advice(search: Search) -> str:
    """Return why no change is advised: no gain is large enough, or none exceeds the replay's misfit."""
    settings = sum(CONCURRENCY not in dict(changes) for changes in search.tried)
    if search.misfit_frac:
        words = search.predictor.misfit_words(search.name)
        return f"{words}; no change of a setting gains more ({settings} tried)"
    least = f"{100 * LEAST_FRAC:.0f} %"
    return f"no change of a setting is expected to improve {search.name} by {least} ({settings} tried)"


def _without_estimate(finding: Finding, search: Search) -> Finding:
    """Remove the trace's estimate if a replay of the advice gained no more than the replay's misfit."""
    tried = [search.tried.get(((advice.setting or "", advice.value),)) for advice in finding.advice]
    return finding if not any(tried) else msgspec.structs.replace(finding, gain=None)


def _with_concurrency(finding: Finding, base: RecordedLoad, search: Search) -> Finding:
    """Add the effect of more and fewer clients to ``client-limited``, if clients wait for answers."""
    now = base.clients
    if finding.code != client_limited.RULE.code or now is None or not finding.advice:
        return finding
    outcomes = []
    counts = {min(2 * now, base.requests // base.trial_count), max(1, now // 2)} - {now}
    for clients in sorted(counts, reverse=True):
        trial = search.trial((CONCURRENCY, clients))
        if trial is not None and not math.isinf(trial.saved_frac):
            figures = [trial.configuration.figure(name) for name in CLIENTS_FEEL]
            changes = [_changed(figure) for figure in figures if figure is not None]
            words = "With {clients:n client}: {changes}."
            outcomes.append(say(words, clients=clients, changes=joined(changes, ", ")))
    first = msgspec.structs.replace(finding.advice[0], tested=joined(outcomes))
    return msgspec.structs.replace(finding, advice=[first, *finding.advice[1:]])


def _can_tell(setting: str, base: RecordedLoad) -> bool:
    """Return whether a replay can show a setting's effect; without recorded hashes, prompts share nothing."""
    if setting == "enable_prefix_caching":
        return all(load.prefix_block is not None for load in base.loads)
    return setting != "async_scheduling" or not why_no_async_scheduling(base.timelines[0])


@dataclass(frozen=True)
class Advised:
    """Trial of a change, described in sentences."""

    trial: Trial
    advice: Advice
    gain: Gain


def _advised(trial: Trial, configuration: Configuration, search: Search, base: RecordedLoad) -> Advised:
    """Return advice with its gain, the gain's interval and other effects.

    Args:
        trial: The change as the search judged it.
        configuration: The same change with intervals.
        search: The search that tried it.
        base: The recorded load.
    """
    name, predictor = search.name, search.predictor
    figure = next(figure for figure in configuration.figures if figure.name == name)
    was = next((was for was in predictor.recorded.figures if was.name == name), None)
    single = len(trial.changes) == 1
    setting, value = trial.changes[0]
    outcome = _outcome(configuration, name, base)
    tested = joined([outcome, _unsure(figure, base) if trial.unsure else NOTHING])
    if search.misfit_frac:
        tested = say(
            "{tested} The replay as recorded is {off:%} off, which its interval includes.",
            tested=tested,
            off=search.misfit_frac,
        )
    worse = [_changed(figure) for figure in _felt(configuration, name) if _is_worse(figure)]
    return Advised(
        trial,
        Advice(
            message=joined([_change(*change, predictor, base) for change in trial.changes], " with "),
            setting=setting if single else None,
            value=value if single else None,
            costs=say("[{worse}.]", worse=joined(worse, ", ")),
            tested=tested,
        ),
        _gain(figure, was.before if was else None),
    )


def _gain(figure: Figure, was: float | None) -> Gain:
    """Return the gain that a figure shows; ``was`` is its value in the recording."""
    change, low, high = figure.change_frac or 0.0, figure.low_frac, figure.high_frac
    saved = saved_frac(figure, change)
    if figure.name == "makespan":  # said as the rate that it is the inverse of
        low, high = (
            None if change_frac is None else 1 / (1 + change_frac) - 1 for change_frac in (high, low)
        )
        change = 1 / (1 + change) - 1
    is_time = GAINS[figure.name] == "e2e_mean_ms"
    return Gain(
        metric=GAINS[figure.name],
        change_frac=change,
        low_frac=low,
        high_frac=high,
        before=was if is_time else None,
        after=was * (1 + change) if is_time and was is not None else None,
        saved_frac=saved,
        method="replay",
    )


def _unsure(figure: Figure, base: RecordedLoad) -> Message:
    """Return a sentence with a figure's bounds, if the replay has larger steps than any recorded step."""
    return say(
        "Its {figure} may change by {low_frac:+%} to {high_frac:+%}, since no recorded step has more than "
        "{tokens:n token}[ or {decodes:n decode}]: only a run can tell.",
        figure,
        figure=figure.name,
        tokens=int(base.times.most_tokens),
        decodes=int(base.times.most_decodes) if base.times.first_decode_us else None,
    )


def _change(name: str, value: Any, predictor: Predictor, base: RecordedLoad) -> Message:
    """Return a change as an option to type, with the current value (``kv_space`` for the KV cache)."""
    if name == BLOCKS:
        timeline = base.timelines[0]
        space = kv_space(timeline, value)
        if kv_bytes(timeline, value) or timeline.header.settings.get("cache_config.num_gpu_blocks_override"):
            return space
        now = timeline.header.kv_blocks_total
        return say("{space}, for {blocks:n KV block}[ (now {now:n})]", space=space, blocks=value, now=now)
    if isinstance(value, bool):
        return say("{option:setting}", option=_option(name, value))
    if value is None:
        return say("no {option:setting}", option=_option(name))
    shown = [
        setting_value if isinstance(setting_value, str) else Number(setting_value or 0)
        for setting_value in (value, predictor.now(name))
    ]
    return say("{option:setting} {value} (now {now})", option=_option(name), value=shown[0], now=shown[1])


def attach_advice(findings: list[Finding], advised: list[Advised], search: Search) -> list[Finding]:
    """Attach advice to the first finding with advice of the same family, or else to a new finding."""
    placed = [_without_tried(finding, search) for finding in findings]
    families = [{name for advice in each.advice for name in _families(advice)} for each in findings]
    order = sorted(range(len(placed)), key=lambda at: placed[at].place)  # without the estimates
    for advised_trial in advised:
        affected = advised_trial.trial.family
        place = next((at for at in order if findings[at].title and affected in families[at]), None)
        if place is None:
            settings = dict(advised_trial.trial.changes)
            placed.append(
                better_setting.finding(advised_trial.advice, advised_trial.gain, settings, GAINS[search.name])
            )
            continue
        at = placed[place]
        replayed = at.gain is not None and at.gain.method == "replay"
        placed[place] = msgspec.structs.replace(
            at,
            advice=[*at.advice, advised_trial.advice] if replayed else [advised_trial.advice, *at.advice],
            gain=at.gain if replayed else advised_trial.gain,
        )
    explained = [_explained(*both, search) for both in zip(findings, placed, strict=False)]
    return sorted([*explained, *placed[len(findings) :]], key=lambda finding: finding.place)


def _explained(before: Finding, now: Finding, search: Search) -> Finding:
    """Add the best unsuccessful trial to a finding that would otherwise have neither advice nor a reason."""
    if now.advice or now.refuted != before.refuted:
        return now
    single = [trial for trial in search.tried.values() if trial is not None and len(trial.changes) == 1]
    trials: list[Trial] = []
    for advice in before.advice:
        if advice.setting is None:  # all values of the settings that are named without one
            trials += [trial for trial in single if trial.family in _families(advice)]
        else:
            trials += [trial for trial in single if trial.changes[0] == (advice.setting, advice.value)]
    best = max(trials, key=lambda trial: trial.saved_frac, default=None)
    if best is None or best.helps:
        return now
    return msgspec.structs.replace(now, refuted=[*now.refuted, _refuted(best, search)])


def _families(advice: Advice) -> set[str]:
    """Return the resources on which a finding's advice acts, even if the advice states no value."""
    if advice.setting:
        return {family(advice.setting)}
    named = (part.name for part in advice.message.parts() if isinstance(part, Setting))
    options = (name.partition(" ")[0].removeprefix("--") for name in named)
    return {family(option.replace("-", "_")) for option in options}


def _without_tried(finding: Finding, search: Search) -> Finding:
    """Remove replayed advice, and the finding's estimated gain; state which advice did not help."""
    untried: list[Advice] = []
    refuted: list[Message] = []
    for advice in finding.advice:
        change = (advice.setting or "", advice.value)
        if advice.setting is None and search.families & _families(advice):
            continue  # values were found or not
        if search.tried.get((change,)) is None:
            untried.append(advice)
        elif (trial := search.refuted(change)) is not None:
            refuted.append(_refuted(trial, search))
    if len(untried) == len(finding.advice):
        return finding
    return msgspec.structs.replace(finding, advice=untried, gain=None, refuted=[*finding.refuted, *refuted])


def _outcome(configuration: Configuration, name: str, base: RecordedLoad) -> Message:
    """Describe the changed decisions, and the latencies that improve besides the objective."""
    own = name if len(configuration.changes) == 1 else ""
    changed = [
        *(_changed(figure) for figure in _felt(configuration, own) if not _is_worse(figure)),
        *(
            say("{name} {before:n} -> {after:n}", name=figure.name, before=before, after=after)
            for figure in configuration.figures
            if figure.name in SAID
            and (before := round(figure.before or 0.0)) != (after := round(figure.value or 0.0))
        ),
        say("[{extrapolated_frac:%} of its steps lie outside what was recorded]", configuration),
    ]
    changes = joined(changed, ", ")
    return say(
        "Replayed on {load}[: {changes}].[ {output}]",
        load=base.load_words,
        changes=changes,
        output=_new_output(configuration, name, base),
    )


BEYOND_SHOWN = 1.25
"""Ratio of the predicted output rate to the highest recorded one; above it, a note warns that front end and
clients may not keep up."""


def _new_output(configuration: Configuration, name: str, base: RecordedLoad) -> Message:
    """Return a caveat about an output rate that front end and clients never reached in the recording."""
    output, processors = configuration.figure("output"), base.processors
    if output is None or output.value is None or processors is None:
        return NOTHING
    shown = max(processors.most_output, round(output.before or 0))  # of a load of less than a second
    if output.value <= BEYOND_SHOWN * shown:
        return NOTHING
    if processors.are_short and GAINS[name] == "output_tokens_per_s":
        return say(
            "Processors were short (the front end waited for one {waited:%} of the time that it was ready to "
            "run), and more output needs more of them, so the interval begins at the {shown:n} tok/s that "
            "front end and clients took at most.",
            waited=processors.waited_frac,
            shown=shown,
        )
    return say(
        "Front end and clients took at most {shown:n} tok/s in this recording; whether they keep up with "
        "{after:n} is not replayed.",
        shown=shown,
        after=round(output.value),
    )


def _felt(configuration: Configuration, name: str) -> list[Figure]:
    own = {name, "output"} if name == "makespan" else {name}  # one is the inverse of the other
    return [
        figure
        for figure in configuration.figures
        if figure.name not in own and figure.name in FELT and abs(figure.change_frac or 0.0) >= FELT_FRAC
    ]


FELT = ("output", "TTFT p50", "TPOT p50", "E2E mean")
"""Figures that clients notice."""


def _is_worse(figure: Figure) -> bool:
    return ((figure.change_frac or 0.0) > 0) != bool(figure.higher_is_better)


def _changed(figure: Figure) -> Message:
    return say("{name} {change_frac:+%}", figure)


def _option(setting: str, value: Any = None) -> str:
    """Return an option as on a command line; a switch has no value."""
    if setting == "balance_ranks":
        return "--scheduler-cls schedtrace.balance.BalanceScheduler"
    return f"--{'no-' if value is False else ''}{setting.replace('_', '-')}"


def _refuted(trial: Trial, search: Search) -> Message:
    """Describe a change that does not help; if it may help or harm, state its range."""
    name = search.name
    setting, value = trial.changes[0]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_within_misfit = LEAST_FRAC <= trial.saved_frac <= search.misfit_frac
    unsure = trial.saved_frac >= LEAST_FRAC and not is_within_misfit
    outcome = say("the load never ends")
    if not math.isinf(trial.saved_frac):
        outcome = say(
            "{name} {most:+%}[{unsure:?} to {least:+%}]",
            name=name,
            most=_change_of(name, trial.saved_frac),
            unsure=unsure,
            least=_change_of(name, trial.least_frac),
        )
    return say(
        "{option:setting}[ {value}] was tried on a replay of this load and {does} not help: {outcome}"
        "[, less than the {off:%} that the replay as recorded is off].",
        option=_option(setting, value),
        value=given(value) if is_number else value if isinstance(value, str) else "",
        does="may" if unsure else "does",
        outcome=outcome,
        off=search.misfit_frac if is_within_misfit else None,
    )


def _change_of(name: str, saved: float) -> float:
    """Return the relative change of a figure for a saved share; the inverse of ``search.saved_frac``."""
    return saved / (1 - saved) if name == FIGURES[Objective.THROUGHPUT] else -saved
