"""A line of text every few seconds, for pipes and logs."""

import time
from collections.abc import Callable

from schedtrace.watch.lines import line, moment
from schedtrace.watch.session import Session


def stream(
    session: Session,
    every_s: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Say a line now and then, and what happened to the trace, until nothing more will come.

    What has ended, or is waited for, is one line.
    """
    told, still = 0, ""
    while True:
        seen = session.look()
        for note in session.notes_since(told):
            say(f"{moment(note.at_s)} {note.text}")
        told = session.noted
        before, still = still, seen.name if seen.ended else "" if seen.engines else seen.awaited
        if not still or still != before:
            say(line(seen))
        if seen.over:
            return
        sleep(every_s)
