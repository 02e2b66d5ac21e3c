"""The kinds of findings, one a row."""

from schedtrace.diagnose.catalogue import Catalogue, FindingKind
from schedtrace.present.sections import Field, Page, Style, Styled, table

KIND: list[Field[FindingKind]] = [
    Field("finding", lambda kind: Styled(kind.code, Style.STRONG)),
    Field("meaning", lambda kind: kind.summary),
    Field("needs", lambda kind: Styled(", ".join(kind.needs), Style.DIM)),
]


def catalogue_page(catalogue: Catalogue) -> Page[Catalogue]:
    """Return every kind of finding, with the facts that a record must hold for it."""
    return Page(catalogue, lambda shown: [table(shown.findings, KIND)])
