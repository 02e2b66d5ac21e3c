"""How far a reader walks through the code to follow a run: files entered, and returns to files left before.

``python tools/walk.py [RUN]`` follows four calls in this process, as a reader does who looks up each function
when it is first called:

* ``schedtrace step RUN N``: the files of ``schedtrace/`` in which a function is called. A second figure
  leaves out ``model/``, which holds data only,
* ``one_engine`` on the run's first timeline, made first: the functions of ``schedtrace/timeline/`` in the
  order of their first calls. Calls in a row that are in one file are one stay there; a return is a stay in a
  file that was visited before. A second figure leaves out what imports no other file of ``timeline/`` but
  ``frames.py``: the frames themselves, sums over spans, and the fit of step times,
* a steady step of four decodes from the wrapped ``schedule()`` to the frame on disk: the functions of
  ``schedtrace/record/`` that it calls, with those of the writer's round; ``update_from_output`` is left out,
* a step that admits a request, likewise.
"""

import contextlib
import inspect
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, groupby
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
LEFT_OUT = {"schedtrace": ("model/",), "timeline": ("frames.py", "spans.py", "step_time.py")}
"""Package of data, and files of ``timeline/`` that the others build on, without which a walk counts again."""


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


def captured_steps() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield two steps of vLLM's scheduler, recorded in parts as on a server; the writer's rounds run here."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from schedtrace.record import trace_files, writer
    from schedtrace.record.disguise import RECORDERS
    from schedtrace.record.traced import traced_class
    from schedtrace.simulate import Driver

    writer.DRAIN_EVERY_S, trace_files.FRAME_S = 3600, 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCHEDTRACE_DIR"] = folder
        engine = Driver(traced_class)
        work = RECORDERS[engine.scheduler].writer._work

        def step() -> None:
            engine.schedule()
            profile = sys.getprofile()
            sys.setprofile(None)
            engine.update()
            sys.setprofile(profile)
            work(last=False)
            work(last=False)  # ends the frame

        for number in range(4):
            engine.add(f"r{number}", 40, 100)
        for _ in range(5):
            engine.step()
            work(last=False)
        yield "captured step", step
        engine.add("late", 40, 100)
        yield "captured step with an admission", step


def main() -> None:
    """Print the walks, and with ``--list`` each function of them."""
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
    steps = ((name, PACKAGE / "record", call) for name, call in captured_steps())
    for name, package, call in chain(walks, steps):
        with first_calls(package) as functions:
            call()
        print(f"{name}: {summary(functions)}")
        if left_out := LEFT_OUT.get(package.name):
            inner = [function for function in functions if not function[0].startswith(left_out)]
            print(f"{name} without {', '.join(left_out)}: {summary(inner)}")
        if "--list" in sys.argv:
            for file, functions_there in groupby(functions, key=lambda function: function[0]):
                print(f"  {file}: {', '.join(function for _, function in functions_there)}")


if __name__ == "__main__":
    main()
