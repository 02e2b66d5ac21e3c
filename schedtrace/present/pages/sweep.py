"""A sweep: one row a configuration, the Pareto front marked; columns in which all rows agree stand above."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from schedtrace.model.message import Message
from schedtrace.model.printable import integer, number, percent
from schedtrace.model.say import say
from schedtrace.model.statistics import Percentiles
from schedtrace.model.sweep_result import Bound, Sweep, SweepRow
from schedtrace.present.sections import (
    Cell,
    Field,
    Headline,
    Note,
    Page,
    Section,
    Style,
    Styled,
    Table,
    figure,
    table,
)

MOST_REFUSED = 10
EXTRAPOLATED_FRAC = 0.05
"""Share of a configuration's extrapolated steps from which the page warns."""


def sweep_page(sweep: Sweep) -> Page[Sweep]:
    """Make the page of a sweep."""
    return Page(sweep, _sections)


@dataclass(frozen=True)
class _Figure:
    heading: str
    """Line breaks are where a narrow column breaks it."""
    text: Callable[[SweepRow], str]
    name: str = ""
    """Name in a sentence; empty: as in the heading."""


def _sections(sweep: Sweep) -> Iterator[Section]:
    shown = [row for row in sweep.rows if row.refused is None]
    refused = [row for row in sweep.rows if row.refused is not None]
    settings = [_setting(name) for name in (sweep.rows[0].settings if sweep.rows else [])]
    varying, alike = _split(settings + _figures(sweep.slo), shown)
    yield _headline(sweep, shown, alike)
    if shown:
        yield _table(varying, shown)
        yield Note(Styled(_legend(sweep), Style.DIM))
    if refused:
        more = len(refused) - MOST_REFUSED
        left_out = f"... and {more} more: --format json" if more > 0 else ""
        yield table(refused[:MOST_REFUSED], REFUSED, left_out)
    yield from (Note(Styled(note, Style.DIM)) for note in sweep.notes)


def _headline(sweep: Sweep, shown: list[SweepRow], alike: list[tuple[str, str]]) -> Headline:
    title = say("Sweep of {label:code}: {rows:n configuration}", sweep, rows=len(sweep.rows))
    load = say(
        "{requests:n request}[{several:?}, {loads:n trial}], {prompt_tokens:n prompt token} and "
        "{output_tokens:n output token}, scheduled by vLLM {vllm_version} in virtual time",
        sweep,
        several=sweep.loads > 1,
    )
    varied = [
        name for name in sweep.rows[0].settings if len({str(row.settings[name]) for row in sweep.rows}) > 1
    ]
    lines: list[Message | str] = [load, f"Varied: {', '.join(varied)}. {sweep.step_times}"]
    if alike:
        lines.append(f"In all of them: {', '.join(f'{name} {text}' for name, text in alike)}.")
    return Headline(title, "", list(lines), [warning for warning in _warnings(sweep, shown) if warning])


def _warnings(sweep: Sweep, shown: list[SweepRow]) -> Iterator[Message | str]:
    outside = [row for row in shown if (row.extrapolated_frac or 0) >= EXTRAPOLATED_FRAC]
    if outside:
        yield say(
            "In {rows:n} of {all:n configuration}, {least:%} of the steps or more lie outside "
            "the recorded range (column extrapol.): their times are extrapolated.",
            rows=len(outside),
            all=len(shown),
            least=EXTRAPOLATED_FRAC,
        )
    unfinished = [row for row in shown if row.finished < row.requests]
    if unfinished:
        yield say(
            "In {rows:n configuration} not every request finishes (aborted when recorded, or "
            "refused for its length): figures are of those that do.",
            rows=len(unfinished),
        )
    if sweep.slo and not any(row.meets_slo for row in shown):
        yield "No configuration meets every bound."


def _setting(name: str) -> _Figure:
    return _Figure(name.replace("_", "\n"), lambda row: _value(row.settings[name]), name)


def _value(value: object) -> str:
    """Return ``4096`` as typed on a command line, to be copied."""
    return "default" if value is None else str(value)


def _figures(slo: Sequence[Bound]) -> list[_Figure]:
    figures = [
        _Figure("output\ntok/s", lambda row: number(row.output_tokens_per_s)),
        _Figure("TTFT\np50", lambda row: _p(row.ttft_ms, "p50")),
        _Figure("TTFT\np99", lambda row: _p(row.ttft_ms, "p99")),
        _Figure("TPOT\np50", lambda row: _p(row.tpot_ms, "p50")),
        _Figure("TPOT\np99", lambda row: _p(row.tpot_ms, "p99")),
        _Figure("E2E\np99", lambda row: _p(row.e2e_ms, "p99")),
    ]
    usual = {"ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p99"}
    figures += [_bound(at, bound) for at, bound in enumerate(slo) if bound.name not in usual]
    if slo:
        figures.append(_Figure("good\nreq/s", lambda row: number(row.goodput_requests_per_s)))
        figures.append(_Figure("SLO\nmet", lambda row: "yes" if row.meets_slo else "no"))
    return [
        *figures,
        _Figure("pre-\nempt.", lambda row: integer(row.preemptions), "preemptions"),
        _Figure("extra-\npol.", lambda row: percent(row.extrapolated_frac), "extrapolated steps"),
        _Figure("finished", lambda row: f"{row.finished:,}"),
    ]


def _bound(at: int, bound: Bound) -> _Figure:
    heading = f"{bound.latency.upper()}\np{bound.percentile:g}"
    return _Figure(heading, lambda row: number(row.bounds_ms[at]))


def _p(percentiles: Percentiles | None, name: str) -> str:
    return number(None if percentiles is None else float(getattr(percentiles, name)))


def _split(figures: list[_Figure], rows: list[SweepRow]) -> tuple[list[_Figure], list[tuple[str, str]]]:
    """Split columns into those whose rows differ, and the others with their common value."""
    varying, alike = [], []
    for shown in figures:
        texts = {shown.text(row) for row in rows}
        if len(texts) == 1 and len(rows) > 1:
            name = shown.name or shown.heading.replace("\n", " ")
            alike += [(name, text) for text in texts if text != UNKNOWN]
        else:
            varying.append(shown)
    return varying, alike


UNKNOWN = number(None)
"""Placeholder of a missing value; a column of placeholders is left out."""


def _table(figures: list[_Figure], rows: list[SweepRow]) -> Table:
    fields = [Field("", _mark), *(figure(column.heading, partial(_cell, column)) for column in figures)]
    return table(rows, fields)


def _mark(row: SweepRow) -> Cell:
    mark = f"{'*' if row.pareto else ''}{'R' if row.recorded else ''}"
    return Styled(mark, Style.GOOD) if row.pareto else mark


def _cell(shown: _Figure, row: SweepRow) -> Cell:
    text = shown.text(row)
    return Styled(text, Style.STRONG) if row.pareto else text


def _legend(sweep: Sweep) -> str:
    latencies = ", ".join(name.replace("_", " ").upper().replace(" P", " p") for name in sweep.objectives[1:])
    recorded = " R: as recorded." if any(row.recorded for row in sweep.rows) else ""
    good = " good req/s: requests a second that meet every bound themselves." if sweep.slo else ""
    return f"Times in ms. * Pareto front of output tok/s against {latencies}.{recorded}{good}"


REFUSED: list[Field[SweepRow]] = [
    Field("refused", lambda row: " ".join(f"{name}={_value(value)}" for name, value in row.settings.items())),
    Field("why", lambda row: row.refused or ""),
]
