"""``schedtrace analyze``: what limited a run, and why; also for records with less data than a trace."""

import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedtrace.cli.options import (
    ConcurrencyOption,
    FormatOption,
    FromOption,
    LastOption,
    ToOption,
    print_escaped,
    print_line,
    read_runs,
    require_vllm,
    show,
    stderr_console,
    window_of,
)
from schedtrace.errors import ExitCode, InputError, SchedtraceError, UsageError
from schedtrace.model.what_if import Objective
from schedtrace.present.renderers import Format

if TYPE_CHECKING:
    from schedtrace.model.records import WeakRecord
    from schedtrace.model.report import Finding, RunReport
    from schedtrace.model.what_if import Replays
    from schedtrace.read.run import Run
    from schedtrace.whatif.search import Progress


def analyze(  # noqa: C901  # an option after the other
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folders, folders of runs, traces, vLLM's logs or saved metrics; - is standard input."
        ),
    ] = None,
    output_format: FormatOption = Format.TEXT,
    fail_on: Annotated[
        str | None,
        typer.Option(help="Exit with 1 if a finding is this severe or more: info, warning, critical."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Report only this finding; may be repeated.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Leave out this finding; may be repeated.")
    ] = None,
    begin: FromOption = None,
    end: ToOption = None,
    last: LastOption = None,
    details: Annotated[
        bool, typer.Option("--details", help="Show every table and every finding with its symptoms.")
    ] = False,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict",
            help="Replay the load with other settings on vLLM's own scheduler; recommend the best.",
        ),
    ] = False,
    objective: Annotated[
        Objective | None,
        typer.Option(
            help="Metric that --predict improves (default: latency or makespan, whichever suits the load)."
        ),
    ] = None,
    concurrency: ConcurrencyOption = None,
    cache: Annotated[bool, typer.Option(help="Cache a large trace for the next command.")] = True,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Read the metrics of this running vLLM server twice, 5 s apart."
        ),
    ] = None,
) -> None:  # one option after the other
    """Show what limited a run, and what to try.

    Reports where the requests' time went, which limit refused which requests, and the root causes, each with
    its evidence, its estimated gain and advice.
    """
    from importlib.util import find_spec

    from schedtrace.diagnose.analyze import analyze as analyze_runs
    from schedtrace.diagnose.analyze import at_or_above, choose, keep, require_judged
    from schedtrace.diagnose.records import analyzed_records, periodic_lines
    from schedtrace.present.pages.report import report_page
    from schedtrace.present.progress import CountBar
    from schedtrace.read.run import look_for_runs, runs_without_trace, skipped_lines

    if not paths and url is None:
        msg = "Missing argument 'paths': name a run, a log or - (standard input), or give --url"
        raise UsageError(msg)
    window = window_of(begin=begin, end=end, last=last)
    severe, codes = at_or_above(fail_on), choose(only=only or [], ignore=ignore or [])
    for option, value in {"--objective": objective, "--concurrency": concurrency}.items():
        if value is not None and not predict:
            msg = f"{option} is about the replays of --predict: give both"
            raise UsageError(msg)
    of_traces = {"--from": begin, "--to": end, "--last": last, "--only": only, "--ignore": ignore}
    with ExitStack() as stack:
        names = piped(paths or [], stack)
        search = look_for_runs(list(names))
        for line in skipped_lines(search.skipped):
            print_line(f"schedtrace: {line}", err=True)
        records = analyzed_records(search.records, names, url)
        if not search.runs:
            show_records(
                records, output_format, of_traces | {"--predict": predict or None, "--fail-on": fail_on}
            )
            return
        if records and output_format not in {Format.TEXT, Format.MARKDOWN}:
            msg = (
                f"--format {output_format}: {records[0].path} has no steps; analyze it apart from the traces"
            )
            raise UsageError(msg)
        runs = read_runs(search.runs, cache=cache, window=window)
        if output_format in {Format.TEXT, Format.MARKDOWN}:
            records += periodic_lines(runs, names)
        for run in runs:
            run.path = Path(names.get(run.path, str(run.path)))
        doing = "replaying the load with other settings" if predict else "analyzing"
        with CountBar(stderr_console(), doing, counted=predict) as bar:
            test = (
                partial(_replay, objective=objective, clients=concurrency, progress=bar) if predict else None
            )
            report = keep(analyze_runs(runs, window, test), codes)
        for folder in runs_without_trace(list(names)):
            print_line(f"schedtrace: skipped {folder}: it contains no trace", err=True)
        replays = not predict and window is None and find_spec("vllm") is not None
        show(report_page(report, full=details, replays=replays), output_format)
        show_records(records, output_format, {}, report.runs)
    if any(severe(finding) for run in report.runs for finding in run.findings):
        raise typer.Exit(ExitCode.FINDINGS)
    if fail_on is not None:
        require_judged(report, f"--fail-on {fail_on}")


