"""Two runs compared: the verdict first, then what it rests on."""

from collections.abc import Iterator

from schedtrace.model.comparison import (
    CauseChange,
    Comparison,
    ConfigChange,
    DecidedStep,
    Decisions,
    Divergence,
    FindingChange,
    MetricChange,
    Outcome,
    Sample,
)
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.present.numbers import counted, integer, number, percent, settled
from schedtrace.present.pages.report_tables import left_out
from schedtrace.present.sections import (
    Cell,
    Column,
    Finding,
    Headline,
    Note,
    Page,
    Section,
    Style,
    Styled,
    Table,
    Text,
)
from schedtrace.present.words import CHANGES

TWO_DIGITS_FRAC = 0.1
"""Of an interval: from here on, two digits are more than it knows."""


def metrics_table(metrics: list[MetricChange]) -> Table:
    """One row per metric: means with the ranges of the trials."""
    columns = [
        Column("mean (range)\nof trials"),
        Column("base", numeric=True),
        Column("new", numeric=True),
        Column("change\n(95 %)", numeric=True),
        Column("result"),
    ]
    rows: list[list[Cell]] = [
        [
            f"{metric.name} {metric.unit}".strip(),
            sample_text(metric.base),
            sample_text(metric.new),
            change_text(metric),
            Styled(str(metric.outcome), _style(metric)),
        ]
        for metric in metrics
    ]
    return Table(columns, rows)


def _style(metric: MetricChange) -> Style | None:
    if metric.worsened:
        return Style.BAD
    if not metric.significant:
        return Style.DIM
    judged = metric.higher_is_better is not None and metric.outcome != Outcome.DIFFERS
    return Style.GOOD if judged else Style.STRONG


def sample_text(sample: Sample) -> str:
    """``817 (800..833)``: mean and range of the trials; ``5`` if all are alike."""
    if sample.min == sample.max:
        return number(sample.mean)
    return f"{number(sample.mean)} ({number(sample.min)}..{number(sample.max)})"


def change_text(metric: MetricChange) -> str:
    """``+10.2 % (+7.1..+13)``: change of the means and its 95 % interval, in percent of the base."""
    if metric.change_frac is None and metric.new.mean:
        return "from 0"
    change = percent(metric.change_frac, signed=True)
    if metric.ci_low_frac is None or metric.ci_high_frac is None:
        return change
    return f"{change} ({_end(metric.ci_low_frac)}..{_end(metric.ci_high_frac)})"


def _end(fraction: float) -> str:
    decimals = 0 if round(abs(fraction), 6) >= TWO_DIGITS_FRAC else 1
    return f"{settled(100 * fraction, decimals):+.{decimals}f}"


def noise_floors(metrics: list[MetricChange]) -> str:
    """What could not have been seen; empty where nothing varies. One of several in other units is enough."""
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
    """How the figures were judged."""
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
    """What was decided alike, then the first step that was not."""
    yield Note(_alike(decisions), "Decisions of the scheduler:")
    if decisions.first is None:
        return
    columns = [Column(_where(decisions.first)), Column("base"), Column("new")]
    yield Table(columns, list(_rows(decisions.first)))
    yield Note(Styled(_why(decisions.first), Style.DIM))


def _alike(decisions: Decisions) -> str:
    """In how many trials every step was decided alike."""
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


def _where(divergence: Divergence) -> str:
    trial = "" if divergence.trial is None else f"trial {divergence.trial}, "
    return f"{trial}step {divergence.at + 1}"


def _rows(divergence: Divergence) -> Iterator[list[Cell]]:
    for key, name in ROWS.items():
        base, new = (_cell(side, key) for side in (divergence.base, divergence.new))
        style = None if base != new and key != "step" else Style.DIM
        yield [Styled(name, style), Styled(base, style), Styled(new, style)]


def _why(divergence: Divergence) -> str:
    """What the decisions were made from and differs."""
    if divergence.base is None or divergence.new is None:
        return f"{'base' if divergence.base is None else 'new'} had nothing more to decide in this trial."
    if not divergence.given:
        return "Nothing that the trace records of what they were decided from differs."
    return f"Differed before: {', '.join(ROWS[name] for name in divergence.given)}."


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
    """A comparison."""
    return Page(comparison, _sections)


