"""Log of the engine's process; everything written to it is visible and stays within its line.

Names of folders, threads and classes are untrusted. A newline in a name could imitate a line of vLLM, and a
lone surrogate would lose the whole message.
"""

from typing import TYPE_CHECKING

import loguru

from schedtrace.model.printable import visible

if TYPE_CHECKING:
    from loguru import Record


def _make_visible(record: "Record") -> None:
    record["message"] = visible(record["message"])


logger = loguru.logger.patch(_make_visible)
"""The only logger of ``record/`` besides the watchdog's, which is vLLM's own."""