def _replay(
    run: "Run",
    findings: "list[Finding]",
    objective: Objective | None = None,
    clients: int | None = None,
    progress: "Progress" = lambda *_: None,
) -> "tuple[list[Finding], Replays | str]":
    """Try changes on replays; if a replay is impossible, return the findings unchanged, with the reason."""
    require_vllm()
    from schedtrace.whatif.advice import judged
    from schedtrace.whatif.prediction import recorded_load

    try:
        return judged(findings, recorded_load(run, clients=clients), objective=objective, progress=progress)
    except SchedtraceError as error:
        print_line(f"schedtrace: not predicted: {error}", err=True)
        return findings, str(error)


_PIPES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def piped(paths: list[Path], stack: ExitStack) -> dict[Path, str]:
    """Return the paths to read, each with its name; copy pipes to files, because they are read repeatedly.

    Args:
        paths: Paths as on the command line; ``-`` is standard input.
        stack: Exit stack that removes the temporary files when it closes.

    Raises:
        UsageError: If standard input is a terminal or is named twice.
        InputError: If a pipe cannot be read.
    """
    from schedtrace.read.text_stream import spooled

    names: dict[Path, str] = {}
    stack.enter_context(_errors_by_name(names))
    for path in paths:
        name = str(path)
        if name != "-" and not (name.startswith(_PIPES) and _is_pipe(path)):
            names[path] = name
            continue
        if name in names.values():
            msg = f"{name}: a pipe can be read only once"
            raise UsageError(msg)
        if name == "-" and sys.stdin.isatty():
            msg = "-: standard input is a terminal; pipe a log: kubectl logs POD | schedtrace analyze -"
            raise UsageError(msg)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="schedtrace-")))
        stream = sys.stdin.buffer if name == "-" else stack.enter_context(path.open("rb"))
        names[spooled(stream, folder)] = name
    return names


@contextmanager
def _errors_by_name(names: Mapping[Path, str]) -> Iterator[None]:
    """Replace the path of a pipe's temporary file in errors with the name on the command line."""
    try:
        yield
    except InputError as error:
        message = str(error)
        for path, name in names.items():
            message = message.replace(str(path), name)
        raise InputError(message, *error.details) from error


def _is_pipe(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


def show_records(
    records: "list[WeakRecord]",
    output_format: str,
    of_traces: Mapping[str, Any],
    runs: "Sequence[RunReport]" = (),
) -> None:
    """Print the statements about records without steps, below the reports of runs if there are any.

    Args:
        records: Records to show; if there are none, nothing is printed.
        output_format: Name of the format.
        of_traces: Options that apply only to traces, with their values.
        runs: Reports that have already been shown.

    Raises:
        UsageError: If an option that applies only to traces is set.
        InputError: If ``--fail-on`` is set, because such records allow no judgement.
    """
    from schedtrace.diagnose.records import compare_with_trace
    from schedtrace.model.records import Records
    from schedtrace.present.pages.records import records_page

    asked = [option for option, value in of_traces.items() if value and option != "--fail-on"]
    if records and asked:
        msg = f"{asked[0]} is about traces: {records[0].path} has no steps ({records[0].kind})"
        raise UsageError(msg)
    if records and runs:
        print_escaped("\n")
        for record in records:
            same_file = [result for result in records if result.path == record.path]
            compare_with_trace(record, runs, same_file)
    if records:
        show(records_page(Records(records=records)), output_format)
    if records and (level := of_traces.get("--fail-on")):
        msg = f"--fail-on {level} cannot be judged: {records[0].path} has no steps: record the engine"
        raise InputError(msg)
