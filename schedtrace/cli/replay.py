"""``schedtrace replay``: a recorded load on another configuration, with vLLM's own scheduler deciding."""

from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.options import (
    ConcurrencyOption,
    DataParallelSize,
    FormatOption,
    Router,
    RunArgument,
    changes_of_ranks,
    one_run,
    require_vllm,
    show,
    stderr_console,
)
from schedtrace.present.renderers import Format


def replay(
    run: RunArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Another value for an argument of vLLM; may be repeated."
        ),
    ] = None,
    data_parallel_size: DataParallelSize = None,
    router: Router = None,
    concurrency: ConcurrencyOption = None,
    step_times: Annotated[
        Path | None, typer.Option(help="Saved step times (default: fitted to the run).")
    ] = None,
    save_step_times: Annotated[
        Path | None, typer.Option(help="Save the fitted step times to this file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Keep the replayed runs below this folder, to be analyzed.")
    ] = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Replay a recorded load under other settings, without a GPU.

    vLLM's own scheduler decides every step, in virtual time; the step times are fitted to the run. Without
    --set it is checked whether the replay decides as was recorded.
    """
    from schedtrace.engine.vllm_config import import_vllm, require_settings
    from schedtrace.present.pages.prediction import prediction_page
    from schedtrace.present.progress import CountBar
    from schedtrace.step_times.fitted import load
    from schedtrace.whatif.baseline import require_baseline
    from schedtrace.whatif.prediction import predict, recorded
    from schedtrace.whatif.sweep import parse_changes

    changed = parse_changes(changes or [])
    require_settings("--set", {name: [value] for name, value in changed.items()}, recorded=True)
    changed |= changes_of_ranks(data_parallel_size, router)
    require_vllm()

    base = recorded(one_run(run), load(step_times) if step_times else None, concurrency)
    import_vllm()
    if save_step_times:
        base.times.save(save_step_times)
    with CountBar(stderr_console(), "replaying", counted=False):
        if changed:
            require_baseline(base)
        prediction = predict(base, changed, output=output)
    show(prediction_page(prediction), output_format)
