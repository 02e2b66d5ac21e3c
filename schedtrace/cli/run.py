"""``schedtrace run``: drive a workload on vLLM's engine with the scheduler traced."""

import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from schedtrace.cli.options import as_arguments, read_yaml, say, show, stderr_console
from schedtrace.errors import InterruptedRunError, UsageError

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
NOT_IN_SPEC = {"model", "output", "label", "force", "config"}


def run(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Model name or folder, as for vLLM.")] = None,
    dataset: Annotated[
        str, typer.Option(help="'random', a ShareGPT .json, or a .jsonl with prompts or lengths.")
    ] = "random",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 1024,
    output_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens to generate (128 for random prompts, else the data's own)."),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of a trial (1000 random ones, or all of the data set).")
    ] = None,
    range_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Random lengths vary by this share around the mean.")
    ] = 0.0,
    request_rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests per second; all at once if not given.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, help="Of the gaps at a request rate: 1 is Poisson, lower is burstier.")
    ] = 1.0,
    trials: Annotated[int, typer.Option(min=1, help="Times the workload is run, on one engine.")] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Requests run and left out before the first trial.")] = 1,
    prequeue: Annotated[bool, typer.Option(help="Queue all requests before the first step.")] = False,
    seed: Annotated[int, typer.Option(help="Of the workload, and of vLLM.")] = 0,
    keep_prefix_cache: Annotated[bool, typer.Option(help="Do not empty it between trials.")] = False,
    hash_ids: Annotated[bool, typer.Option(help="Write request ids as hashes.")] = False,
    output: Annotated[Path, typer.Option(help="Folder that gets the run folder.")] = Path("logs"),
    label: Annotated[
        str | None, typer.Option(help="The run folder's name (default: model and time).")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace a run folder of the same name.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with any of these options and vLLM's; the command line wins."),
    ] = None,
) -> None:
    """Run a workload on vLLM with the scheduler traced.

    Every other option is vLLM's own, as for 'vllm serve': --max-num-seqs 64, --enforce-eager,
    --kv-cache-memory-bytes 1G, --scheduler-cls my.Scheduler, ...
    """
    options, engine_args = merge(context, config)
    plan = make_plan(options, engine_args, command=["schedtrace", *sys.argv[1:]])
    run_plans([plan])
    _show_outcome(plan)


def as_command() -> Any:
    """``run`` as a command of its own, for others that take its options."""
    app = typer.Typer()
    app.command("run", context_settings=CONTEXT_SETTINGS)(run)
    return typer.main.get_command(app)


def merge(context: typer.Context, config: Path | None) -> tuple[dict[str, Any], list[str]]:
    """The options in force and vLLM's arguments: command line over file over defaults."""
    from_file = read_yaml(config) if config else {}
    options = dict(context.params)
    for name in context.params:
        key = name.replace("_", "-")
        source = context.get_parameter_source(name)
        if key in from_file:
            value = from_file.pop(key)
            if source is None or source.name in {"DEFAULT", "DEFAULT_MAP"}:
                options[name] = value
    return options, [*as_arguments(from_file), *context.args]


def make_plan(options: dict[str, Any], engine_args: list[str], command: list[str]) -> Any:
    """Check the options and make the run folder."""
    import msgspec

    from schedtrace.engine.plan import Plan, check, make_folder
    from schedtrace.engine.spec import RunSpec

    model = options["model"] and str(options["model"])
    if options["request_rate"] == float("inf"):  # vLLM's own way to say: all at once
        options = {**options, "request_rate": None}
    arguments = [*(["--model", model] if model else []), "--seed", str(options["seed"]), *engine_args]
    fields = {name: value for name, value in options.items() if name not in NOT_IN_SPEC}
    try:
        spec = msgspec.convert({"engine_args": arguments, **fields}, RunSpec)
    except msgspec.ValidationError as error:
        msg = f"--config: {str(error).replace('$.', '').replace('_', '-')}"
        raise UsageError(msg) from error
    check(spec)
    label = str(options["label"] or "") or f"{Path(str(model)).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = make_folder(Path(str(options["output"])), label, force=options["force"])
    return Plan(spec, folder, label, command)


def run_plans(plans: list[Any], *, interleave: bool = True) -> None:
    """Make the runs, telling on stderr what happens."""
    from schedtrace.engine.execute import execute
    from schedtrace.present.progress import RunProgress

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end in order, as with Ctrl-C
    try:
        with RunProgress(stderr_console(), several=len(plans) > 1) as progress:
            execute(plans, progress, interleave=interleave)
    except KeyboardInterrupt:
        msg = f"interrupted; what was recorded: schedtrace analyze {' '.join(str(p.folder) for p in plans)}"
        raise InterruptedRunError(msg) from None


def _show_outcome(plan: Any) -> None:
    """The trials' figures, the folder, and what to type next."""
    from schedtrace.diagnose.analyze import analyze_run
    from schedtrace.present.report import trials_table
    from schedtrace.read.run import read_run

    report = analyze_run(read_run(plan.folder))
    show(trials_table, report.trials)
    found = len(report.findings)
    say("")
    say(f"recorded to {plan.folder}, {found} finding{'' if found == 1 else 's'}")
    say(f"next: schedtrace analyze {plan.folder}")
