"""Whether two runs decided alike, and the first step at which they did not, side by side."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from schedtrace.model.comparison import DecidedStep, Decisions, Divergence
from schedtrace.present.numbers import integer

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


def decisions_view(decisions: Decisions) -> Iterator[RenderableType]:
    """What was decided alike, then the first step that was not."""
    yield Text("Decisions of the scheduler", style="bold")
    yield Padding(Text(decided_alike(decisions)), (0, 0, 0, 2), expand=False)
    if decisions.first is None:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in (where(decisions.first), "base", "new"):
        table.add_column(heading)
    for name, base, new, differs in divergence_rows(decisions.first):
        table.add_row(name, base, new, style="" if differs else "dim")
    yield Padding(table, (0, 0, 0, 2), expand=False)
    yield Padding(Text(why(decisions.first), style="dim"), (0, 0, 0, 2), expand=False)


def decided_alike(decisions: Decisions) -> str:
    """In how many trials every step was decided alike."""
    compared, alike = decisions.trials_compared, decisions.trials_alike
    if not compared:
        return "not compared: no trial on both sides, or a record that does not tell who was scheduled"
    trials = "the trial" if compared == 1 else f"{alike} of {compared} trials"
    if alike == compared:
        return f"alike in every step of {trials if compared == 1 else f'all {compared} trials'}"
    if compared == 1:
        return "not alike throughout"
    fewest, most = min(decisions.common_steps), max(decisions.common_steps)
    common = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"alike in every step of {trials}; steps alike before the first that differs, if any: {common}"


def where(divergence: Divergence) -> str:
    """Which step it is."""
    trial = "" if divergence.trial is None else f"trial {divergence.trial}, "
    return f"{trial}step {divergence.at + 1}"


def divergence_rows(divergence: Divergence) -> list[tuple[str, str, str, bool]]:
    """Name, base, new, and whether they differ."""
    rows = []
    for key, name in ROWS.items():
        base, new = (_cell(side, key) for side in (divergence.base, divergence.new))
        rows.append((name, base, new, base != new and key != "step"))
    return rows


def why(divergence: Divergence) -> str:
    """What the decisions were made from and differs."""
    if divergence.base is None or divergence.new is None:
        return f"{'base' if divergence.base is None else 'new'} had nothing more to decide in this trial."
    if not divergence.given:
        return "Nothing that the trace tells of what they were decided from differs."
    return f"Differed before: {', '.join(ROWS[name] for name in divergence.given)}."


def _cell(side: DecidedStep | None, key: str) -> str:
    if side is None:
        return "-"
    if key == "scheduled":
        return f"{integer(side.requests)}, {integer(side.tokens)}"
    value = getattr(side, key)
    if isinstance(value, list):
        return ", ".join("?" if one is None else str(one) for one in value) or "none"
    if isinstance(value, str):
        return f"request {value}"
    return integer(value)
