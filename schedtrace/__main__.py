"""``python -m schedtrace`` is the same as ``schedtrace``."""

from schedtrace.cli.main import entry

entry()
