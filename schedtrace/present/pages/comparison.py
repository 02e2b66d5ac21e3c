"""Page of a comparison of two runs: the verdict, then the evidence."""

from collections.abc import Iterator

from schedtrace.model.comparison import (
    CauseChange,
    Comparison,
    ConfigChange,
    DecidedStep,
    Decisions,
    FindingChange,
    MetricChange,
    Outcome,
    Sample,
)
from schedtrace.model.numbers import counted, integer, number, percent, settled
from schedtrace.model.say import say
from schedtrace.present.phrases import CHANGES, in_brackets
from schedtrace.present.sections import (
    Content,
    Field,
    FindingSection,
    Headline,
    Note,
    Page,
    Section,
    Style,
    Styled,
    Text,
    figure_field,
    table,
)

TWO_DIGITS_FRAC = 0.1
"""Absolute change from which the end of an interval is shown without a decimal."""


def _style(metric: MetricChange) -> Style | None:
    if metric.worsened:
        return Style.BAD
    if not metric.significant:
        return Style.DIM
    judged = metric.higher_is_better is not None and metric.outcome != Outcome.DIFFERS
    return Style.GOOD if judged else Style.STRONG


def sample_text(sample: Sample) -> str:
    """Return ``817 (800..833)``: mean and range of the trials; ``5`` if all trials are equal."""
    if sample.min == sample.max:
        return number(sample.mean)
    return f"{number(sample.mean)} ({number(sample.min)}..{number(sample.max)})"


def change_text(metric: MetricChange) -> str:
    """Return ``+10.2 % (+7.1..+13)``: change of the means and its 95 % interval, in percent of the base."""
    if metric.change_frac is None and metric.new.mean:
        return "from 0"
    change = percent(metric.change_frac, signed=True)
    if metric.ci_low_frac is None or metric.ci_high_frac is None:
        return change
    return f"{change} ({_end(metric.ci_low_frac)}..{_end(metric.ci_high_frac)})"


def _end(fraction: float) -> str:
    decimals = 0 if round(abs(fraction), 6) >= TWO_DIGITS_FRAC else 1
    return f"{settled(100 * fraction, decimals):+.{decimals}f}"


METRICS: list[Field[MetricChange]] = [
    Field("mean (range)\nof trials", lambda metric: f"{metric.name} {metric.unit}".strip()),
    figure_field("base", lambda metric: sample_text(metric.base)),
    figure_field("new", lambda metric: sample_text(metric.new)),
    figure_field("change\n(95 %)", change_text),
    Field("result", lambda metric: Styled(str(metric.outcome), _style(metric))),
]
"""Columns of the table with a row per metric: means with the ranges of the trials."""


def noise_floors(metrics: list[MetricChange]) -> str:
    """Return the noise floors of metrics with a unit, each value once; empty if no metric varies."""
    floors: dict[str, str] = {}
    for metric in metrics:
        if metric.unit and metric.trials_needed is not None:
            floor = "not known" if metric.noise_floor_frac is None else percent(metric.noise_floor_frac)
            floors.setdefault(
                f"{floor} (5 % takes {integer(metric.trials_needed)} trials a side)", metric.name
            )
    listed = ", ".join(f"{name} {floor}" for floor, name in floors.items())
    return f"Noise floor: {listed}." if listed else ""


def legend(comparison: Comparison) -> str:
    """Return an explanation of how the figures are judged."""
    if comparison.compared_by == "requests":
        if not comparison.tests:
            return "One server against one: too few requests, or different loads, so nothing is tested."
        return (
            "Blocks of a fifth of the requests, or of the time, are drawn anew (circular block bootstrap). "
            f"Student's t at 5 %, corrected for {counted(comparison.tests, 'test')} (Holm)."
        )
    if not comparison.tests:
        return "Nothing varies between the trials of a side, or one has a single trial: nothing to test."
    return (
        "The noise floor is the smallest change that these trials would show in 4 of 5 cases. Rank test "
        f"(Mann-Whitney U) at 5 %, corrected for {counted(comparison.tests, 'test')} (Holm): with "
        f"{comparison.trials_least} trials a side a difference in any metric can be significant."
    )


ROWS = {
    "step": "step",
    "scheduled": "requests, tokens",
    "first_different": "first that differs",
    "preempted": "preempted",
    "causes": "stopped by",
    "arrived": "arrived so far",
    "num_running_before": "running before",
    "num_waiting_before": "waiting before",
    "token_budget": "token budget",
    "max_num_running_reqs": "max_num_running_reqs",
    "kv_blocks_free_before": "KV blocks free before",
}


def decisions_sections(decisions: Decisions) -> Iterator[Section]:
    """Yield the number of identical decisions, then the first step that differs."""
    yield Note(_alike(decisions), "Decisions of the scheduler:")
    first = decisions.first
    if first is None:
        return
    base, new = first.base, first.new

    def style(key: str) -> Style | None:  # the sides' step numbers may always differ
        return None if _cell(base, key) != _cell(new, key) and key != "step" else Style.DIM

    trial = "" if first.trial is None else f"trial {first.trial}, "
    fields: list[Field[str]] = [
        Field(f"{trial}step {first.at + 1}", lambda key: Styled(ROWS[key], style(key))),
        Field("base", lambda key: Styled(_cell(base, key), style(key))),
        Field("new", lambda key: Styled(_cell(new, key), style(key))),
    ]
    yield table(list(ROWS), fields)
    if base is None or new is None:
        why = f"{'base' if base is None else 'new'} had nothing more to decide in this trial."
    elif not first.given:
        why = "Nothing that the trace records of what they were decided from differs."
    else:
        why = f"Differed before: {', '.join(ROWS[name] for name in first.given)}."
    yield Note(Styled(why, Style.DIM))


