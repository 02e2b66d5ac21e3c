"""The document: the verdict, the timeline with its data, and the report's sections, in one HTML file.

Its policy allows the one style and the one script that stand in it, by their hashes, and nothing else: the
page fetches nothing, and markup in a stranger's text could do nothing even if it were not escaped.
"""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from schedtrace.model.comparison import Comparison
from schedtrace.model.message import joined, message
from schedtrace.model.printable import printable
from schedtrace.model.report import Report, RunReport
from schedtrace.present.pages.comparison import comparison_page
from schedtrace.present.pages.report import report_page
from schedtrace.present.phrases import plain
from schedtrace.present.renderers import html
from schedtrace.present.report.data import BY_STEP, FIRST_CAUSE, STATES, Chart, words_of_causes
from schedtrace.present.report.named import MOST_STORIES, Named, marked, named
from schedtrace.present.sections import Note, Page, Section, Style, Styled
from schedtrace.present.stories import stories
from schedtrace.read.run import Run
from schedtrace.timeline.ranks import Ranks
from schedtrace.timeline.timeline import Timeline, make_timeline

SCRIPTS = ("../sentence.js", "model.js", "panels.js", "words.js", "moves.js")
"""The page's one script, in its parts."""
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""What could end the element that holds the data, or a line of it."""


def run_html(report: RunReport, ranks: Ranks, run: Run) -> str:
    """The page of one run.

    Args:
        report: Of ``analyze``.
        ranks: The timelines that it was made from.
        run: The run itself.
    """
    chart, names = Chart(), named(report)
    chart.add_run(ranks, run=0, origin_us=0, named=names)
    _add_stories(chart, run, names)
    shown = printable(report)
    rank = ranks.timelines[0].rank
    verdict = joined(shown.verdict)
    said = Note(Styled(verdict, Style.STRONG))
    short, full = (report_page(Report(runs=[report]), full=full).sections for full in (False, True))
    return _document(
        chart,
        title=shown.label,
        verdict=_fragment(shown, [Note(verdict)], rank),
        report=_fragment(shown, [section for section in short if section != said], rank),
        details=_fragment(shown, [section for section in full if section not in short], rank),
        zero="the trace's clock",
        runs=[{"label": shown.label, "path": shown.path}],
        findings=marked(shown),
        problems=[plain(problem) for problem in shown.problems],
    )


def comparison_html(comparison: Comparison, ranks: list[Ranks]) -> str:
    """The page of two runs on one time axis, each from its first request.

    Args:
        comparison: Of ``diff``.
        ranks: The timelines of the base and of the new run.
    """
    chart = Chart()
    marks = _first_difference(comparison)
    for run, of_run in enumerate(ranks):
        steps = {of_run.timelines[0].rank: [mark["step"] for mark in marks if mark["run"] == run]}
        chart.add_run(of_run, run=run, origin_us=first_us(of_run), named=Named(steps))
    shown = printable(comparison)
    return _document(
        chart,
        title=f"{shown.base_label} and {shown.new_label}",
        verdict=_fragment(shown, [Note(message("Verdict: {verdict}", verdict=shown.verdict))]),
        report=_fragment(shown, comparison_page(comparison).sections),
        details="",
        zero="each run's first request",
        runs=[
            {"label": f"base: {shown.base_label}", "path": shown.base_path},
            {"label": f"new: {shown.new_label}", "path": shown.new_path},
        ],
        findings=[],
        marks=marks,
        problems=[plain(note) for note in shown.notes],
    )


def first_us(ranks: Ranks) -> int:
    """When the first request came to a run, or its first step began, on the clock of its first rank."""
    return min((moment for timeline in ranks.timelines for moment in _first(timeline, ranks)), default=0)


def _first(timeline: Timeline, ranks: Ranks) -> Iterator[int]:
    arrivals = timeline.arrivals
    moments = (arrivals["arrived_us"].min(), arrivals["queued_us"].min(), timeline.steps["start_us"].min())
    known = [int(moment) for moment in moments if isinstance(moment, int)]
    if known:
        yield min(known) + ranks.offsets_us[timeline.rank]


def _add_stories(chart: Chart, run: Run, names: Named) -> None:
    """The pages of ``step`` and ``request`` for what findings name."""
    timelines = [
        make_timeline(trace, run.manifest, whole=True, front_end=run.front_end) for trace in run.traces
    ]
    half = MOST_STORIES // 2
    told = stories(run, timelines, names.examples[:half], names.requests[:half])
    chart.packed.add_texts("stories.at", told.keys())
    chart.packed.add_texts("stories.html", told.values())


def _fragment(document: Any, sections: list[Section], rank: int | None = None) -> Markup:
    """Sections as HTML, which the renderer has escaped."""
    return Markup(html.fragment(Page(document, lambda _: sections), rank=rank, level=2))  # noqa: S704


def _document(
    chart: Chart, *, title: str, verdict: Markup, report: Markup, details: Markup | str, **told: Any
) -> str:
    here = files("schedtrace.present.report")
    own, template, *scripts = (
        here.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "template.html", *SCRIPTS)
    )
    style = html.style_sheet() + own
    script = '"use strict";\n(() => {\n' + "\n".join(scripts) + "})();\n"
    data = {
        "columns": chart.packed.directory,
        "engines": chart.engines,
        "causes": words_of_causes(chart.causes),
        "states": STATES,
        "by_step": BY_STEP,
        "first_cause": FIRST_CAUSE,
        **told,
    }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        title=title,
        verdict=verdict,
        report=report,
        details=details,
        policy=f"default-src 'none'; style-src {html.source_of(style)}; "
        f"script-src {html.source_of(script)}; base-uri 'none'; form-action 'none'",
        style=Markup(style),  # noqa: S704  # our own file
        script=Markup(script),  # noqa: S704  # our own file
        data=Markup(in_script(data)),  # noqa: S704  # escaped for where it stands
        packed=chart.packed.text(),
        notes=chart.notes,
        **told,
    )


def in_script(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element.

    Raises:
        ValueError: a number in it is not finite.
    """
    return json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPED)


def _first_difference(comparison: Comparison) -> list[dict[str, Any]]:
    first = comparison.decisions.first
    sides = (first.base, first.new) if first else ()
    return [{"run": run, "step": side.step} for run, side in enumerate(sides) if side is not None]
