"""Entry point of ``python -m schedtrace``, which is the same as ``schedtrace``."""

from schedtrace.cli.main import entry

entry()
