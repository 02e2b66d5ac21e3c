"""Log of the engine's process, in which all text is printable and no message breaks its line.

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
"""Logger of all of ``record/`` except the watchdog, which uses vLLM's own."""
