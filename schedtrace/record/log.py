"""The log of the engine's process: whatever is written to it can be seen, and stays within its line.

Names of folders, threads and classes come from others. A newline in one would pass for a line of vLLM's, and
a lone surrogate would lose the whole message.
"""

from typing import TYPE_CHECKING

import loguru

from schedtrace.model.printable import visible

if TYPE_CHECKING:
    from loguru import Record


def _make_visible(record: "Record") -> None:
    record["message"] = visible(record["message"])


logger = loguru.logger.patch(_make_visible)
"""The only logger of ``record/`` beside the watchdog's, which is vLLM's own."""
