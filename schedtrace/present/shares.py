"""What each request got in a step, as a table."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from schedtrace.model.story import Scheduled
from schedtrace.present.layout import plain_table
from schedtrace.present.numbers import integer
from schedtrace.present.words import counted, some

MOST_SHARES = 20
FEWEST_GROUPED = 4
"""Decodes alike that share a line; fewer are listed."""


def shares_view(shares: list[Scheduled], *, everything: bool) -> Iterator[RenderableType]:
    """Ordinary decodes on one line, everybody else in a table; each in the table if ``everything``."""
    plain = [one for one in shares if _plain(one)]
    grouped = [] if everything or len(plain) < FEWEST_GROUPED else plain
    listed = shares if not grouped else [one for one in shares if not _plain(one)]
    if grouped:
        tokens = sorted({one.scheduled_tokens for one in grouped})
        each = counted(tokens[0], "token") if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]} tokens"
        drafts = sum(one.draft_tokens for one in grouped)
        drafted = f" ({counted(drafts, 'draft token')} among them)" if drafts else ""
        yield Text(f"{counted(len(grouped), 'running request')} decoded {each} each{drafted}")
    most = len(listed) if everything else MOST_SHARES
    if listed:
        yield _share_table(listed[:most])
        yield from _cuts(listed, everything=everything)
    if len(listed) > most:
        yield Text(f"{integer(len(listed) - most)} more: --all lists them", style="dim")


def _plain(one: Scheduled) -> bool:
    """An ordinary decode, of which large batches have hundreds."""
    return one.phase == "running" and one.work == "decode" and not one.caps


def _share_table(shares: list[Scheduled]) -> Table:
    drafts, caps = any(one.draft_tokens for one in shares), any(one.caps for one in shares)
    right = [
        "computed\nbefore",
        "tokens\nnow",
        "prompt",
        *(["draft"] if drafts else []),
        *(["wanted"] if caps else []),
    ]
    table = plain_table("request", "phase", "work", right=right, last="")
    for one in shares:
        table.add_row(
            one.request_id,
            one.phase,
            one.work or "-",
            integer(one.computed_tokens),
            integer(one.scheduled_tokens),
            integer(one.prompt_tokens),
            *([integer(one.draft_tokens)] if drafts else []),
            *([integer(one.wanted_tokens) if one.caps else ""] if caps else []),
            "cut" if one.caps else "",
        )
    return table


def _cuts(shares: list[Scheduled], *, everything: bool) -> Iterator[Text]:
    """Below the table, since the names of limits are long."""
    for caps in dict.fromkeys(tuple(one.caps) for one in shares if one.caps):
        cut = [one.request_id for one in shares if tuple(one.caps) == caps]
        yield Text(f"cut by {', then '.join(caps)}: {some(cut, everything=everything)}")
