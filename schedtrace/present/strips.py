"""Pictures over time in characters, as many as there is room for."""

from collections import Counter
from typing import TypeVar

from schedtrace.present.numbers import bar
from schedtrace.present.sections import Bars, State, States

_T = TypeVar("_T")


def bar_characters(bars: Bars, width: int) -> str:
    """A character for each height; the highest of several where there is not room for all."""
    return "".join(bar(max(part)) for part in _parts(bars.heights, width))


def state_characters(states: States, width: int) -> list[State]:
    """A state for each step; where there is not room for all, a prominent one, else the most frequent."""
    steps = [state for state, count in states.runs for _ in range(count)]
    return [
        next((state for state in part if state.prominent), Counter(part).most_common(1)[0][0])
        for part in _parts(steps, width)
    ]


def _parts(values: list[_T], width: int) -> list[list[_T]]:
    cells = min(width, len(values))
    return [values[cell * len(values) // cells : (cell + 1) * len(values) // cells] for cell in range(cells)]
