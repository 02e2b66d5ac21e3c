"""``schedtrace sweep``: one load under every combination of settings, replayed with vLLM's scheduler."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from schedtrace.cli.loads import (
    OPTIONS,
    Burstiness,
    InputLen,
    NumPrompts,
    OutputLen,
    PrefixBlock,
    Prequeue,
    RangeRatio,
    RequestRate,
    Seed,
    Speedup,
    TimeUnitOption,
    load_of,
)
from schedtrace.cli.options import (
    ConcurrencyOption,
    DataParallelSize,
    FormatOption,
    Jobs,
    Router,
    changes_of_ranks,
    one_run,
    require_vllm,
    show,
    stderr_console,
    was_given,
)
from schedtrace.errors import InterruptedRunError, UsageError
from schedtrace.present.renderers import Format

if TYPE_CHECKING:
    from schedtrace.whatif.replays import Work


FIRST_BYTES = 200


def sweep(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="RUN|WORKLOAD|random", help="Whose load is replayed.")],
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V1,V2,...", help="Values of an engine argument; may be repeated."),
    ] = None,
    fixed: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Engine argument of all; may be repeated."),
    ] = None,
    data_parallel_size: DataParallelSize = None,
    router: Router = None,
    slo: Annotated[
        str | None, typer.Option(metavar="BOUNDS", help="Objective, such as ttft_p99=1s,tpot_p99=50ms.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Model: Qwen3-32B, ... or a config.json; with --gpu.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU: a100, h100, h200 or b200; with --model.")] = None,
    concurrency: ConcurrencyOption = None,
    step_times: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Saved step times, instead of a fit or a roofline.")
    ] = None,
    input_len: InputLen = 1024,
    output_len: OutputLen = None,
    num_prompts: NumPrompts = None,
    range_ratio: RangeRatio = 0.0,
    request_rate: RequestRate = None,
    burstiness: Burstiness = 1.0,
    prequeue: Prequeue = False,
    speedup: Speedup = None,
    time_unit: TimeUnitOption = None,
    prefix_block: PrefixBlock = None,
    seed: Seed = 0,
    jobs: Jobs = None,
    on: Annotated[
        Literal["local", "ray"], typer.Option(help="Where the processes run: this machine or a Ray cluster.")
    ] = "local",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Keeps what is finished, to go on from (default: logs/sweep-NAME)."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", hidden=True)] = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Replay one load under every combination of settings.

    vLLM's own scheduler decides in virtual time; nothing needs a GPU. Shows throughput and latencies of each
    configuration and the Pareto front.
    """
    from schedtrace.engine.vllm_config import require_settings
    from schedtrace.present.pages.sweep import sweep_page
    from schedtrace.present.progress import CountBar
    from schedtrace.whatif.sweep import FILE_NAME, SweepLog, combinations, parse_changes
    from schedtrace.whatif.sweep import sweep as replayed
    from schedtrace.whatif.sweep_play import LocalPool, RayPool
    from schedtrace.whatif.sweep_rows import parse_slo

    bounds = parse_slo(slo) if slo else []
    changed, varied = parse_changes(fixed or []), _varied(vary or [])
    require_settings("--set", {name: [value] for name, value in changed.items()}, recorded=model is None)
    require_settings("--vary", varied, recorded=model is None)
    changes = combinations(varied, changed | changes_of_ranks(data_parallel_size, router))
    require_vllm()
    label, work = _work(context, source, model=model, gpu=gpu, step_times=step_times, clients=concurrency)
    log = SweepLog(output or out or Path("logs") / re.sub(r"[^\w.-]+", "-", f"sweep-{label}"))
    most = min(jobs or os.cpu_count() or 1, len(changes) + 1)
    pool = LocalPool if on == "local" else RayPool
    try:
        with CountBar(stderr_console(), "configurations") as bar:
            answer = replayed(
                work, changes, log, lambda sent: pool(sent, most), slo=bounds, label=label, progress=bar
            )
    except KeyboardInterrupt:
        finished = f"{len(log.finished)} configurations are in {log.path.parent / FILE_NAME}"
        msg = f"interrupted; {finished}, the same command goes on from there"
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


def _work(
    context: typer.Context,
    source: str,
    *,
    model: str | None,
    gpu: str | None,
    step_times: Path | None,
    clients: int | None,
) -> "tuple[str, Work]":
    """Return the load's name and the work to do."""
    from schedtrace.step_times.fitted import load as load_times
    from schedtrace.step_times.gpus import gpu as gpu_of
    from schedtrace.step_times.shapes import shape
    from schedtrace.whatif.baseline import require_baseline
    from schedtrace.whatif.prediction import recorded
    from schedtrace.whatif.replays import ModelledEngine, Work
    from schedtrace.whatif.sweep import recorded_loads

    if (model is None) != (gpu is None):
        msg = "--model and --gpu go together: a model's shape takes its time on a GPU"
        raise UsageError(msg)
    times = load_times(step_times) if step_times else None
    run = one_run(Path(source)) if _is_run(source) else None
    load_options = [name for name in OPTIONS if was_given(context, name)]
    if run is not None and load_options:
        option = load_options[0].replace("_", "-")
        msg = f"--{option}: the load is recorded in {source}; it is replayed as it is"
        raise UsageError(msg)
    if run is None and clients is not None:
        msg = f"--concurrency: {source} is no recorded run; its requests come at their times"
        raise UsageError(msg)
    if run is not None and model is None:
        base = recorded(run, times, clients)
        require_baseline(base)
        return run.label, base.work
    if model is None or gpu is None:
        msg = f"{source}: no recorded run, so nothing tells the engine: give --model and --gpu"
        raise UsageError(msg)
    loads = [load_of(context, source)] if run is None else recorded_loads(run, clients)
    label = loads[0].name if run is None else run.label
    return label, Work(loads, ModelledEngine(shape(model), gpu_of(gpu), times))


def _is_run(source: str) -> bool:
    """Return whether the source is a folder, or a file whose first line is a trace's header."""
    path = Path(source)
    if not path.is_file():
        return source != "random"
    with path.open("rb") as file:
        return b'"type":"header"' in file.read(FIRST_BYTES).replace(b" ", b"")
