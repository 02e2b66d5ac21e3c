"""``schedtrace doctor``: checks of an environment or a server before a recording."""

from typing import Annotated

import typer

from schedtrace.cli.options import FormatOption, show, stderr_console
from schedtrace.errors import ExitCode
from schedtrace.present.renderers import Format


def doctor(
    server: Annotated[
        str | None,
        typer.Argument(
            metavar="PID",
            help="Process id of an engine or a server on this machine (default: check this environment).",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address of a server to check, such as http://localhost:8000."),
    ] = None,
    scheduler_cls: Annotated[
        str | None,
        typer.Option(metavar="CLASS", help="Also check this scheduler class, named as for vLLM."),
    ] = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Check what a recording would contain, before you make one.

    Checks vLLM's release, the exits of its scheduler, the plugin, the socket, the disk, the clocks, the
    device, and a replay of a synthetic load. Exits with 1 if something is wrong.
    """
    from schedtrace.engine.doctor import engine_checks, environment_checks, url_checks
    from schedtrace.errors import UsageError
    from schedtrace.model.checkup import Checkup
    from schedtrace.present.pages.checkup import checkup_page
    from schedtrace.present.progress import CountBar

    is_here = server is None and url is None
    if scheduler_cls is not None and not is_here:
        msg = "--scheduler-cls is about this environment: it goes with neither PID nor --url"
        raise UsageError(msg)
    with CountBar(stderr_console(), "checking", counted=False):
        checks = environment_checks(scheduler_cls) if is_here else []
        checks += [] if server is None else engine_checks(server)
        checks += [] if url is None else url_checks(url)
    checkup = Checkup(checks=checks)
    show(checkup_page(checkup), output_format)
    if not checkup.is_healthy:
        raise typer.Exit(ExitCode.FINDINGS)
