"""``schedtrace run``: a workload on vLLM's engine, with the scheduler traced."""

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from schedtrace.cli.loads import Dataset, print_notes, with_load_options
from schedtrace.cli.options import (
    GPU,
    HASH_IDS,
    STEP_TIMES,
    WITH_OPTIONS_OF_VLLM,
    Command,
    Label,
    ParentFolder,
    ReplaceRun,
    TraceOption,
    checked,
    print_line,
    show_trials,
    stderr_console,
    trace_bounds,
    was_given,
)
from schedtrace.errors import InputError, InterruptedRunError, UsageError

if TYPE_CHECKING:
    from schedtrace.engine.plan import Given


NOT_IN_SPEC = {"model", "output", "label", "force", "config"}


@with_load_options(after="dataset")
def run(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Model name or folder, as for vLLM.")] = None,
    dataset: Dataset = "random",
    trials: Annotated[
        int, typer.Option(min=1, max=10_000, help="Repetitions of the workload on one engine.")
    ] = 1,
    warmup: Annotated[
        int, typer.Option(min=0, max=10_000_000, help="Warm-up requests, left out of all figures.")
    ] = 1,
    keep_prefix_cache: Annotated[bool, typer.Option(help="Keep the prefix cache between trials.")] = False,
    hash_ids: Annotated[bool, typer.Option(help=HASH_IDS)] = False,
    lines: Annotated[
        Literal["delta", "full"] | None,
        typer.Option(
            help="Write each step as changes from the step before (delta, the default), or in full."
        ),
    ] = None,
    trace: TraceOption = None,
    executor: Annotated[
        Literal["simulated"] | None,
        typer.Option(help="'simulated': no GPU and no weights; steps take as long as they would on --gpu."),
    ] = None,
    gpu: Annotated[str | None, GPU] = None,
    step_times: Annotated[str | None, STEP_TIMES] = None,
    noise: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Random scatter of simulated step times, as a fraction of each."),
    ] = 0.0,
    output: ParentFolder = Path("logs"),
    label: Label = None,
    force: ReplaceRun = False,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with any of these options and vLLM's; the command line overrides it."),
    ] = None,
) -> None:
    """Run a workload on vLLM, and record its scheduler.

    All other options are passed to vLLM, as for 'vllm serve': --max-num-seqs 64, --enforce-eager,
    --kv-cache-memory-bytes 1G, --scheduler-cls my.Scheduler, ...
    """
    from schedtrace.engine.plan import make_folders

    options, engine_args = merge(context, config)
    plan = make_plan(options, engine_args, command=["schedtrace", *sys.argv[1:]])
    make_folders([plan.folder], force=options["force"])
    print_notes(plan.notes)
    run_plans([plan])
    _show_outcome(plan)


def as_command() -> Any:
    """Return ``run`` as a separate command, for commands that accept its options."""
    app = typer.Typer()
    app.command("run", cls=Command, context_settings=WITH_OPTIONS_OF_VLLM)(run)
    return typer.main.get_command(app)


def merge(context: typer.Context, config: Path | None) -> "tuple[dict[str, Any], list[Given]]":
    """Return the effective options and vLLM's arguments; the command line overrides the file."""
    from schedtrace.engine.plan import Given

    from_file = read_yaml(config) if config else {}
    if "config" in from_file:
        msg = f"--config {config}: config: one file cannot name another"
        raise UsageError(msg)
    options = dict(context.params)
    for name in context.params:
        key = name.replace("_", "-")
        if key in from_file:
            value = from_file.pop(key)
            if not was_given(context, name):
                options[name] = checked(f"--config {config}: {key}", value)
    return options, [Given(as_arguments(from_file), f"--config {config}: "), Given(context.args)]


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a ``--config`` file: option names with values; underscores may replace dashes.

    Raises:
        InputError: If the file cannot be read.
        UsageError: If the file is not such a mapping.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        msg = f"--config {path}: {error.strerror}"
        raise InputError(msg) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        msg = f"--config {path}: not YAML ({' '.join(str(error).split())})"
        raise UsageError(msg) from error
    if not isinstance(content, dict):
        msg = f"--config {path}: expected a mapping of options, such as 'num-prompts: 16'"
        raise UsageError(msg)
    return {str(name).replace("_", "-").lstrip("-"): value for name, value in content.items()}


