"""``schedtrace advise``: configurations under which a recorded load would meet an objective."""

import os
from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.options import (
    ConcurrencyOption,
    DataParallelSize,
    FormatOption,
    Jobs,
    Router,
    RunArgument,
    changes_of_ranks,
    one_run,
    require_vllm,
    show,
    stderr_console,
)
from schedtrace.present.renderers import Format


def advise(
    run: RunArgument,
    slo: Annotated[str, typer.Option(metavar="BOUNDS", help="Objective, such as ttft_p99=1s,tpot_p99=50ms.")],
    data_parallel_size: DataParallelSize = None,
    router: Router = None,
    concurrency: ConcurrencyOption = None,
    step_times: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Saved step times (default: fitted to the run).")
    ] = None,
    jobs: Jobs = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Propose configurations for an objective.

    Replays the recorded load under what the findings advise and under neighbouring settings, alone and
    together, with vLLM's own scheduler. Proposes at most three, with what each costs and how to try it.
    """
    from schedtrace.present.pages.prediction import proposals_page
    from schedtrace.present.progress import CountBar
    from schedtrace.step_times.fitted import load
    from schedtrace.whatif.sweep_rows import parse_slo

    bounds = parse_slo(slo)
    require_vllm()
    from schedtrace.whatif.prediction import recorded
    from schedtrace.whatif.proposals import advise as proposed
    from schedtrace.whatif.sweep_play import LocalPool

    base = recorded(one_run(run), load(step_times) if step_times else None, concurrency)
    most = jobs or os.cpu_count() or 1
    with CountBar(stderr_console(), "configurations") as bar:
        fixed = changes_of_ranks(data_parallel_size, router)
        answer = proposed(base, bounds, lambda sent: LocalPool(sent, most), bar, fixed)
    show(proposals_page(answer), output_format)
