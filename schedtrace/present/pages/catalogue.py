"""The kinds of findings, one a row."""

from collections.abc import Iterator

from schedtrace.diagnose.catalogue import Catalogue
from schedtrace.present.sections import Column, Page, Section, Style, Styled, Table


def catalogue_page(catalogue: Catalogue) -> Page[Catalogue]:
    """Every kind, with what a record must hold for it."""
    return Page(catalogue, _sections)


def _sections(catalogue: Catalogue) -> Iterator[Section]:
    columns = [Column("finding"), Column("meaning"), Column("needs")]
    yield Table(
        columns,
        [
            [Styled(kind.code, Style.STRONG), kind.summary, Styled(", ".join(kind.needs), Style.DIM)]
            for kind in catalogue.findings
        ],
    )
