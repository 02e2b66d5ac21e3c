"""``schedtrace diff``: two runs, or two configurations to be run and compared."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from schedtrace.cli.options import FormatOption, option_names, print_line, runs_at, show
from schedtrace.errors import ExitCode, InputError, UsageError
from schedtrace.present.renderers import Format


def diff(
    context: typer.Context,
    base: Annotated[Path, typer.Argument(help="Run folder (with --run: YAML file).")],
    new: Annotated[Path, typer.Argument(help="Run folder (with --run: YAML file).")],
    run: Annotated[bool, typer.Option("--run", help="Run both YAML configurations first.")] = False,
    interleave: Annotated[
        bool | None,
        typer.Option(
            help="With --run: keep both engines up and alternate their trials (default: if both fit)."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="With --run: folder in which the run folders are created.")
    ] = Path("logs"),
    force: Annotated[bool, typer.Option(help="With --run: replace run folders of the same names.")] = False,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="regression[:METRIC[:PCT]]",
            help="Exit with 1 if any metric, or only METRIC, became significantly worse (by PCT % or more).",
        ),
    ] = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Compare two runs: settings, metrics, decisions.

    Reports the settings that differ, the metrics with statistics over trials, the refusals, the findings, and
    the first step with a different decision.
    """
    from schedtrace.compare.metric_changes import regressed, require_compared

    _refuse_options(context, [base, new], run=run)
    if context.args and not run:
        msg = f"unexpected argument {context.args[0]}; engine options go with --run only"
        raise UsageError(msg)
    if not run and {base.suffix, new.suffix} & {".yaml", ".yml"}:
        msg = "these are configurations, not runs: add --run to run and compare them"
        raise UsageError(msg)
    is_regression = regressed(fail_on or [])
    folders = _run_both(context, [base, new], interleave, output, force) if run else [base, new]

    from schedtrace.compare.compare import compare
    from schedtrace.present.pages.comparison import comparison_page

    of_base, of_new = runs_at(folders, several=InputError)
    comparison = compare(base=of_base, new=of_new)
    show(comparison_page(comparison), output_format)
    if fail_on and comparison.undecided:
        why = f"too few trials to tell; {comparison.trials_least} a side are needed"
        if comparison.compared_by == "requests":
            why = "one server against one, and their requests cannot be compared; record runs with trials"
        print_line(f"schedtrace: --fail-on: {why}", err=True)
    if any(is_regression(metric) for metric in comparison.metrics):
        raise typer.Exit(ExitCode.FINDINGS)
    require_compared(fail_on or [], comparison)


def _refuse_options(context: typer.Context, places: list[Path], *, run: bool) -> None:
    """Raise UsageError for unknown options, which typer took for runs, and for options before the files."""
    from schedtrace.engine.vllm_config import suggestion

    if run:
        before = next((str(place) for place in places if str(place).startswith("-")), None)
        if before is not None:
            msg = f"{before}: the two files come first, then options of the runs"
            raise UsageError(msg)
        return
    for argument in map(str, [*places, *context.args]):
        if argument.startswith("-"):
            hint = suggestion(argument, option_names(context)) or "; engine options go with --run only"
            msg = f"unknown option {argument}{hint}"
            raise UsageError(msg)


def _run_both(
    context: typer.Context, files: list[Path], interleave: bool | None, output: Path, force: bool
) -> list[Path]:
    """Execute the two runs; both get the options that follow the files on the command line."""
    from schedtrace.cli.loads import print_notes
    from schedtrace.cli.run import as_command, make_plan, merge, run_plans
    from schedtrace.engine.plan import both_fit, make_folders

    run_command = as_command()
    plans: list[Any] = []
    for file in files:
        child = run_command.make_context("run", list(context.args), parent=context)
        options, engine_args = merge(child, file)
        options["output"], options["force"] = output, force
        options["label"] = str(options["label"] or file.stem)
        plan = make_plan(
            options, engine_args, command=["schedtrace", *sys.argv[1:]], also=option_names(context)
        )
        if plan.folder in {earlier.folder for earlier in plans}:
            msg = f"both runs would be called {plan.label}: give each file a label of its own"
            raise UsageError(msg)
        plans.append(plan)
    make_folders([plan.folder for plan in plans], force=force)
    print_notes(list(dict.fromkeys(note for plan in plans for note in plan.notes)))
    run_plans(plans, interleave=both_fit(plans) if interleave is None else interleave)
    return [plan.folder for plan in plans]
