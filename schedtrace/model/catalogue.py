"""The kinds of findings, as ``schedtrace findings`` lists them."""

import msgspec

CATALOGUE_SCHEMA_VERSION = 1


class FindingKind(msgspec.Struct, kw_only=True):
    """One rule."""

    code: str
    """As in a report; takes ``analyze --only`` and ``--ignore``."""
    summary: str
    """What it means when this is found."""
    needs: list[str]
    """What a record must hold for it to be judged; every trace of schedtrace holds all of it."""


class Catalogue(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace findings``."""

    schema_version: int = CATALOGUE_SCHEMA_VERSION
    findings: list[FindingKind]
