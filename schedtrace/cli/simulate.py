"""``schedtrace simulate``: a workload on a model and a GPU that this machine need not have."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedtrace.cli.loads import Dataset, load_of, print_notes, with_load_options
from schedtrace.cli.options import (
    GPU,
    SHAPE,
    STEP_TIMES,
    Label,
    ParentFolder,
    ReplaceRun,
    Router,
    changes_of_ranks,
    one_run,
    option_names,
    print_line,
    require_vllm,
    show_trials,
    stderr_console,
)

if TYPE_CHECKING:
    from schedtrace.model.manifest import Manifest
    from schedtrace.workloads.workload import Workload


@with_load_options(after="dataset")
def simulate(
    context: typer.Context,
    model: Annotated[str, SHAPE],
    gpu: Annotated[str, GPU],
    dataset: Dataset = "random",
    arrivals_of: Annotated[
        Path | None, typer.Option(help="Take the arrival times of each trial from this recorded run.")
    ] = None,
    router: Router = None,
    balance_ranks: Annotated[
        bool, typer.Option("--balance-ranks", help="Let ranks in lock-step admit requests together.")
    ] = False,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Use vLLM's defaults for LLM(...) instead of those of vllm serve."),
    ] = False,
    step_times: Annotated[Path | None, STEP_TIMES] = None,
    output: ParentFolder = Path("logs"),
    label: Label = None,
    force: ReplaceRun = False,
) -> None:
    """Simulate a workload on a model and a GPU that you do not have.

    vLLM's own scheduler decides every step; the step times and the size of the KV cache follow from the
    model's shape and the GPU. All other options are passed to vLLM, as for 'vllm serve'.
    """
    from schedtrace.engine.plan import Given, check_arguments, folder_of, make_folders
    from schedtrace.model.message import plain
    from schedtrace.present.progress import CountBar
    from schedtrace.step_times.fitted import load_fit
    from schedtrace.step_times.roofline import Roofline
    from schedtrace.step_times.roofline import gpu as gpu_of
    from schedtrace.step_times.shapes import shape as shape_of
    from schedtrace.whatif.replays import fitted_length

    shape, device = shape_of(model), gpu_of(gpu)
    loads = _loads(context, dataset, arrivals_of)
    check_arguments([Given(context.args)], own=option_names(context))
    require_vllm()
    from schedtrace.engine.vllm_config import parse_engine_args
    from schedtrace.simulate.driver import tiny_model
    from schedtrace.simulate.engine_options import shaped_options
    from schedtrace.simulate.replay import play_loads

    _, engine_args = parse_engine_args(["--model", tiny_model(), *context.args])
    engine_args |= changes_of_ranks(None, router) | ({"balance_ranks": True} if balance_ranks else {})
    options = shaped_options(shape, device, engine_args, online=not offline)
    parallel = int(engine_args.get("tensor_parallel_size", 1))
    roofline = Roofline(shape, device, parallel, engine_args.get("kv_cache_dtype"))
    times = load_fit(step_times) if step_times else roofline
    folder = folder_of(output, label or f"{shape.name}-{device.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    make_folders([folder], force=force)
    notes = [plain(note) for note in loads[0].all_notes]
    print_notes(notes)
    about = _manifest(context, folder, f"simulated: {shape.name} on {device.name}", loads[0], notes)
    with CountBar(stderr_console(), "simulating", counted=False):
        played = play_loads(loads, options, times, folder, trial_ids=True, manifest=about)
    for request_id in played.refused[:3]:
        print_line(f"! {request_id}: refused, its prompt fills max_model_len {options['max_model_len']:,}")
    _show(played, times, options, fitted_length(shape, engine_args, options))


def _loads(context: typer.Context, dataset: str, arrivals_of: Path | None) -> "list[Workload]":
    load = load_of(context, dataset)
    if arrivals_of is None:
        return [load]
    from schedtrace.workloads.random_load import at_times_of
    from schedtrace.workloads.recorded_load import loads_of

    run = one_run(arrivals_of)
    return [at_times_of(load, times) for times in loads_of(run.traces[0], manifest=run.manifest)]


def _manifest(
    context: typer.Context, folder: Path, device: str, load: "Workload", notes: list[str]
) -> "Manifest":
    import platform

    from schedtrace.model.manifest import Manifest, RunWorkload
    from schedtrace.model.printable import without_secrets
    from schedtrace.version import __version__
    from schedtrace.workloads.random_load import DEFAULT_OUTPUT_LEN

    parameters, is_random = context.params, load.source == "random"
    drawn = parameters["request_rate"] is not None or parameters["prequeue"]
    workload = RunWorkload(
        dataset=parameters["dataset"],
        num_prompts=len(load),
        input_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        input_len=parameters["input_len"] if is_random else None,
        output_len=parameters["output_len"] or (DEFAULT_OUTPUT_LEN if is_random else None),
        range_ratio=parameters["range_ratio"],
        request_rate=parameters["request_rate"],
        own_times=load.last_arrival_us > 0 and not drawn and not is_random,
        speedup=parameters["speedup"],
        burstiness=parameters["burstiness"],
        prequeue=parameters["prequeue"],
        seed=parameters["seed"],
        notes=notes,
    )
    return Manifest(
        schedtrace_version=__version__,
        status="finished",
        label=folder.name,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=without_secrets(["schedtrace", *sys.argv[1:]]),
        host=platform.node(),
        device=device,
        workload=workload,
    )


def _show(played: Any, times: Any, options: dict[str, Any], fitted: int | None) -> None:
    """Print the trials' figures, the assumptions behind them, and the next command."""
    from schedtrace.model.message import plain
    from schedtrace.step_times.roofline import MOST_BLOCKS
    from schedtrace.whatif.replays import gathering_notes

    show_trials(played.folder)
    print_line("")
    print_line(f"step times: {times.description}")
    for note in gathering_notes(times, [options]):
        print_line(plain(note))
    print_line(
        f"engine: budget {options['max_num_batched_tokens']:,}, {options['max_num_seqs']:,} seats, "
        f"{options['num_blocks']:,} KV blocks of {options['block_size']} tokens"
    )
    if options["num_blocks"] == MOST_BLOCKS:
        print_line("KV cache cut to that many blocks: more would only slow vLLM")
    if fitted:
        print_line(
            f"max-model-len {fitted:,}: all that the KV cache holds, as with vLLM's --max-model-len auto"
        )
    print_line(f"simulated {played.virtual_s:,.1f} s in {played.wall_s:.1f} s; recorded to {played.folder}")
    print_line(f"next: schedtrace analyze {played.folder}")
