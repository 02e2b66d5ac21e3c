"""Options of data-parallel ranks: how many, and who gets a request."""

from typing import Annotated, Any, Literal

import typer

DataParallelSize = Annotated[
    int | None, typer.Option(min=1, help="Data-parallel ranks (default: as recorded).")
]
Router = Annotated[
    Literal["vllm", "round-robin", "least-running", "least-tokens"] | None,
    typer.Option(
        help="Route requests anew: as vLLM's front end, in turn, to the fewest requests or the fewest tokens."
    ),
]


def changes_of_ranks(data_parallel_size: int | None, router: str | None) -> dict[str, Any]:
    """What was given, as changes of settings."""
    given = {"data_parallel_size": data_parallel_size, "router": router}
    return {name: value for name, value in given.items() if value is not None}
