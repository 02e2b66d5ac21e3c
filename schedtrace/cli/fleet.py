"""``schedtrace fleet``: a report on many engines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from schedtrace.cli.options import (
    FormatOption,
    FromOption,
    LastOption,
    RouterName,
    ToOption,
    changes_of_ranks,
    processes,
    require_vllm,
    show,
    stderr_console,
    window_of,
)
from schedtrace.errors import UsageError
from schedtrace.present.renderers import Format

if TYPE_CHECKING:
    from schedtrace.fleet.workers import WorkerPool
    from schedtrace.model.what_if import Replays
    from schedtrace.present.sections import Page

FleetRouter = Annotated[
    RouterName | None,
    typer.Option(
        help="Replay the recorded load through another router: like vLLM's front end (vllm), in turn "
        "(round-robin), or to the engine with the fewest requests (least-running, the default with "
        "--replay-engines) or tokens (least-tokens)."
    ),
]


def fleet(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Folders, globs, run folders, traces, or addresses: s3://, gs://, file://, memory://."
        ),
    ],
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show this engine's own report instead.")
    ] = None,
    output_format: FormatOption = Format.TEXT,
    begin: FromOption = None,
    end: ToOption = None,
    last: LastOption = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Divide time, tokens and device time among tenants, named by priority, adapter, or id:REGEX "
            "(the first group of REGEX in the request id).",
        ),
    ] = None,
    hash_tenants: Annotated[
        bool, typer.Option("--hash-tenants", help="Show hashes instead of tenants' names.")
    ] = False,
    price_per_gpu_hour: Annotated[
        float | None,
        typer.Option(min=0, metavar="PRICE", help="Price of a GPU hour, to show each tenant's cost."),
    ] = None,
    replay_engines: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, metavar="N", help="Replay the recorded load on N engines, with vLLM's scheduler."
        ),
    ] = None,
    router: FleetRouter = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Number of processes, each with one trace at a time (default: one per processor).",
        ),
    ] = None,
    on: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Read the traces in processes of this machine, or as Ray tasks."),
    ] = "local",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the engines' summaries as Parquet."),
    ] = None,
    cache: Annotated[
        bool, typer.Option(help="Cache summaries, so that the next call reads only new and changed traces.")
    ] = True,
    cache_folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of cached summaries (default: in the user's cache)."),
    ] = None,
) -> None:
    """Compare many engines: which differ from their peers, and why.

    Shows where all requests' time went, whether load or capacity is uneven, and which hosts are slow.
    """
    from schedtrace.fleet.engines import engine_report, read_fleet
    from schedtrace.fleet.inputs import engine_named, find_fleet
    from schedtrace.fleet.reduce import fleet_report
    from schedtrace.fleet.summary_cache import SummaryCache, summaries_folder, write_summaries
    from schedtrace.fleet.tenants import parse_tenant_key
    from schedtrace.model.report import Report
    from schedtrace.present.pages.fleet import engine_page, fleet_page
    from schedtrace.present.progress import CountBar

    window = window_of(begin=begin, end=end, last=last)
    if replay_engines is not None or router is not None:
        if engine or output or tenant or window:
            msg = "--replay-engines and --router do not go with --engine, --output, --tenant or a window"
            raise UsageError(msg)
        show(_replayed(paths, replay_engines, router), output_format)
        return
    if engine is not None:
        _require_one_engine(output=output, tenant=tenant)
    if tenant is None and (hash_tenants or price_per_gpu_hour is not None):
        msg = "--hash-tenants and --price-per-gpu-hour need --tenant"
        raise UsageError(msg)
    tenant_key = None if tenant is None else parse_tenant_key(tenant, is_hashed=hash_tenants)
    places = paths
    if on == "ray":  # the workers of a cluster run in other folders
        places = [path if "://" in path else str(Path(path).absolute()) for path in paths]
    inputs = find_fleet(places)
    if engine is not None:
        source = engine_named(inputs, engine)
        with CountBar(stderr_console(), "analyzing", counted=False):
            report = engine_report(source, window)
        show(engine_page(Report(runs=[report])), output_format)
        return
    folder = summaries_folder(cache_folder) if cache else None

    def pool_of(engines: int) -> "WorkerPool":
        from schedtrace.fleet import workers

        count = min(processes(jobs), engines)
        if on == "ray":
            return workers.RayTasks(processes(jobs))
        return workers.LocalProcesses(count) if count > 1 else workers.HereOnly()

    with CountBar(stderr_console(), "engines") as bar:
        summaries = read_fleet(
            inputs,
            pool_of,
            window=window,
            tenant_key=tenant_key,
            cache=SummaryCache(folder),
            progress=bar,
        )
    if output is not None:
        write_summaries(output, [*summaries.by_name], [*summaries.by_name.values()])
    compared = fleet_report(summaries, paths, str(window or ""), price_per_gpu_hour)
    show(fleet_page(compared), output_format)


def _require_one_engine(*, output: Path | None, tenant: str | None) -> None:
    """Refuse options about all engines if ``--engine`` is set.

    Raises:
        UsageError: If such an option is set.
    """
    if output is not None:
        msg = "--output writes the summaries of all engines: give it without --engine"
        raise UsageError(msg)
    if tenant is not None:
        msg = "--tenant divides the figures of all engines: name the path of one engine instead of --engine"
        raise UsageError(msg)


def _replayed(paths: list[str], engines: int | None, router: str | None) -> "Page[Replays]":
    """Return the page about a replay of the fleet's load on this many engines, behind this router."""
    from schedtrace.engine.vllm_config import import_vllm
    from schedtrace.fleet.inputs import find_fleet
    from schedtrace.present.pages.what_if import fleet_replay_page
    from schedtrace.present.progress import CountBar
    from schedtrace.whatif.fleet import fleet_load, fleet_replay

    require_vllm()
    with CountBar(stderr_console(), "replaying", counted=False):
        load, notes = fleet_load(find_fleet(paths))
        import_vllm()
        changes = changes_of_ranks(engines or len(load.timelines), router or "least-running")
        return fleet_replay_page(fleet_replay(load, changes, notes))
