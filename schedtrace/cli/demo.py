"""``schedtrace demo``: a first look at a recorded run that comes with the package."""

from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.analyze import analyze
from schedtrace.cli.options import print_line
from schedtrace.cli.report import report
from schedtrace.errors import UsageError

RUN = "kv"
"""Name of the recorded run in the package, and of its copy in the folder."""
PAGE = "report.html"


def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="New or empty folder for the run and its page (default: a temporary one).",
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Analyze a recorded run that comes with schedtrace.

    Needs neither vLLM nor a GPU. Prints the report of 'schedtrace analyze' on it, and writes the page of
    'schedtrace report'.
    """
    from schedtrace.model.manifest import read_manifest

    place = _copied_run(folder)
    manifest = read_manifest(place)
    if manifest is not None:
        print_line(f"A run of vLLM {manifest.vllm_version} with its own engine on a CPU, recorded by")
        print_line(f"  {' '.join(manifest.command)}")
        print_line("")
    analyze([place])
    print_line("")
    page = place.parent / PAGE
    report([place], output=page, force=True)
    if open_page:
        import webbrowser

        webbrowser.open(page.absolute().as_uri())
    print_line("your own server: SCHEDTRACE_DIR=logs vllm serve ..., or schedtrace attach --for 60s")


def _copied_run(folder: Path | None) -> Path:
    """Copy the package's run to a folder, for the commands that the report names; return the copy.

    Raises:
        UsageError: If the folder is not empty, or cannot be created.
    """
    import tempfile
    from importlib.resources import files

    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="schedtrace-demo-"))
    copy = folder / RUN
    try:
        if folder.exists() and any(folder.iterdir()):
            msg = f"{folder} holds something already: name a new folder"
            raise UsageError(msg)
        copy.mkdir(parents=True)
        for file in (files("schedtrace") / "demo" / RUN).iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    except OSError as error:
        msg = f"{folder}: cannot be written to ({error.strerror})"
        raise UsageError(msg) from error
    return copy
