"""HTML page of a run: the verdict, the timeline with its data, and the report's sections, in one file.

The page's policy allows only its own style and script, by their hashes. The page therefore fetches nothing,
and markup in untrusted text would be harmless even if it were not escaped.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from schedtrace.diagnose.analyze import Timelines
from schedtrace.diagnose.verdict import leading
from schedtrace.explain.request import request_life
from schedtrace.explain.step import StepStories
from schedtrace.model.comparison import Comparison
from schedtrace.model.message import joined, plain
from schedtrace.model.printable import printable, visible
from schedtrace.model.report import Report, RunReport
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.present.pages.comparison import comparison_page
from schedtrace.present.pages.report import report_page
from schedtrace.present.pages.story import request_page, step_page
from schedtrace.present.renderers import html
from schedtrace.present.report.data import (
    BY_STEP,
    FEWEST_STORIES,
    FIRST_CAUSE,
    MOST_ENGINES,
    MOST_ROWS,
    MOST_STORIES,
    STATES,
    Named,
    TimelineChart,
    engines_of,
    marked,
    named,
    words_of_causes,
)
from schedtrace.present.sections import Headline, Note, Page, answer_note
from schedtrace.read.run import Run
from schedtrace.timeline.timeline import Timeline, make_timeline

SCRIPTS = ("../sentence.js", "model.js", "panels.js", "requests.js", "words.js", "moves.js")
"""Files of which the page's only script consists."""
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""Escapes for characters that could end the element with the data, or a line of it."""


def run_html(report: RunReport, run: Run, timelines: Timelines) -> str:
    """Return the page of one run.

    Args:
        report: Report of ``analyze``.
        run: The run.
        timelines: Timelines from which the report was made.
    """
    names, texts = named(report), dict[str, str]()
    chart = TimelineChart()
    engines = min(len(run.traces), MOST_ENGINES)
    for timeline, offset in engines_of(run, timelines):
        chart.add_engine(timeline, run=0, offset_us=offset, named=names, engines=engines)
        texts |= _stories(run, timeline, names)
    chart.packed.add_texts("stories.at", texts.keys())
    chart.packed.add_texts("stories.html", texts.values())
    chart.note_engines(len(run.traces))
    shown = printable(report)
    rank = run.traces.headers[0].engine_rank
    verdict = joined(shown.verdict)
    verdict_note = answer_note(verdict)
    short, full = (report_page(Report(runs=[report]), full=full).sections for full in (False, True))
    return _document(
        chart,
        title=shown.label,
        verdict=html.fragment([Note(verdict)], rank=rank, level=2),
        level=lead[0].severity if (lead := leading(shown.findings)) else "",
        report=html.fragment([section for section in short if section != verdict_note], rank=rank, level=2),
        details=html.fragment([section for section in full if section not in short], rank=rank, level=2),
        zero="the trace's clock",
        from_first=False,
        runs=[{"label": shown.label, "path": shown.path}],
        findings=marked(shown),
        problems=[plain(problem) for problem in shown.problems],
        marks=[],
    )


def comparison_html(comparison: Comparison, runs: list[Run]) -> str:
    """Return the page of two runs on one time axis, on which each begins with its first request.

    Args:
        comparison: Comparison of ``diff``.
        runs: The base and the new run.
    """
    chart, first = TimelineChart(), comparison.decisions.first
    sides = (first.base, first.new) if first else ()
    marks = [{"run": run, "step": side.step} for run, side in enumerate(sides) if side is not None]
    for place, run in enumerate(runs):
        steps = {run.traces.headers[0].engine_rank: [mark["step"] for mark in marks if mark["run"] == place]}
        engines, notes_before = min(len(run.traces), MOST_ENGINES), len(chart.notes)
        for timeline, offset in engines_of(run, Timelines(run)):
            chart.add_engine(
                timeline, run=place, offset_us=offset, named=Named(steps), engines=engines * len(runs)
            )
        chart.note_engines(len(run.traces))
        chart.notes[notes_before:] = [
            f"{('Base', 'New')[place]} run: {note}" for note in chart.notes[notes_before:]
        ]
    shown = printable(comparison)
    # The verdict and its warnings stand above the timeline.
    sections = [
        replace(section, title="Comparison", about="", warnings=[])
        if isinstance(section, Headline)
        else section
        for section in comparison_page(comparison).sections
    ]
    return _document(
        chart,
        title=f"{shown.base_label} and {shown.new_label}",
        verdict=html.fragment([Note(say("Verdict: {verdict}", verdict=shown.verdict))], level=2),
        level="",
        report=html.fragment(sections, level=2),
        details="",
        zero="each run's first request",
        from_first=True,
        runs=[
            {"label": f"base: {shown.base_label}", "path": shown.base_path},
            {"label": f"new: {shown.new_label}", "path": shown.new_path},
        ],
        findings=[],
        marks=marks,
        problems=[plain(note) for note in shown.notes],
    )


def _stories(run: Run, timeline: Timeline, names: Named) -> dict[str, str]:
    """Return the pages of an engine's steps and requests that findings name, including the warm-up."""
    if Fact.TIMES not in timeline.facts:
        return {}
    place = [header.engine_rank for header in run.traces.headers].index(timeline.rank)
    trace, whole = run.traces.once(place), timeline
    if timeline.steps.height < trace.steps.height:
        whole = make_timeline(trace, run.manifest, whole=True, front_end=run.front_end)
    half = max(FEWEST_STORIES, min(MOST_STORIES, MOST_STORIES * MOST_ROWS // max(1, whole.steps.height))) // 2
    return stories(
        run, whole, [at for at in names.examples[:half] if at[0] == whole.rank], names.requests[:half]
    )


def stories(
    run: Run, timeline: Timeline, steps: Iterable[tuple[int, int]], request_ids: Iterable[str]
) -> dict[str, str]:
    """Return HTML fragments by the address that leads to them: ``step=264``, ``request=t1-3``.

    Args:
        run: A run.
        timeline: Timeline of one engine of the run, for the whole trace (``make_timeline(..., whole=True)``).
        steps: Rank and number of each step.
        request_ids: Whole ids; ids of other engines' requests are left out.

    Raises:
        UsageError: If the engine has no such step.
    """
    explained, traced_ids = StepStories(run, timeline), timeline.request_states["request_id"]
    pages: dict[str, Page[Any]] = {
        html.step_link(step, rank): step_page(explained.story(step)) for rank, step in steps
    }
    for name in request_ids:
        if name in traced_ids:
            pages[html.request_link(visible(name))] = request_page(request_life(run, timeline, name))
    return {at: html.fragment(page.sections, rank=timeline.rank, level=2) for at, page in pages.items()}


def _document(
    chart: TimelineChart,
    *,
    title: str,
    verdict: str,
    level: str,
    report: str,
    details: str,
    zero: str,
    from_first: bool,
    runs: list[dict[str, str]],
    findings: list[dict[str, Any]],
    problems: list[str],
    marks: list[dict[str, Any]],
) -> str:
    here = files("schedtrace.present.report")
    own, *scripts = (here.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", *SCRIPTS))
    style = html.style_sheet() + own
    script = '"use strict";\n(() => {\n' + "\n".join(scripts) + "})();\n"
    shared: dict[str, Any] = {
        "zero": zero,
        "from_first": from_first,
        "runs": runs,
        "findings": findings,
        "problems": problems,
        "marks": marks,
    }
    data = {
        "columns": chart.packed.directory,
        "engines": chart.engines,
        "causes": words_of_causes(chart.causes),
        "states": STATES,
        "by_step": BY_STEP,
        "first_cause": FIRST_CAUSE,
        **shared,
    }
    return html.template("template.html").render(
        title=title,
        verdict=verdict,
        level=level,
        report=report,
        details=details,
        policy=f"default-src 'none'; style-src {html.source_of(style)}; "
        f"script-src {html.source_of(script)}; base-uri 'none'; form-action 'none'",
        style=Markup(style),  # noqa: S704  # our own file
        script=Markup(script),  # noqa: S704  # our own file
        data=Markup(in_script(data)),  # noqa: S704  # escaped for where it stands
        packed=chart.packed.packed_text(),
        notes=chart.notes,
        engines=chart.engines,
        **shared,
    )


def in_script(data: Any) -> str:
    """Return JSON for a script element, in which nothing can end that element.

    Raises:
        ValueError: If a number is not finite.
    """
    return json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPED)
