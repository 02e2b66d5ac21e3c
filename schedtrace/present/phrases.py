"""Wording and style of severities, states and parts of time, and pictures made of characters.

``model/message.pieces`` words the arguments of sentences.
"""

from bisect import bisect_right
from collections import Counter
from itertools import accumulate

from schedtrace.model.causes import interruption
from schedtrace.model.message import NOTHING, Message, Steps
from schedtrace.model.numbers import counted, integer, settled
from schedtrace.model.report import Finding, LatencyTail, TailPart
from schedtrace.model.say import say
from schedtrace.present.sections import Bars, State, States, Strip, Style, Styled, Text

BARS = " ▁▂▃▄▅▆▇█"


def change_range(low_frac: float, high_frac: float) -> str:
    """Return an interval of changes in percent: ``+7..+13``."""
    return f"{settled(100 * low_frac, 0):+.0f}..{settled(100 * high_frac, 0):+.0f}"


def bar(fraction: float) -> str:
    """Return a character whose height shows the fraction; any fraction above 0 is visible."""
    if fraction <= 0:
        return BARS[0]
    return BARS[min(len(BARS) - 1, max(1, int(settled(fraction * (len(BARS) - 1), 0))))]


MOST_VALUES = 6


def series(values: list[int]) -> str:
    """Return the values as ``1, 15``, or shortened with their number as ``8, 8, 8, 8, 8, 8 ... (40)``."""
    shown = ", ".join(f"{value:,}" for value in values[:MOST_VALUES])
    return shown if len(values) <= MOST_VALUES else f"{shown} ... ({len(values)})"


SEVERITIES = {"info": Style.INFO, "warning": Style.WARNING, "critical": Style.CRITICAL}

CHANGES = {"appeared": Style.WARNING, "went": Style.GOOD, "stayed": None}
"""Style of each word for the state of a finding in a comparison."""

EXITS_VIA = {"source": "exact, from the scheduler's own code", "inferred": "inferred from its state"}

STATES = {
    "front_end": State("front end", "~", Style.DIM),
    "waiting": State("waiting", ".", Style.WARNING),
    "prefill": State("prefill", "P", Style.PREFILL, prominent=True),
    "recompute": State("recompute", "R", Style.RECOMPUTE, prominent=True),
    "decode": State("decode", "=", Style.DECODE),
    "preempted": State("preempted", "x", Style.BAD),
    "set_aside": State("set aside", "-", Style.WARNING),
    "stalled": State("stalled", "_", Style.DIM),
    "interrupted": State("interrupted", "!", Style.BAD),
    "not_recorded": State("not recorded", " ", Style.DIM),
    "unrecorded": State("before the recording", " ", Style.DIM),
}
"""Characters and styles of a request's states; prefill and recompute are short but important."""

ENGINE_STATES = {
    "device": "device",
    "schedule": "schedule()",
    "update": "update_from_output()",
    "dummy": "dummy batches",
    "host_gap": "between steps",
    "not_recorded": "not recorded",
}
"""Names of a busy engine's states, and of time that the trace does not contain."""

GAINS = {
    "output_tokens_per_s": "output tok/s",
    "ttft_p50_ms": "TTFT p50",
    "tpot_p50_ms": "TPOT p50",
    "e2e_mean_ms": "E2E mean",
}
"""Names of the metrics of a gain."""

_WAITS = {
    "kv_blocks": "waiting for KV blocks",
    "max_num_seqs": "waiting for a seat",
    "token_budget": "waiting for the token budget",
}
_PARTS = {
    "front_end": ("front end", Style.DIM),
    "next_step": ("waiting for the next step", Style.DIM),
    "between_steps": ("engine between steps", Style.RECOMPUTE),
    "interrupted": ("interrupted", Style.BAD),
}

EVENTS = {
    "preempted": Style.BAD,
    "interrupted": Style.BAD,
    "set_aside": Style.WARNING,
    "first_token": Style.STRONG,
}


def severity_word(word: str) -> Styled:
    """Return a severity as a word with its mark."""
    return Styled(word, SEVERITIES[word])


def time_part(part: str, cause: str | None) -> tuple[Text, Style]:
    """Return the label and the style of a part of the requests' time."""
    if part == "stalled":
        return say("running without tokens ({cause:cause})", cause=cause or "other"), Style.BAD
    if part == "waiting":
        waiting_for = _WAITS.get(cause or "")
        return waiting_for or say("waiting ({cause:cause})", cause=cause or "other"), Style.WARNING
    if part in _PARTS:
        return _PARTS[part]
    return part, state(part).style


TAILS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E latency"}


def tail_sentence(tails: list[LatencyTail], *, engines: int) -> Message:
    """Return a sentence on why the slowest requests are slow, for the latency farthest from its median.

    E2E is shown only if no other latency has a tail, because it is the sum of the other two.
    """
    if not tails:
        return NOTHING
    either = [tail for tail in tails if tail.metric != "e2e_ms"] or tails
    tail = max(either, key=lambda tail: tail.slowest_ms / max(tail.median_ms, 1e-3))
    first = tail.parts[0]
    size = first.state if tail.metric != "tpot_ms" else ""
    steps = None
    if tail.first_step is not None and tail.last_step is not None:
        steps = Steps(tail.first_step, tail.last_step, None)
    return say(
        "{on}the slowest [{single:!}{slowest:n} ]of {requests:n request} by {latency} took {slowest_ms:ms}"
        "[{single:!} (mean)], the median {median_ms:ms}. {share:%} of the difference: {part}[ in {steps}]"
        "[ ({prompts:n prompt token} not cached, usually {usual_prompts:n})]"
        "[ ({outputs:n output token}, usually {usual_outputs:n})]. The slowest is {request:id}.",
        on=f"on engine {tail.engine_rank}, " if engines > 1 else "",
        single=tail.slowest == 1,
        slowest=tail.slowest,
        requests=tail.requests,
        latency=TAILS[tail.metric],
        slowest_ms=tail.slowest_ms,
        median_ms=tail.median_ms,
        share=min(1.0, first.share_frac),
        part=_tail_part(first),
        steps=steps,
        prompts=_rounded(tail.prefill_tokens if size == "prefill" else None),
        usual_prompts=_rounded(tail.usual_prefill_tokens),
        outputs=_rounded(tail.output_tokens if size == "decode" else None),
        usual_outputs=_rounded(tail.usual_output_tokens),
        request=tail.slowest_request,
    )


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _tail_part(part: TailPart) -> Text:
    if part.state == "interrupted":
        return interruption(part.cause)
    if part.state == "preempted":
        return "waiting again after a preemption"
    if part.state == "recompute":
        return "computing again what a preemption threw away"
    return time_part(part.cause if part.cause == "next_step" else part.state, part.cause)[0]


