"""``schedtrace advise``: configurations under which a recorded load would meet an objective."""

from pathlib import Path
from typing import Annotated

from schedtrace.cli.loads import read_recorded_load
from schedtrace.cli.options import (
    SLO,
    STEP_TIMES,
    ConcurrencyOption,
    DataParallelSize,
    FormatOption,
    Jobs,
    Router,
    RunArgument,
    changes_of_ranks,
    processes,
    require_vllm,
    show,
    stderr_console,
)
from schedtrace.present.renderers import Format


def advise(
    run: RunArgument,
    slo: Annotated[str, SLO],
    data_parallel_size: DataParallelSize = None,
    router: Router = None,
    concurrency: ConcurrencyOption = None,
    step_times: Annotated[Path | None, STEP_TIMES] = None,
    jobs: Jobs = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Propose configurations that meet latency targets.

    Replays the recorded load with vLLM's own scheduler, under settings that the findings advise and under
    other values, alone and combined. Proposes at most three configurations, each with its costs, and the
    commands that try the first.
    """
    from schedtrace.present.pages.what_if import advise_page
    from schedtrace.present.progress import CountBar
    from schedtrace.whatif.sweep_rows import parse_slo

    bounds = parse_slo(slo)
    require_vllm()
    from schedtrace.whatif.latency_targets import advise as proposed
    from schedtrace.whatif.sweep import local_replays

    base = read_recorded_load(run, step_times, concurrency)
    with CountBar(stderr_console(), "configurations") as bar:
        fixed = changes_of_ranks(data_parallel_size, router)
        answer = proposed(base, bounds, lambda sent: local_replays(sent, processes(jobs)), bar, fixed)
    show(advise_page(answer), output_format)
