"""``schedtrace replay``: a recorded load on another configuration, with vLLM's own scheduler deciding."""

from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.loads import read_recorded_load
from schedtrace.cli.options import (
    STEP_TIMES,
    Changes,
    ConcurrencyOption,
    DataParallelSize,
    FormatOption,
    Router,
    RunArgument,
    changes_of_ranks,
    require_vllm,
    show,
    stderr_console,
)
from schedtrace.present.renderers import Format


def replay(
    run: RunArgument,
    changes: Changes = None,
    data_parallel_size: DataParallelSize = None,
    router: Router = None,
    concurrency: ConcurrencyOption = None,
    step_times: Annotated[Path | None, STEP_TIMES] = None,
    save_step_times: Annotated[
        Path | None, typer.Option(help="Save the fitted step times to this file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Keep the replayed runs in this folder, for analyze, step and diff.")
    ] = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Replay a recorded load under other settings, without a GPU.

    vLLM's own scheduler decides every step, in virtual time; the step times are fitted to the run. Without
    --set, the command checks whether the replay makes the recorded decisions.
    """
    from schedtrace.engine.vllm_config import import_vllm, require_settings
    from schedtrace.present.pages.what_if import replay_page
    from schedtrace.present.progress import CountBar
    from schedtrace.whatif.part import require_baseline
    from schedtrace.whatif.prediction import predict
    from schedtrace.whatif.sweep import parse_changes

    changed = parse_changes(changes or [])
    require_settings("--set", {name: [value] for name, value in changed.items()}, recorded=True)
    changed |= changes_of_ranks(data_parallel_size, router)
    require_vllm()

    base = read_recorded_load(run, step_times, concurrency)
    import_vllm()
    if save_step_times:
        base.times.save(save_step_times)
    with CountBar(stderr_console(), "replaying", counted=False):
        baseline = require_baseline(base) if changed else None
        replays = predict(base, changed, output=output)
    if baseline is not None:
        replays.baseline = baseline
    show(replay_page(replays), output_format)