def _sections(comparison: Comparison) -> Iterator[Section]:
    base = _side("base", comparison.base_label, comparison.base_path)
    new = _side("new", comparison.new_label, comparison.new_path)
    title = say("Verdict: {verdict}", verdict=comparison.verdict)
    yield Headline(title, "", [base, new], list(comparison.notes))
    yield _settings(comparison.config)
    yield metrics_table(comparison.metrics)
    if floors := noise_floors(comparison.metrics):
        yield Note(floors)
    yield Note(Styled(legend(comparison), Style.DIM))
    yield from decisions_sections(comparison.decisions)
    yield _causes(comparison.causes)
    if not comparison.findings:
        yield Note("No findings on either side.")
    yield from (_finding(change) for change in comparison.findings)


def _side(side: str, label: str, path: str) -> Message:
    where = "" if label == path else say(", {path:code}", path=path)
    return say("{side}: {label:code}{where}", side=side, label=label, where=where)


def _settings(changes: list[ConfigChange]) -> Table | Note:
    if not changes:
        return Note("No setting differs.")
    columns = [Column("setting that differs"), Column("base"), Column("new"), Column("")]
    rows: list[list[Cell]] = [
        [
            say("{name:code}", name=change.name),
            say("{value:code}", value=str(change.base)),
            say("{value:code}", value=str(change.new)),
            Styled(_origins(change), Style.DIM),
        ]
        for change in changes[:MOST_SETTINGS]
    ]
    return Table(columns, rows, left_out(len(changes), MOST_SETTINGS))


def _origins(change: ConfigChange) -> Text:
    """Where both values come from, as far as it is known."""
    if not (change.base_origin and change.new_origin):
        return "given" if change.given else "resolved"
    return say("{base} / {new}", base=change.base_origin, new=change.new_origin)


def _causes(changes: list[CauseChange] | None) -> Table | Note:
    """Who was refused more or less often."""
    if changes is None:
        return Note("One side does not record who was refused.")
    if not changes:
        return Note("Nobody was refused on either side.")
    columns = [
        Column("refused or skipped, share of steps"),
        Column("base", numeric=True),
        Column("new", numeric=True),
        Column("times"),
    ]
    rows: list[list[Cell]] = [
        [
            say(
                "{loop}: {cause:cause}{detail}",
                loop=change.loop,
                cause=change.cause,
                detail=f" ({change.detail})" if change.detail else "",
            ),
            percent(change.base_steps_frac),
            percent(change.new_steps_frac),
            Styled(f"{integer(change.base_exits)} -> {integer(change.new_exits)}", Style.DIM),
        ]
        for change in changes[:MOST_CAUSES]
    ]
    return Table(columns, rows, left_out(len(changes), MOST_CAUSES))


def _finding(change: FindingChange) -> Finding:
    cause = say("cause {cause:cause}  ", cause=change.cause) if change.cause else ""
    about = say("{cause}{values}", cause=cause, values=_values(change))
    level = Styled(change.state, CHANGES[change.state])
    # What is below its threshold now has no words of the new run.
    of_base = change.state == "stayed" and not change.new_count
    told = say("base: {told}", told=change.message) if of_base else change.message
    return Finding(level, change.code, about, [Styled(told, Style.DIM)])


def _values(change: FindingChange) -> Text:
    """Of both sides: shares where one crossed its threshold, else how often it was found."""
    if change.state != "stayed" or (change.base_count and change.new_count):
        return f"{integer(change.base_count)} -> {integer(change.new_count)}"
    least = say("below {least:%}", least=change.threshold_frac)
    base, new = (
        least if frac is None else say("{share:%}", share=frac)
        for frac in (change.base_frac, change.new_frac)
    )
    limit = say("(found from {least:%} on)", least=change.threshold_frac)
    return say("{base} -> {new} {limit}", base=base, new=new, limit=limit)
