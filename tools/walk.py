"""How far a reader walks through the code to follow a run: files entered, and returns to files left before.

``python tools/walk.py [RUN]`` follows two calls in this process, as a reader does who looks up each function
when it is first called:

* ``schedtrace step RUN N``: the files of ``schedtrace/`` in which a function is called,
* ``one_engine`` on the run's first timeline, made first: the functions of ``schedtrace/timeline/`` in the
  order of their first calls. Calls in a row that are in one file are one stay there; a return is a stay in a
  file that was visited before. A second figure leaves out what imports no other file of ``timeline/`` but
  ``frames.py``: the frames themselves, sums over spans, and the fit of step times.
"""

import contextlib
import inspect
import io
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType

from schedtrace.cli.main import app
from schedtrace.diagnose.analyze import one_engine
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline

PACKAGE = Path(__file__).parents[1] / "schedtrace"
SAMPLE = Path(__file__).parents[1] / "tests/data/findings/kv-bound/shows"
"""Run that is followed unless another one is given."""
NO_FUNCTION = ("<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
"""Code that has no name a reader looks up."""
LEAVES = ("frames.py", "spans.py", "step_time.py")
"""Files of ``timeline/`` that the others build on."""


@contextlib.contextmanager
def first_calls(package: Path) -> Iterator[list[tuple[str, str]]]:
    """Record file and qualified name of each function of a package when it is first called."""
    calls: dict[tuple[str, str], None] = {}
    prefix = f"{package}/"

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in NO_FUNCTION
        if event == "call" and is_function and code.co_filename.startswith(prefix):
            calls.setdefault((code.co_filename.removeprefix(prefix), code.co_qualname))

    functions: list[tuple[str, str]] = []
    sys.setprofile(record)
    try:
        yield functions
    finally:
        sys.setprofile(None)
        functions += calls


def summary(functions: list[tuple[str, str]]) -> str:
    """Say how many functions and files a walk has, and how often it returns to a file."""
    stays = [file for file, _ in groupby(file for file, _ in functions)]
    files = len(set(stays))
    return f"{len(functions)} functions, {files} files, {len(stays) - files} returns"


def step_command(run: Path, number: int) -> None:
    """Run ``schedtrace step`` without printing."""
    with contextlib.redirect_stdout(io.StringIO()):
        app(["step", str(run), str(number)], standalone_mode=False)


def main() -> None:
    """Print both walks, and with ``--list`` each function of them."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--list"]
    path = Path(arguments[0]) if arguments else SAMPLE
    run = read_run(path)
    trace = next(iter(run.traces))
    number = trace.steps["step"][trace.steps.height // 2]
    walks: list[tuple[str, Path, Callable[[], object]]] = [
        (f"step {number}", PACKAGE, lambda: step_command(path, number)),
        (
            "one_engine",
            PACKAGE / "timeline",
            lambda: one_engine(make_timeline(trace, run.manifest), run.manifest, engines=run.engines),
        ),
    ]
    for name, package, call in walks:
        with first_calls(package) as functions:
            call()
        print(f"{name}: {summary(functions)}")
        if package != PACKAGE:
            inner = [function for function in functions if function[0] not in LEAVES]
            print(f"{name} without {', '.join(LEAVES)}: {summary(inner)}")
        if "--list" in sys.argv:
            for file, functions_there in groupby(functions, key=lambda function: function[0]):
                print(f"  {file}: {', '.join(function for _, function in functions_there)}")


if __name__ == "__main__":
    main()
