"""Pictures over time in characters, as many as there is room for."""

from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from typing import TypeVar

from schedtrace.model.say import say
from schedtrace.present.phrases import bar, settled
from schedtrace.present.sections import Bars, State, States, Strip, Text

_T = TypeVar("_T")


def bar_characters(bars: Bars, width: int) -> str:
    """A character for each height; the highest of several where there is not room for all."""
    return "".join(bar(height) for height in highest(bars, width))


def highest(bars: Bars, width: int) -> list[float]:
    """At most this many heights: the highest of several where there are more."""
    return [max(part) for part in _parts(bars.heights, width)]


EIGHTHS = " ▏▎▍▌▋▊▉█"


def horizontal_bar(fraction: float, width: int) -> str:
    """A bar as long as the fraction of the width, in eighths of a character; anything above 0 is visible."""
    eighths = int(settled(8 * width * min(1.0, fraction), 0))
    if fraction > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")


def state_characters(states: States, width: int) -> list[State]:
    """A state for each step; where there is not room for all, a prominent one, else the most frequent."""
    ends = list(accumulate(count for _, count in states.runs))
    steps = ends[-1] if ends else 0
    cells = min(width, steps)
    found = []
    for cell in range(cells):  # steps are not listed: a damaged trace may count 10^18 of them
        begin, end = cell * steps // cells, (cell + 1) * steps // cells
        first, part = bisect_right(ends, begin), Counter[State]()
        for (state, count), its_end in zip(states.runs[first:], ends[first:], strict=True):
            if its_end - count >= end:
                break
            part[state] += min(end, its_end) - max(begin, its_end - count)
        found.append(next((state for state in part if state.prominent), part.most_common(1)[0][0]))
    return found


def states_of(strip: Strip) -> list[State]:
    """Every state that is drawn in it, in the order of their first runs."""
    drawn = [band.drawn for band in strip.bands]
    return list(dict.fromkeys(state for one in drawn if isinstance(one, States) for state, _ in one.runs))


def legend_with_key(strip: Strip) -> Text:
    """What its pictures mean, with the character of each state: ``steps 3-9: P prefill, = decode``."""
    key = ", ".join(f"{state.character} {state.word}" for state in states_of(strip))
    return say("{legend}: {key}", legend=strip.legend, key=key) if key else strip.legend


def _parts(values: list[_T], width: int) -> list[list[_T]]:
    cells = min(width, len(values))
    return [values[cell * len(values) // cells : (cell + 1) * len(values) // cells] for cell in range(cells)]
