"""Text output of ``schedtrace watch``: one line at a time for a pipe, and a page for a file."""

import time
from collections.abc import Callable

from schedtrace.model.message import joined, plain
from schedtrace.model.numbers import integer
from schedtrace.model.printable import visible
from schedtrace.model.say import say
from schedtrace.watch.seen import LiveFigures, Seen, Slow, Verdict
from schedtrace.watch.session import WatchSession


def moment(at_s: float) -> str:
    """Return the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def long(us: float) -> str:
    """Return a duration in few characters: ``0.3 s``, ``12 s``, ``4 min``."""
    if us < 9_950_000:  # noqa: PLR2004  # ten seconds
        return f"{us / 1e6:.1f} s"
    return f"{us / 1e6:.0f} s" if us < 180e6 else f"{us / 60e6:.0f} min"  # noqa: PLR2004  # three minutes


def waiting(figures: LiveFigures) -> str:
    """Describe the waiting requests: ``12 (kv_blocks 10, token_budget 2)``."""
    causes = ", ".join(f"{visible(cause)} {count:,}" for cause, count in figures.waiting_for.items())
    return f"{integer(figures.waiting)} ({causes})" if causes else integer(figures.waiting)


def running(figures: LiveFigures) -> str:
    """Describe running requests and seats: ``8/16``."""
    seats = "" if figures.seats is None else f"/{integer(figures.seats)}"
    return f"{integer(figures.running)}{seats}"


def name_of(figures: LiveFigures) -> str:
    """Return the name of an engine (``rank 0``), or ``all`` for the sum."""
    return "all" if figures.rank is None else f"rank {figures.rank}"


def verdict_text(verdict: Verdict, *, brief: bool = False) -> str:
    """Return the verdict's sentences, or only the first (``brief``), followed by the advice."""
    advice = say("[Try: {advice}.]", advice=plain(verdict.advice).rstrip("."))
    return visible(plain(joined([*verdict.sentences[: 1 if brief else None], advice])))


def span_text(verdict: Verdict) -> str:
    """Return the length of the verdict's span: ``10 s``, ``1 min``."""
    return "1 min" if verdict.span_s == 60 else f"{verdict.span_s} s"  # noqa: PLR2004  # seconds


def age(verdict: Verdict, now_s: float) -> str:
    """Return the age of a verdict: ``now``, ``4 s ago``, ``12 s ago, before requests waited``."""
    seconds = now_s - verdict.at_s
    since = f", before {visible(verdict.changed)}" if verdict.changed else ""
    return ("now" if seconds < 1 else f"{seconds:.0f} s ago") + since


def window_title(verdict: Verdict, now_s: float) -> str:
    """Return the title of a verdict's span: ``last 10 s (now)``."""
    return f"last {span_text(verdict)} ({age(verdict, now_s)})"


def state_text(slow: Slow) -> str:
    """Describe a request's state: ``running``; ``waiting 12 s, now for kv_blocks, preempted twice``."""
    does = "running"
    if slow.waits_us is not None:
        does = f"waiting {long(slow.waits_us)}, now for {visible(slow.cause or 'an unknown cause')}"
    times = {0: "", 1: "once", 2: "twice"}.get(slow.preempted, f"{slow.preempted} times")
    return f"{does}, preempted {times}" if times else does


def shown_id(request_id: str, width: int) -> str:
    """Return a request id in a limited width; its end is kept, because ids often share their beginning."""
    text = visible(request_id)
    end_length = max(1, (width - 2) // 2)
    return text if len(text) <= width else f"{text[: width - 2 - end_length]}..{text[-end_length:]}"


def status_line(seen: Seen) -> str:
    """Return one line about everything except the requests."""
    total: LiveFigures | None = seen.total()
    if total is None:
        return f"{moment(seen.at_s)} {visible(seen.awaited)}"
    figures = say(
        "{at} [{state}; last step: ]running {running} waiting {waiting} KV {kv_frac:%} "
        "budget {budget_frac:%} output {output_per_s:n} tok/s preemptions {preempted_per_s:n}/s "
        "steps {steps_per_s:n}/s",
        total,
        at=moment(seen.at_s),
        running=running(total),
        waiting=waiting(total),
    )
    parts = [plain(figures)]
    if len(seen.engines) > 1:
        each = ", ".join(f"{name_of(engine)} {running(engine)}+{engine.waiting:,}" for engine in seen.engines)
        parts.append(f"(running+waiting: {each})")
    if seen.verdicts:
        short = seen.verdicts[0]
        parts.append(f"| last {span_text(short)}, {age(short, seen.at_s)}: {verdict_text(short)}")
    return " ".join(parts)


SCREENFUL = 10
"""Maximum number of requests and notes on a page that fits on a screen."""


def status_page(seen: Seen, most: int | None = None) -> str:
    """Return everything as a text of several lines.

    Args:
        seen: Current observation.
        most: Maximum number of requests and notes (default: all).
    """
    at = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seen.at_s))
    total = seen.total()
    rows: list[LiveFigures] = [*seen.engines, *([total] if total and len(seen.engines) > 1 else [])]
    shown, notes = seen.slowest[:most], seen.notes[-(most or 0) :]
    requests = [f"{long(slow.age_us):>8} {state_text(slow)}  {visible(slow.request_id)}" for slow in shown]
    if requests:
        requests.insert(0, "requests (age, state): the longest waits, then the oldest")
    if more := len(seen.slowest) - len(shown):
        requests.append(f"and {more:,} more, as schedtrace watch without --once shows")
    parts = [
        [
            f"{visible(seen.name or f'no run yet, {seen.awaited}')}, {at}",
            *(f"{window_title(verdict, seen.at_s)}: {verdict_text(verdict)}" for verdict in seen.verdicts),
        ],
        [
            plain(
                say(
                    "{name}: running {running}, waiting {waiting}, KV {kv_frac:%}, budget {budget_frac:%}, "
                    "{output_per_s:n} output tok/s, {preempted_per_s:n} preemptions/s, "
                    "{steps_per_s:n} steps/s[; {state}]",
                    figures,
                    name=name_of(figures),
                    running=running(figures),
                    waiting=waiting(figures),
                )
            )
            for figures in rows
        ],
        requests,
        [f"{moment(note.at_s)} {visible(note.text)}" for note in notes],
    ]
    return "\n".join("".join(f"{line}\n" for line in part) for part in parts if part)


def stream(
    session: WatchSession,
    every_s: float,
    put: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Print a line at intervals, and events of the trace, until the watch is over.

    For a run that has ended, or has not begun, only one line is printed.
    """
    shown, still = 0, ""
    while True:
        seen = session.observe_engines()
        for note in session.notes_since(shown):
            put(f"{moment(note.at_s)} {note.text}")
        shown = session.noted
        before, still = still, seen.name if seen.ended else "" if seen.engines else seen.awaited
        if not still or still != before:
            put(status_line(seen))
        if seen.over:
            return
        sleep(every_s)
