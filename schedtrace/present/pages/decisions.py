"""Whether two runs decided alike, and the first step at which they did not, side by side."""

from collections.abc import Iterator

from schedtrace.model.comparison import DecidedStep, Decisions, Divergence
from schedtrace.present.numbers import integer
from schedtrace.present.sections import Cell, Column, Note, Section, Style, Styled, Table

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
