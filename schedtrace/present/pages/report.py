"""A report of runs on one screen: the verdict, where the requests' time went, and the root causes by gain."""

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean

from schedtrace.diagnose.root_causes import QUOTED
from schedtrace.diagnose.rules import KINDS
from schedtrace.diagnose.run_statistics import survivors
from schedtrace.diagnose.serving_metrics import counted_time
from schedtrace.model.fleet import FleetTimePart
from schedtrace.model.message import NOTHING, Message, Number, joined, plain
from schedtrace.model.numbers import integer
from schedtrace.model.report import Finding as Found
from schedtrace.model.report import Report, RunReport, TimePart
from schedtrace.model.say import say
from schedtrace.model.statistics import Distribution, Percentiles
from schedtrace.model.trace_facts import Fact
from schedtrace.present.pages.report_details import (
    action,
    details,
    engines_table,
    finding_sections,
    step_list,
    trials_table,
)
from schedtrace.present.pages.run_header import header_lines, log_figures, noteworthy
from schedtrace.present.pages.what_if import tried_changes
from schedtrace.present.phrases import GAINS, severity_word, tail_sentence, time_part, whose_figures
from schedtrace.present.sections import (
    Commands,
    Content,
    Headline,
    Note,
    Page,
    Part,
    RootCauseSection,
    Section,
    Shares,
    Style,
    Styled,
    Table,
    answer_note,
    unstyled,
)
from schedtrace.timeline.charges import CACHE_RESET

MOST_LINES, WIDTH = 40, 80
"""Lines and columns of a usual terminal."""
MOST_CAUSES = 5
SHOWN_FROM_FRAC = 0.05
"""Share below which a root cause is only named instead of described."""
NAMED_FROM_FRAC = 0.01
"""Share below which only the code of a root cause is named, and a part of the time counts as other."""
PARTS_OF = {"interruption": "interrupted", "front-end": "front_end"}
"""Part of the requests' time by code of finding, for parts that have no cause."""
APART_FRAC = 0.04
"""Difference between two shares of the requests' time above which the page explains it."""
MOST_PARTS, FEWER_PARTS = 7, 5
MOST_ENGINES, EXTREMES = 4, 2
"""Maximum number of rows of the engines table, and number of engines with the most and the fewest requests
that are shown if there are more."""
OTHERS_LINES = 6
"""Number of lines reserved for the other findings."""


def report_page(report: Report, *, full: bool = False, replays: bool = False) -> Page[Report]:
    """Return the page of all runs, one after the other.

    Args:
        report: Report of ``analyze``.
        full: Whether to show every table and finding (``--details``).
        replays: Whether to name the command that tries other settings, because it can run here and was not
            used.
    """

    def run_sections(shown: Report) -> Iterator[Section]:
        for run in shown.runs:
            yield from _run(run, full=full, replays=replays and not run.not_judged and bool(run.time_split))

    return Page(report, run_sections)


