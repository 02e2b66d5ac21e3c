"""Names of requests and trials in running text."""

from schedtrace.model.message import Message, joined
from schedtrace.model.report import Finding
from schedtrace.model.say import say
from schedtrace.present.phrases import counted, integer

MOST_NAMES = 6


def some(texts: list[Message], *, everything: bool = False) -> Message:
    """``a, b, c, d, e, f and 9 more``; all of them if asked for."""
    most = len(texts) if everything or len(texts) == MOST_NAMES + 1 else MOST_NAMES
    rest = len(texts) - most
    more = f" and {integer(rest)} more" if rest > 0 else ""
    return say("{names}{more}", names=joined(texts[:most], ", "), more=more)


def of_trial(trial: int | None) -> str:
    """`` of trial 1``; nothing for a trace without trials."""
    return {None: "", 0: " of the warm-up"}.get(trial, f" of trial {trial}")


def engine(rank: int) -> str:
    """``, engine 2``; nothing for the first one, which most runs have alone."""
    return f", engine {rank}" if rank else ""


MOST_NAMED = 6


def on_engines(found: Finding, engines: int) -> str:
    """``on all 4 engines``, ``on engines 0, 2 and 5``, ``on 30 of 64 engines``, ``on engine 1``."""
    ranks = found.engine_ranks or [found.engine_rank]
    if len(ranks) == 1:
        return f"on engine {ranks[0]}"
    if len(ranks) == engines:
        return f"on all {counted(engines, 'engine')}"
    if len(ranks) > MOST_NAMED:
        return f"on {integer(len(ranks))} of {counted(engines, 'engine')}"
    return f"on engines {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def whose_figures(found: Finding, engines: int) -> str:
    """Where an engine's finding was found, and whose figures are shown; nothing for one of all ranks."""
    if engines == 1 or found.of_ranks:
        return ""
    several = f"; these are figures of engine {found.engine_rank}" if len(found.engine_ranks) > 1 else ""
    return f"Found {on_engines(found, engines)}{several}."


def in_brackets(detail: str | None) -> str:
    """`` (full_sequence)``; nothing where there is no detail."""
    return f" ({detail})" if detail else ""