def state(word: str) -> State:
    """Return the state for a document's word; an unknown state keeps its word."""
    return STATES.get(word) or State(word, "?", Style.DIM)


COLOURS: dict[str, tuple[str, str]] = {
    "decode": ("#0747a2", "#2267e9"),
    "prefill": ("#48c6f6", "#b3cae8"),
    "recompute": ("#aa50fc", "#bf8bfc"),
    "preempted": ("#1a1a1a", "#f5f5f5"),
    "front_end": ("#c3cbd2", "#4a545c"),
    "kv_blocks": ("#c92004", "#e62902"),
    "max_num_seqs": ("#803854", "#a34589"),
    "token_budget": ("#f1b811", "#f3cb11"),
    "preempted_this_step": ("#69a569", "#1eb478"),
    "other": ("#8a8a8a", "#8c949b"),
    "nobody": ("#eceff1", "#262b30"),
    "kv": ("#9db0be", "#5b6b78"),
}
"""Colours on a light and on a dark background, by cause, state or part of a picture, distinguishable in four
kinds of colour vision. Causes that are not listed have the colour of ``other``. ``nobody`` is for unused
budget while no request was refused; ``kv`` is for KV blocks in use."""


MOST_NAMED = 6


def on_engines(finding: Finding, engines: int) -> str:
    """Return ``on all 4 engines``, ``on engines 0, 2 and 5``, ``on 30 of 64 engines``, ``on engine 1``."""
    ranks = finding.engine_ranks or [finding.engine_rank]
    if len(ranks) == 1:
        return f"on engine {ranks[0]}"
    if len(ranks) == engines:
        return f"on all {counted(engines, 'engine')}"
    if len(ranks) > MOST_NAMED:
        return f"on {integer(len(ranks))} of {counted(engines, 'engine')}"
    return f"on engines {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def whose_figures(finding: Finding, engines: int) -> str:
    """Return which engines have the finding, and whose figures are shown.

    The text is empty if there is one engine, or if the finding is about all ranks together.
    """
    if engines == 1 or finding.of_ranks:
        return ""
    several = f"; these are figures of engine {finding.engine_rank}" if len(finding.engine_ranks) > 1 else ""
    return f"Found {on_engines(finding, engines)}{several}."


def in_brackets(detail: str | None) -> str:
    """Return the detail in brackets, as `` (full_sequence)``; empty without a detail."""
    return f" ({detail})" if detail else ""


def bar_characters(bars: Bars, width: int) -> str:
    """Return a character per height; if there is no room for all, each shows the highest of several."""
    return "".join(bar(height) for height in highest(bars, width))


def highest(bars: Bars, width: int) -> list[float]:
    """Return at most ``width`` heights; if there are more, the highest of each group."""
    count = len(bars.heights)
    cells = min(width, count)
    return [max(bars.heights[cell * count // cells : (cell + 1) * count // cells]) for cell in range(cells)]


EIGHTHS = " ▏▎▍▌▋▊▉█"


def horizontal_bar(fraction: float, width: int) -> str:
    """Return a bar of this share of the width, in eighths of a character; anything above 0 is visible."""
    eighths = int(settled(8 * width * min(1.0, fraction), 0))
    if fraction > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")


def state_characters(states: States, width: int) -> list[State]:
    """Return one state per group of steps: a prominent state if the group has one, else the most frequent."""
    ends = list(accumulate(count for _, count in states.runs))
    steps = ends[-1] if ends else 0
    cells = min(width, steps)
    drawn = []
    for cell in range(cells):  # steps are not listed: a damaged trace may count 10^18 of them
        begin, end = cell * steps // cells, (cell + 1) * steps // cells
        first, part = bisect_right(ends, begin), Counter[State]()
        for (state, count), its_end in zip(states.runs[first:], ends[first:], strict=True):
            if its_end - count >= end:
                break
            part[state] += min(end, its_end) - max(begin, its_end - count)
        drawn.append(next((state for state in part if state.prominent), part.most_common(1)[0][0]))
    return drawn


def states_of(strip: Strip) -> list[State]:
    """Return every state in the strip, in the order of first appearance."""
    drawn = [band.drawn for band in strip.bands]
    return list(dict.fromkeys(state for row in drawn if isinstance(row, States) for state, _ in row.runs))


def legend_with_key(strip: Strip) -> Text:
    """Return the pictures' legend with the character of each state: ``steps 3-9: P prefill, = decode``."""
    key = ", ".join(f"{state.character} {state.word}" for state in states_of(strip))
    return say("{legend}: {key}", legend=strip.legend, key=key) if key else strip.legend
