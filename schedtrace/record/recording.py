"""Opens a recording: what a recorder of one scheduler needs, from its settings to its file."""

from typing import Any

from loguru import logger

from schedtrace.record.clocks import read_anchor
from schedtrace.record.header import make_header
from schedtrace.record.recorder import Recorder
from schedtrace.record.settings import Settings, from_environment
from schedtrace.record.writer import Writer


def open_recorder(scheduler: Any) -> Recorder | None:
    """A recorder for a traced scheduler just built; None, with one warning, where that is impossible."""
    try:
        recorder = prepared_recorder(scheduler, type(scheduler), from_environment())
    except Exception as error:
        logger.warning("schedtrace: not recording: {!r}", error)
        return None
    logger.info("schedtrace: recording engine {} to {}", recorder.engine_rank, recorder.path)
    return recorder


def prepared_recorder(scheduler: Any, traced: type, chosen: Settings, *, attached: bool = False) -> Recorder:
    """A recorder whose file is open; nothing of the scheduler is changed.

    Args:
        scheduler: vLLM's.
        traced: The class that records it, which it has or is about to get.
        chosen: Where to and how.
        attached: Whether it has run before.

    Raises:
        OSError: the file cannot be made.
        AttributeError: the scheduler lacks what every V1 scheduler of vLLM has.
    """
    anchor = read_anchor()
    header = make_header(scheduler, traced, chosen, anchor, attached=attached)
    return Recorder(scheduler, traced, Writer(chosen, header, anchor.ns), full_lines=chosen.lines == "full")