def as_arguments(options: dict[str, Any]) -> list[str]:
    """Return YAML options as arguments: true becomes ``--x``, false ``--no-x``, and a mapping JSON."""
    import json

    arguments = []
    for name, value in options.items():
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None:
            arguments += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments


def make_plan(
    options: dict[str, Any], engine_args: "list[Given]", command: list[str], also: Iterable[str] = ()
) -> Any:
    """Check the options and return the plan; nothing is written yet.

    Args:
        options: Options of schedtrace.
        engine_args: vLLM's arguments.
        command: Command line as typed.
        also: Further options of the command, which messages may suggest.
    """
    import msgspec

    from schedtrace.engine import simulated
    from schedtrace.engine.plan import Plan, check_arguments, check_run, folder_of
    from schedtrace.engine.run_spec import OWN_OPTIONS, RunSpec
    from schedtrace.model.message import plain

    model = options["model"] and str(options["model"])
    if model and options["executor"] == "simulated":
        model = simulated.model_folder(model)
    if options["request_rate"] == float("inf"):  # as vLLM has it: all at once
        options = {**options, "request_rate": None, "at_once": True}
    arguments = [*(["--model", model] if model else []), "--seed", str(options["seed"])]
    arguments += [argument for part in engine_args for argument in part.arguments]
    fields = {name: value for name, value in options.items() if name not in NOT_IN_SPEC}
    try:
        spec = msgspec.convert({"engine_args": arguments, **fields}, RunSpec)
    except msgspec.ValidationError as error:
        msg = f"--config: {str(error).replace('$.', '').replace('_', '-')}"
        raise UsageError(msg) from error
    trace_bounds(spec.trace)
    check_arguments(engine_args, own=[*OWN_OPTIONS, *also])
    notes = [plain(note) for note in check_run(spec)]
    label = str(options["label"] or "") or f"{Path(str(model)).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Plan(spec, folder_of(Path(str(options["output"])), label), label, command, engine_args, notes)


def run_plans(plans: list[Any], *, interleave: bool = True) -> None:
    """Execute the runs and report progress on stderr."""
    from schedtrace.engine.execute import begun_traces, execute_plans
    from schedtrace.engine.plan import check_arguments
    from schedtrace.present.progress import RunProgress

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end in order, as with Ctrl-C
    _end_when_the_terminal_hangs_up()
    try:
        with RunProgress(stderr_console(), several=len(plans) > 1) as progress:
            execute_plans(plans, progress, interleave=interleave)
    except KeyboardInterrupt:
        recorded = [str(plan.folder) for plan in plans if begun_traces(plan.folder)]
        what = (
            f"what was recorded: schedtrace analyze {' '.join(recorded)}"
            if recorded
            else "nothing was recorded"
        )
        msg = f"interrupted; {what}"
        raise InterruptedRunError(msg) from None
    except UsageError:
        for plan in plans:  # vLLM's options are known now: name the place of the wrong one
            check_arguments(plan.parts)
        raise


def _end_when_the_terminal_hangs_up() -> None:
    """Shut down properly when the terminal hangs up, because writing to it would fail."""
    to_terminal = [file for file in (1, 2) if os.isatty(file)]

    def hung_up(_signal: int, _frame: Any) -> NoReturn:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in to_terminal:
            os.dup2(nowhere, file)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, hung_up)


def _show_outcome(plan: Any) -> None:
    """Print the trials' figures, a simulated device's assumptions, the folder, and the next command."""
    from schedtrace.model.message import plain

    report = show_trials(plan.folder)
    chosen = dict(plan.manifest.engine_args_chosen)
    times = chosen.pop("simulated_step_times", None)
    chosen.pop("skip_tokenizer_init", None)
    if times is not None:
        print_line(f"device: {plan.manifest.device}. {times}")
    if times is not None and chosen:
        defaults = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in chosen.items())
        print_line(f"vLLM's defaults for it: {defaults}")
    for problem in report.problems:
        print_line(f"! {plain(problem)}")
    findings = len(report.findings)
    print_line("")
    print_line(f"recorded to {plan.folder}, {findings} finding{'' if findings == 1 else 's'}")
    print_line(f"next: schedtrace analyze {plan.folder}")
