"""Loads for commands: options that describe an unrecorded load, and recorded loads."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from schedtrace.cli.options import one_run, print_line, was_given
from schedtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from schedtrace.whatif.prediction import RecordedLoad
    from schedtrace.workloads.workload import Workload

MAX_SEED = 2**32 - 1
"""Largest seed that NumPy accepts; vLLM also seeds NumPy."""
Dataset = Annotated[
    str, typer.Option(help="'random', or a workload file in one of the formats in docs/workloads.md.")
]


def load_options(
    input_len: Annotated[
        int, typer.Option(min=1, max=100_000_000, help="Tokens of each random prompt.")
    ] = 1024,
    output_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000_000,
            help="Tokens to generate (default: 128 for random prompts, or the file's lengths).",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1, max=10_000_000, help="Number of requests (default: 1000 random ones, or the whole file)."
        ),
    ] = None,
    range_ratio: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Spread of random lengths around the mean, as a fraction of it."),
    ] = 0.0,
    request_rate: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="Requests per second; inf: all at once (default: the file's times, or all at once).",
        ),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, help="Burstiness of arrivals; 1 is Poisson, lower is burstier.")
    ] = 1.0,
    prequeue: Annotated[bool, typer.Option(help="Queue all requests before the first step.")] = False,
    speedup: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Divide the gaps between the file's arrivals by this factor."),
    ] = None,
    time_unit: Annotated[
        Literal["s", "ms", "us"] | None,
        typer.Option(help="Unit of the timestamps in a timed trace (default: inferred from its rows)."),
    ] = None,
    prefix_block: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Prompt tokens per entry of hash_ids in a timed trace (default: inferred).",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, max=MAX_SEED, help="Random seed for the workload; 'run' also passes it to vLLM."),
    ] = 0,
) -> None:
    """Declare the options of an unrecorded load, for ``with_load_options``."""


_LOAD_PARAMETERS = inspect.signature(load_options).parameters
OPTIONS = tuple(_LOAD_PARAMETERS)
"""Names of the options of an unrecorded load."""
OF_RANDOM = ("input_len", "range_ratio")
OF_FILES = ("speedup", "time_unit", "prefix_block")


def with_load_options(*, after: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of ``load_options``, which ``load_of`` reads from the context.

    Args:
        after: The command's own parameter after which the options appear in its help.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        place = [*own].index(after) + 1
        listed = [*own.values()]
        listed[place:place] = _LOAD_PARAMETERS.values()
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in listed]

        @functools.wraps(command)
        def called(**values: Any) -> None:
            command(**{name: value for name, value in values.items() if name in own})

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def print_notes(notes: "Iterable[str]") -> None:
    """Print the notes on a workload before it is used."""
    for note in notes:
        print_line(f"schedtrace: {note}", err=True)


def load_of(context: typer.Context, source: str) -> "Workload":
    """Return the load that a command's options describe.

    Args:
        context: Context of the command, with all of ``OPTIONS``.
        source: ``random``, or the path of a workload file.

    Raises:
        UsageError: If an option is set that does not apply to the source.
        InputError: If the file cannot be read.
    """
    from schedtrace.workloads.random_load import DEFAULT_OUTPUT_LEN, DEFAULT_PROMPTS, random_workload
    from schedtrace.workloads.workload_files import open_workload

    for name in OF_FILES if source == "random" else OF_RANDOM:
        if was_given(context, name):
            msg = f"--{name.replace('_', '-')} does not go with {source}"
            raise UsageError(msg)
    options = {name: context.params[name] for name in OPTIONS}
    rate, prompts, output = (options.pop(name) for name in ("request_rate", "num_prompts", "output_len"))
    inapplicable = OF_FILES if source == "random" else OF_RANDOM
    options = {name: value for name, value in options.items() if name not in inapplicable}
    if source == "random":
        prompts, output = prompts or DEFAULT_PROMPTS, output or DEFAULT_OUTPUT_LEN
        return random_workload(num_prompts=prompts, output_len=output, rate=rate, **options)
    return open_workload(Path(source), num_prompts=prompts, output_len=output, rate=rate, **options)


def read_recorded_load(path: Path, step_times: Path | None, clients: int | None) -> "RecordedLoad":
    """Return the load of the run at a path.

    Args:
        path: Run folder or trace file.
        step_times: Saved step times; None to fit them to the run.
        clients: As for ``whatif.prediction.recorded_load``.
    """
    from schedtrace.step_times.fitted import load_fit
    from schedtrace.whatif.prediction import recorded_load

    return recorded_load(one_run(path), load_fit(step_times) if step_times else None, clients)
