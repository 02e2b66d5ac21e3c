"""Loads from options: what ``run``, ``simulate`` and ``sweep`` ask alike, and what is made of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from schedtrace.cli.options import print_line, was_given
from schedtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from schedtrace.workloads.workload import Workload

InputLen = Annotated[int, typer.Option(min=1, max=100_000_000, help="Length of a random prompt in tokens.")]
OutputLen = Annotated[
    int | None,
    typer.Option(
        min=1, max=100_000_000, help="Tokens to generate (default: 128 for random, else the file's own)."
    ),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(min=1, max=10_000_000, help="Requests (default: 1000 random ones, or the whole file)."),
]
RangeRatio = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Spread of random lengths around the mean, as a share of it."),
]
Burstiness = Annotated[
    float, typer.Option(min=1e-3, help="Burstiness of arrivals; 1 is Poisson, lower is burstier.")
]
Prequeue = Annotated[bool, typer.Option(help="Queue all requests before the first step.")]

RequestRate = Annotated[
    float | None,
    typer.Option(min=1e-6, help="Requests per second (default: the file's times, or at once)."),
]
Speedup = Annotated[
    float | None, typer.Option(min=1e-6, help="Divide the gaps between the file's arrivals by this.")
]
TimeUnitOption = Annotated[
    Literal["s", "ms", "us"] | None,
    typer.Option(help="Unit of the timestamps in a timed trace (default: as its rows show)."),
]
PrefixBlock = Annotated[
    int | None,
    typer.Option(
        min=1, max=1_000_000, help="Prompt tokens of each of its hash_ids (default: as its rows show)."
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed for lengths and arrivals.")]


def print_notes(notes: "Iterable[str]") -> None:
    """Print what is to be said of a workload, before anything is made of it."""
    for note in notes:
        print_line(f"schedtrace: {note}", err=True)


OPTIONS = (
    "input_len",
    "output_len",
    "num_prompts",
    "range_ratio",
    "request_rate",
    "burstiness",
    "prequeue",
    "speedup",
    "time_unit",
    "prefix_block",
    "seed",
)
"""Options of a load that is not recorded."""
OF_RANDOM = ("input_len", "range_ratio")
OF_FILES = ("speedup", "time_unit", "prefix_block")


def load_of(context: typer.Context, source: str) -> "Workload":
    """Return the load that a command's options describe.

    Args:
        context: Context of the command, with all of ``OPTIONS``.
        source: ``random``, or a file of the field.

    Raises:
        UsageError: If an option was given that does not go with the source.
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