def _run(run: RunReport, *, full: bool, replays: bool) -> Iterator[Section]:
    about = say("[  {path:code}]", path=run.path if run.path != run.label else "")
    lines: list[Content] = [*header_lines(run, full=full), *_figures(run)]
    first: list[Section] = [Headline(run.label, about, lines, list(run.problems))]
    if run.verdict:
        first.append(answer_note(joined(run.verdict)))
    engines = run.statistics.engines if run.statistics is not None else []
    several = len(engines) > 1 and not full
    if run.time_split:
        parts = time_parts(run.time_split, FEWER_PARTS if several else MOST_PARTS)
        first.append(Shares("Where the requests' time went", parts))
    if tail := tail_sentence(run.tails, engines=run.config["engines"]):
        first.append(Note(tail, "Tail:"))
    roots = [finding for finding in run.findings if finding.title]
    if apart := _apart(run.time_split, roots):
        first.append(Note(Styled(apart, Style.DIM)))
    commands: list[Section] = [*_tested(run, full=full), *_commands(run, roots, replays=replays)]
    room = MOST_LINES - OTHERS_LINES - sum(map(_height, [*first, *commands]))
    if several:
        few = len(engines) - 1 <= MOST_ENGINES
        side_by_side = engines_table(engines, MOST_ENGINES if few else EXTREMES)
        if _height(side_by_side) + (_height(_cause(1, roots[0], len(engines) - 1)) if roots else 0) <= room:
            first.append(side_by_side)
            room -= _height(side_by_side)
    yield from first
    shown, named = _chosen(roots, room, run.config["engines"])
    yield from shown
    if full:
        yield from details(run)
        return
    if run.config["exits_via"] is None:  # a log: little is known, and that little is shown
        yield trials_table(run.trials, log=True)
        yield from log_figures(run)
        yield from finding_sections([finding for finding in run.findings if not finding.title], engines=1)
    # The verdict may state a finding that is too small to be described.
    stated = [root for root in named if root.verdict in run.verdict and root.advice]
    advised = [Note(action(root.advice[0]), "Try:") for root in stated[:1]]
    yield from advised
    named = [root for root in named if not root.verdict or root.verdict not in run.verdict]
    room -= sum(map(_height, shown)) + sum(map(_height, advised))
    yield from _others(named, 1 + room + OTHERS_LINES)  # no blank line at the top
    if notes := noteworthy(run.settings):
        yield Note(notes, "Settings:")
    yield from commands


def _figures(run: RunReport) -> Iterator[Message]:
    """Yield throughput and latency: means over trials and, with several engines, over all engines."""
    latencies: list[tuple[Percentiles | Distribution | None, ...]]
    statistics = run.statistics
    if statistics is not None and len(statistics.engines) > 1:
        output = statistics.engines[-1].output_tokens_per_s or None
        latencies = [(latency.ttft_ms, latency.tpot_ms) for latency in statistics.latency[:1]]
    else:
        output = _mean([trial.output_tokens_per_s for trial in run.trials])
        latencies = [(trial.ttft_ms, trial.tpot_ms) for trial in run.trials]
    figures = []
    if output is not None:
        figures.append(say("{output:n} output tok/s[ {over}]", output=output, over=counted_time(run)))
    for at, name in enumerate(("TTFT", "TPOT")):
        p50 = _mean([times.p50 for pair in latencies if (times := pair[at])])
        if p50 is not None:
            figures.append(say("{name} p50 {p50:n} ms", name=name, p50=p50))
    if figures:
        yield joined(figures, ", ")
    if none := survivors(statistics):
        yield none