def _alike(decisions: Decisions) -> str:
    """Return a sentence on the number of trials in which every step was decided identically."""
    compared, alike = decisions.trials_compared, decisions.trials_alike
    if not compared:
        return "not compared: no trial on both sides, or a record without who was scheduled"
    if alike == compared:
        return f"alike in every step of {'the trial' if compared == 1 else f'all {compared} trials'}"
    if compared == 1:
        return "not alike throughout"
    fewest, most = min(decisions.common_steps), max(decisions.common_steps)
    common = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    trials = f"{alike} of {compared} trials" if alike else "no trial"
    return f"alike in every step of {trials}; steps alike before the first that differs, if any: {common}"


def _cell(side: DecidedStep | None, key: str) -> str:
    if side is None:
        return "-"
    if key == "scheduled":
        return f"{integer(side.requests)}, {integer(side.tokens)}"
    value = getattr(side, key)
    if isinstance(value, list):
        return ", ".join("?" if item is None else str(item) for item in value) or "none"
    if isinstance(value, str):
        return f"request {value}"
    return integer(value)


MOST_SETTINGS = 15
MOST_CAUSES = 10


def comparison_page(comparison: Comparison) -> Page[Comparison]:
    """Return the page of a comparison."""
    return Page(comparison, _sections)


def _sections(comparison: Comparison) -> Iterator[Section]:
    sides: list[Content] = [
        say("{side}: {label:code}[, {path:code}]", side=side, label=label, path=path if path != label else "")
        for side, label, path in (
            ("base", comparison.base_label, comparison.base_path),
            ("new", comparison.new_label, comparison.new_path),
        )
    ]
    title = say("Verdict: {verdict}", verdict=comparison.verdict)
    yield Headline(title, "", sides, list(comparison.notes))
    if comparison.config:
        yield table(comparison.config, SETTINGS, most=MOST_SETTINGS)
    else:
        both = " that both records have" if comparison.unjudged else ""
        yield Note(f"No setting{both} differs.")
    yield table(comparison.metrics, METRICS)
    if floors := noise_floors(comparison.metrics):
        yield Note(floors)
    yield Note(Styled(legend(comparison), Style.DIM))
    yield from decisions_sections(comparison.decisions)
    if comparison.causes:
        yield table(comparison.causes, CAUSES, most=MOST_CAUSES)
    else:
        unknown = comparison.causes is None
        yield Note(
            "One side does not record who was refused." if unknown else "Nobody was refused on either side."
        )
    if not comparison.findings:
        shown = " that both records can show" if comparison.unjudged else ""
        yield Note(f"No finding{shown or 's'} on either side.")
    yield from (_finding(change) for change in comparison.findings)


SETTINGS: list[Field[ConfigChange]] = [
    Field("setting that differs", lambda change: say("{name:code}", change)),
    Field("base", lambda change: say("{value:code}", value=str(change.base))),
    Field("new", lambda change: say("{value:code}", value=str(change.new))),
    Field("", lambda change: Styled(_origins(change), Style.DIM)),
]


def _origins(change: ConfigChange) -> Text:
    """Return a sentence on the origins of both values, as far as they are known."""
    if not (change.base_origin and change.new_origin):
        return "given" if change.given else "resolved"
    return say("{base_origin} / {new_origin}", change)


CAUSES: list[Field[CauseChange]] = [
    Field(
        "refused or skipped, share of steps",
        lambda change: say("{loop}: {cause:cause}{detail}", change, detail=in_brackets(change.detail)),
    ),
    figure_field("base", lambda change: percent(change.base_steps_frac)),
    figure_field("new", lambda change: percent(change.new_steps_frac)),
    Field("times", lambda change: Styled(say("{base_exits:n} -> {new_exits:n}", change), Style.DIM)),
]


def _finding(change: FindingChange) -> FindingSection:
    # Counts or, if only one side reached the threshold, shares.
    values = say("{base_count:n} -> {new_count:n}", change)
    if change.state == "stayed" and not (change.base_count and change.new_count):
        below = say("below {threshold_frac:%}", change)
        base, new = (
            below if frac is None else say("{share:%}", share=frac)
            for frac in (change.base_frac, change.new_frac)
        )
        values = say("{base} -> {new} (reported from {threshold_frac:%})", change, base=base, new=new)
    about = say("[cause {cause:cause}  ]{values}", change, values=values)
    level = Styled(change.state, CHANGES[change.state])
    # What is below its threshold now has no words of the new run.
    of_base = change.state == "stayed" and not change.new_count
    words = say("[{of_base:?}base: ]{message}", change, of_base=of_base)
    return FindingSection(level, change.code, about, [Styled(words, Style.DIM)])
