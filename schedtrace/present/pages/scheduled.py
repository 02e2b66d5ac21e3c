"""What each request got in a step: ordinary decodes together, everybody else in a table."""

from collections.abc import Iterator

from schedtrace.model.message import CauseWord, Request, joined, message
from schedtrace.model.story import Scheduled
from schedtrace.present.numbers import counted, integer
from schedtrace.present.pages.names import some
from schedtrace.present.sections import Cell, Column, Content, Table

MOST_LISTED = 20
FEWEST_GROUPED = 4
"""Decodes alike that share a line; fewer are listed."""


def scheduled_parts(scheduled: list[Scheduled], *, everything: bool) -> Iterator[Content | Table]:
    """Ordinary decodes on one line, everybody else in a table; each in the table if ``everything``."""
    plain = [share for share in scheduled if _plain(share)]
    grouped = [] if everything or len(plain) < FEWEST_GROUPED else plain
    listed = [share for share in scheduled if not _plain(share)] if grouped else scheduled
    if grouped:
        yield _decodes(grouped)
    if listed:
        yield _table(listed, len(listed) if everything else MOST_LISTED)
        yield from _cuts(listed, everything=everything)


def _plain(share: Scheduled) -> bool:
    """An ordinary decode, of which large batches have hundreds."""
    return share.phase == "running" and share.work == "decode" and not share.caps


def _decodes(grouped: list[Scheduled]) -> str:
    tokens = sorted({share.scheduled_tokens for share in grouped})
    each = counted(tokens[0], "token") if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]} tokens"
    drafts = sum(share.draft_tokens for share in grouped)
    drafted = f" ({counted(drafts, 'draft token')} among them)" if drafts else ""
    return f"{counted(len(grouped), 'running request')} decoded {each} each{drafted}"


def _table(scheduled: list[Scheduled], most: int) -> Table:
    drafts, caps = any(share.draft_tokens for share in scheduled), any(share.caps for share in scheduled)
    headings = ["computed\nbefore", "tokens\nnow", "prompt"]
    headings += ["draft"] * drafts + ["wanted"] * caps
    columns = [Column("request"), Column("phase"), Column("work")]
    columns += [Column(heading, numeric=True) for heading in headings]
    rows: list[list[Cell]] = [
        [
            message("{request}", request=Request(share.request_id)),
            share.phase,
            share.work or "-",
            integer(share.computed_tokens),
            integer(share.scheduled_tokens),
            integer(share.prompt_tokens),
            *([integer(share.draft_tokens)] * drafts),
            *([integer(share.wanted_tokens) if share.caps else "", "cut" if share.caps else ""] * caps),
        ]
        for share in scheduled[:most]
    ]
    more = f"{integer(len(scheduled) - most)} more: --all lists them" if len(scheduled) > most else ""
    return Table([*columns, *([Column("")] * caps)], rows, more)


def _cuts(scheduled: list[Scheduled], *, everything: bool) -> Iterator[Content]:
    """Below the table, since the names of limits are long."""
    for caps in dict.fromkeys(tuple(share.caps) for share in scheduled if share.caps):
        cut = [share.request_id for share in scheduled if tuple(share.caps) == caps]
        limits = joined([message("{cap}", cap=CauseWord(cap)) for cap in caps], ", then ")
        names = some([message("{request}", request=Request(name)) for name in cut], everything=everything)
        yield message("cut by {limits}: {names}", limits=limits, names=names)