def _mean(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return mean(present) if present else None


def time_parts(split: Sequence[TimePart | FleetTimePart], most: int) -> list[Part]:
    """Return the largest parts of requests' time, with the others combined into one."""
    shown = [part for part in split if part.share_frac >= NAMED_FROM_FRAC][:most]
    parts = []
    for part in shown:
        label, style = time_part(part.part, part.cause)
        parts.append(Part(label, part.share_frac, style, part.cause or part.part))
    rest = sum(part.share_frac for part in split) - sum(part.share_frac for part in shown)
    if rest >= NAMED_FROM_FRAC:
        parts.append(Part("other", rest, Style.DIM))
    return parts


def _apart(split: list[TimePart], roots: list[Found]) -> Message:
    """Return why the verdict's share differs from the bar with the same name; empty if they are close."""
    first = roots[0] if roots else None
    if first is None or first.share_frac is None or first.verdict.arguments.get(QUOTED) is None:
        return NOTHING
    # Waits after a reset of the prefix cache stand in the bars of their causes.
    part = None if first.cause == CACHE_RESET else PARTS_OF.get(first.code)
    bar = sum(
        piece.share_frac
        for piece in split
        if (piece.part == part if part else piece.cause == (first.cause or 0))
    )
    if not bar or abs(bar - first.share_frac) < APART_FRAC:
        return NOTHING
    if bar < first.share_frac:  # a verdict about a cause names what else it counts
        return say(
            "[{part:?}The verdict's {share_frac:%} include what requests waited for in that time, which has "
            "bars of its own.]",
            first,
            part=part,
        )
    charged = [charge for root in roots for charge in (root, *root.symptoms) if charge is not first]
    other_codes = dict.fromkeys(
        charge.code for charge in charged if charge.share_frac and KINDS[charge.code].charges
    )
    return say(
        "Of the {bar:%} above, {share_frac:%} are the verdict's[; the rest is charged to {others}].",
        first,
        bar=bar,
        others=", ".join(other_codes),
    )


def _chosen(roots: list[Found], lines: int, engines: int) -> tuple[list[RootCauseSection], list[Found]]:
    """Return the root causes that fit on the screen, and the others.

    The first root cause may weigh less than later ones. Those that weigh more than the
    first are described if there is room at least for a short form.
    """
    worth = [root for root in roots if root.leads or root.tail or root.weight >= SHOWN_FROM_FRAC][
        :MOST_CAUSES
    ]
    sections = [_cause(place, root, engines) for place, root in enumerate(worth, 1)]
    wanted = sum(root is worth[0] or root.weight > worth[0].weight for root in worth)
    if wanted > 1:
        lines += OTHERS_LINES // 2  # they would be named there
    if sum(map(_height, sections[:wanted])) > lines:
        sections[:wanted] = [replace(section, actions=section.actions[:1]) for section in sections[:wanted]]
    if sum(map(_height, sections[:wanted])) > lines:
        shorter = [
            replace(section, paragraphs=section.paragraphs[:1], actions=[]) for section in sections[1:wanted]
        ]
        sections[1:wanted] = shorter
    shown = 0
    for section in sections:
        lines -= _height(section)
        if lines < 0 and shown:
            break
        shown += 1
    return sections[:shown], [root for root in roots if root not in worth[:shown]]


def _cause(place: int, root: Found, engines: int) -> RootCauseSection:
    paragraphs: list[Content] = [say("{message}[ {whose}]", root, whose=whose_figures(root, engines))]
    if root.holder and place > 1:
        paragraphs.append(root.holder)
    paragraphs += root.refuted[:1]
    return RootCauseSection(
        place,
        Styled(root.title, severity_word(root.severity).style),
        _gain(root),
        paragraphs,
        [action(advice) for advice in root.advice[:2]],
        root.engine_rank,
        step_list(root) if root.steps else "",
    )


def _gain(root: Found) -> Message:
    if (gain := root.gain) is not None:
        metric = GAINS[gain.metric]
        if gain.before is not None and gain.after is not None:
            return say(
                "{metric} {before} -> ~{after} ms",
                metric=metric,
                before=Number(gain.before, 0),
                after=Number(gain.after, 0),
            )
        ends = [integer(100 * end) for end in (gain.low_frac, gain.high_frac) if end is not None]
        interval = f" ({ends[0]} to {ends[1]})" if len({*ends}) > 1 else ""
        return say(
            "~{sign}{change} % {metric}{interval}",
            sign="+" if gain.change_frac > 0 else "",
            change=Number(100 * gain.change_frac, 0),
            metric=metric,
            interval=interval,
        )
    if root.cost_of == "run" and root.weight > (root.share_frac or 0.0):
        return say("{cost_frac:%} of the run", root)
    return NOTHING if root.share_frac is None else say("{share_frac:%} of requests' time", root)


def _others(roots: list[Found], room: int) -> Iterator[Note]:
    """Yield the findings too small to be described; if there is no room, only their codes.

    A finding whose share is unknown may be large and is therefore named.
    """
    unknown = [root for root in roots if root.share_frac is None and root.gain is None and root.verdict]
    named = [root for root in roots if root.weight >= NAMED_FROM_FRAC or root in unknown]
    small = list(dict.fromkeys(root.code for root in roots if root not in named))
    alike: dict[tuple[str, str], list[Found]] = {}
    for root in named:
        alike.setdefault((plain(root.title), root.code), []).append(root)
    parts = [
        say(
            "{title} ([{count:n} times {several:?}]{code}[, [the first {several:?}]{gain}])[: {tail}]",
            same[0],  # the largest
            count=len(same),
            several=len(same) > 1,
            gain=_gain(same[0]),
        )
        for same in alike.values()
    ]
    rest = [say("under 1 % each: {codes}", codes=", ".join(small))] if small else []
    for most in range(len(parts), -1, -1):
        codes = ", ".join(dict.fromkeys(code for _, code in list(alike)[most:]))
        findings = [*parts[:most], *([say("{codes}", codes=codes)] if codes else []), *rest]
        note = Note(say("{findings}.", findings=joined(findings, "; ")), "Also found:")
        if findings and (_height(note) <= room or not most):
            yield note
            return


def _commands(run: RunReport, roots: list[Found], *, replays: bool) -> Iterator[Commands]:
    """Yield the next commands: a replay, all details, one step, one request, the page."""
    if replays:  # it takes at most whatif.part.MOST_S
        which = "Which setting helps, and how much, by replaying this load (about a minute):"
        yield Commands(which, [shlex.join(["schedtrace", "analyze", run.path, "--predict"])])
    commands = [["analyze", run.path, "--details"]]
    first = next((root for root in roots if root.steps and root.weight >= NAMED_FROM_FRAC), None)
    if first is not None and Fact.TIMES not in run.lacks:
        engine = ["--engine", str(first.engine_rank)] if first.engine_rank else []
        commands.append(["step", run.path, str(first.steps[len(first.steps) // 2]), *engine])
    names = [getattr(root.evidence, "longest_request", None) for root in roots]
    if request_id := next((name for name in names if name), None):
        commands.append(["request", run.path, request_id])
    if run.config["engines"] == 1 and Fact.TIMES not in run.lacks:  # the table of several needs the line
        commands.append(["report", run.path])
    yield Commands("More:", [shlex.join(["schedtrace", *words]) for words in commands])


def _tested(run: RunReport, *, full: bool) -> Iterator[Note]:
    """Yield the changes tried on a replay and the replayed part of the load, or why none was tried."""
    if run.not_tested:
        yield Note(say("{not_tested}.", run), "Not predicted:")
    if run.tested is None:
        return
    if run.tested.load.part is not None:
        words = "{part}. What advice gains is of these, every other figure of the whole run."
        yield Note(say(words, part=run.tested.load.part.words), "Replayed:")
    if run.tested.no_advice:
        yield Note(say("{no_advice}.", run.tested), "No advice:")
    if tried := tried_changes(run.tested, best=not full):
        yield Note(tried, "Tried:")


def _height(section: Section) -> int:  # noqa: PLR0911  # one kind of section a line
    """Return the number of a section's lines at 80 columns, including the blank line before it."""

    def wrapped_lines(*texts: Content, indent: int = 0) -> int:
        return sum(max(1, len(textwrap.wrap(plain(unstyled(text)), WIDTH - indent))) for text in texts)

    match section:
        case Headline(_, _, content, warnings):
            return 2 + wrapped_lines(*content, *warnings, indent=2)
        case Shares(_, parts):
            return 2 + len(parts)
        case RootCauseSection(_, title, gain, paragraphs, actions):
            long = len(plain(unstyled(title))) + len(plain(gain)) + 5 > WIDTH
            return 2 + long + wrapped_lines(*paragraphs, indent=3) + wrapped_lines(*actions, indent=8)
        case Table(columns, rows, more):
            return 1 + max(column.heading.count("\n") + 1 for column in columns) + len(rows) + bool(more)
        case Note(text, label):
            words = plain(unstyled(text))
            return 1 + wrapped_lines(f"{label} {words}" if label else words)
        case Commands(label, commands):
            return 1 + wrapped_lines(label) + sum(-(-(len(command) + 2) // WIDTH) for command in commands)
        case _:
            return 1
