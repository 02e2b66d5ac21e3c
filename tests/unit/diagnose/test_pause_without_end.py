"""A pause that nobody ended lasts until the last sign of life; aborts meanwhile are its effect."""

from schedtrace.diagnose.rules import RULES
from schedtrace.model.trace import Control
from tests.makers import arrival, finish, step

PAUSE = Control("pause_state", 2_500, detail="PAUSED_ALL")


def paused(**last):
    """Two steps of requests a and b, a pause, and a last line."""
    names = ["a", "b"]
    arrived = [arrival(name, -20, -10) for name in names]
    got = dict.fromkeys(names, 1)
    return [
        step(0, start=0, took=10, back=900, got=got, new=names, arrived=arrived),
        step(1, start=1_000, took=10, back=900, got=got, controls=[PAUSE], **last),
    ]


def found(view):
    [finding] = RULES["interruption"](view)
    return finding


def test_it_lasts_until_the_last_abort(view_of):
    gone = [finish(name, "ABORTED", abort_us=40_000, finished_us=41_000, in_schedule=False) for name in "ab"]
    finding = found(view_of(*paused(finished=gone)))
    assert finding.evidence.open
    assert finding.evidence.time_ms == (41_000 - 2_500) / 1e3
    assert (finding.evidence.requests, finding.evidence.aborted) == (2, 2)


def test_it_lasts_as_long_as_somebody_asks_the_engine_for_something(view_of):
    """Nobody was aborted; the last line is that of a call."""
    lines = paused()
    lines[1].controls.append(Control("is_sleeping", 60_000, took_us=0))
    finding = found(view_of(*lines))
    assert finding.evidence.time_ms == (60_000 - 2_500) / 1e3
    assert finding.evidence.aborted == 0
