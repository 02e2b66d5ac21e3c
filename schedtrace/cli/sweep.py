"""``schedtrace sweep``: one load under every combination of settings, replayed with vLLM's scheduler."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from schedtrace.cli.loads import OPTIONS, load_of, read_recorded_load, with_load_options
from schedtrace.cli.options import (
    GPU,
    SHAPE,
    SLO,
    STEP_TIMES,
    Changes,
    ConcurrencyOption,
    DataParallelSize,
    FormatOption,
    Jobs,
    Router,
    changes_of_ranks,
    one_run,
    processes,
    require_vllm,
    show,
    stderr_console,
    was_given,
)
from schedtrace.errors import InterruptedRunError, UsageError
from schedtrace.present.renderers import Format

if TYPE_CHECKING:
    from schedtrace.model.what_if import Baseline
    from schedtrace.whatif.replays import Work


FIRST_BYTES = 200


@with_load_options(after="step_times")
def sweep(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="RUN|WORKLOAD|random", help="Load to replay.")],
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V1,V2,...", help="Values of an engine argument; may be repeated."),
    ] = None,
    fixed: Changes = None,
    data_parallel_size: DataParallelSize = None,
    router: Router = None,
    slo: Annotated[str | None, SLO] = None,
    model: Annotated[str | None, SHAPE] = None,
    gpu: Annotated[str | None, GPU] = None,
    concurrency: ConcurrencyOption = None,
    step_times: Annotated[Path | None, STEP_TIMES] = None,
    jobs: Jobs = None,
    on: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Run the processes on this machine or on a Ray cluster."),
    ] = "local",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of results, from which an interrupted sweep resumes (default: logs/sweep-NAME).",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", hidden=True)] = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Replay one load under every combination of settings.

    vLLM's own scheduler decides every step in virtual time; no GPU is needed. Shows the throughput and the
    latencies of each configuration, and the Pareto front.
    """
    from schedtrace.engine.vllm_config import require_settings
    from schedtrace.present.pages.what_if import sweep_page
    from schedtrace.present.progress import CountBar
    from schedtrace.whatif.sweep import (
        FILE_NAME,
        SweepLog,
        combinations,
        local_replays,
        parse_changes,
        ray_replays,
    )
    from schedtrace.whatif.sweep import replay_configurations as replayed
    from schedtrace.whatif.sweep_rows import parse_slo

    bounds = parse_slo(slo) if slo else []
    changed, varied = parse_changes(fixed or []), _varied(vary or [])
    require_settings("--set", {name: [value] for name, value in changed.items()}, recorded=model is None)
    require_settings("--vary", varied, recorded=model is None)
    changes = combinations(varied, changed | changes_of_ranks(data_parallel_size, router))
    require_vllm()
    swept = _swept(context, source, model=model, gpu=gpu, step_times=step_times, clients=concurrency)
    log = SweepLog(output or out or Path("logs") / re.sub(r"[^\w.-]+", "-", f"sweep-{swept.label}"))
    most = min(processes(jobs), len(changes) + 1)
    pool = local_replays if on == "local" else ray_replays
    try:
        with CountBar(stderr_console(), "configurations") as bar:
            answer = replayed(
                swept.work,
                changes,
                log,
                lambda sent: pool(sent, most),
                slo=bounds,
                label=swept.label,
                path=swept.path,
                baseline=swept.baseline,
                progress=bar,
            )
    except KeyboardInterrupt:
        finished = f"{len(log.finished)} configurations are in {log.path.parent / FILE_NAME}"
        msg = f"interrupted; {finished}, the same command continues from there"
        raise InterruptedRunError(msg) from None
    show(sweep_page(answer), output_format)


def _varied(vary: list[str]) -> dict[str, list[Any]]:
    from schedtrace.whatif.sweep import parse_values

    if not vary:
        msg = "nothing to vary: give --vary NAME=V1,V2, such as --vary max_num_seqs=64,128,256"
        raise UsageError(msg)
    named = [parse_values("--vary", text) for text in vary]
    if len(dict(named)) < len(named):
        msg = "--vary: a setting is varied twice; give all its values at once"
        raise UsageError(msg)
    return dict(named)


class _Swept(NamedTuple):
    """Load of a sweep, with its engine and the accuracy of its replay."""

    label: str
    work: "Work"
    path: Path | None = None
    baseline: "Baseline | None" = None


def _swept(
    context: typer.Context,
    source: str,
    *,
    model: str | None,
    gpu: str | None,
    step_times: Path | None,
    clients: int | None,
) -> _Swept:
    """Return the load, the engine and the accuracy of a sweep's replay."""
    from schedtrace.step_times.fitted import load_fit as load_times
    from schedtrace.step_times.roofline import gpu as gpu_of
    from schedtrace.step_times.shapes import shape
    from schedtrace.whatif.part import require_baseline
    from schedtrace.whatif.replays import ModelledEngine, Work
    from schedtrace.whatif.sweep import recorded_loads

    if (model is None) != (gpu is None):
        msg = "--model and --gpu go together: step times need both"
        raise UsageError(msg)
    is_run = _is_run(source)
    load_options = [name for name in OPTIONS if was_given(context, name)]
    if is_run and load_options:
        option = load_options[0].replace("_", "-")
        msg = f"--{option}: the load is recorded in {source}; it is replayed as it is"
        raise UsageError(msg)
    if not is_run and clients is not None:
        msg = f"--concurrency: {source} is not a recorded run; its requests arrive at the file's times"
        raise UsageError(msg)
    if is_run and model is None:
        base = read_recorded_load(Path(source), step_times, clients)
        return _Swept(base.run.label, base.work, base.run.path, require_baseline(base))
    if model is None or gpu is None:
        msg = f"{source}: not a recorded run, so the engine is unknown: give --model and --gpu"
        raise UsageError(msg)
    engine = ModelledEngine(shape(model), gpu_of(gpu), load_times(step_times) if step_times else None)
    if is_run:
        run = one_run(Path(source))
        return _Swept(run.label, Work(recorded_loads(run, clients), engine), run.path)
    load = load_of(context, source)
    return _Swept(load.name, Work([load], engine))


def _is_run(source: str) -> bool:
    """Return whether the source is a run: a path other than a file, or a file that begins with a header."""
    path = Path(source)
    if not path.is_file():
        return source != "random"
    with path.open("rb") as file:
        return b'"type":"header"' in file.read(FIRST_BYTES).replace(b" ", b"")
