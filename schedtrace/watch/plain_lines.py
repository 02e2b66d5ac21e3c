"""What is seen as text: a line for a pipe, and a page for a file."""

import time
from collections.abc import Callable

from schedtrace.model.printable import visible
from schedtrace.present.numbers import integer, number, percent
from schedtrace.present.phrases import plain
from schedtrace.watch.seen import Figures, Seen, Slow, Verdict
from schedtrace.watch.session import Session


def moment(at_s: float) -> str:
    """The local time."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def long(us: float) -> str:
    """A duration in a few characters: ``0.3 s``, ``12 s``, ``4 min``."""
    if us < 9_950_000:  # noqa: PLR2004  # ten seconds
        return f"{us / 1e6:.1f} s"
    return f"{us / 1e6:.0f} s" if us < 180e6 else f"{us / 60e6:.0f} min"  # noqa: PLR2004  # three minutes


def waiting(figures: Figures) -> str:
    """``12 (kv_blocks 10, token_budget 2)``."""
    causes = ", ".join(f"{visible(cause)} {count:,}" for cause, count in figures.waiting_for.items())
    return f"{integer(figures.waiting)} ({causes})" if causes else integer(figures.waiting)


def running(figures: Figures) -> str:
    """``8/16``: of so many seats."""
    seats = "" if figures.seats is None else f"/{integer(figures.seats)}"
    return f"{integer(figures.running)}{seats}"


def name_of(figures: Figures) -> str:
    """``rank 0``, ``all``."""
    return "all" if figures.rank is None else f"rank {figures.rank}"


def verdict_text(verdict: Verdict, *, brief: bool = False) -> str:
    """All sentences, or only the first, and the advice."""
    told = plain(verdict.advice).rstrip(".")
    advice = [f"Try: {told}."] if told else []
    return visible(" ".join([*map(plain, verdict.sentences[: 1 if brief else None]), *advice]))


def span(verdict: Verdict) -> str:
    """``10 s``, ``1 min``."""
    return "1 min" if verdict.span_s == 60 else f"{verdict.span_s} s"  # noqa: PLR2004  # seconds


def age(verdict: Verdict, now_s: float) -> str:
    """``now``, ``4 s ago``, ``12 s ago, before requests waited``."""
    seconds = now_s - verdict.at_s
    since = f", before {visible(verdict.changed)}" if verdict.changed else ""
    return ("now" if seconds < 1 else f"{seconds:.0f} s ago") + since


def state(slow: Slow) -> str:
    """What a request does."""
    if slow.waits_us is None:
        return "running"
    return f"waiting {long(slow.waits_us)}, now for {visible(slow.cause or 'an unknown cause')}"


def preempted(slow: Slow) -> str:
    """``, preempted twice``; empty for a request that never was."""
    times = {0: "", 1: "once", 2: "twice"}.get(slow.preempted, f"{slow.preempted} times")
    return f", preempted {times}" if times else ""


def shown_id(request_id: str, width: int) -> str:
    """A request id in a bounded width, its end kept: ids often begin alike."""
    text = visible(request_id)
    kept = max(1, (width - 2) // 2)
    return text if len(text) <= width else f"{text[: width - 2 - kept]}..{text[-kept:]}"


def line(seen: Seen) -> str:
    """One line with everything but the requests."""
    total = seen.total()
    if total is None:
        return f"{moment(seen.at_s)} {visible(seen.awaited)}"
    parts = [moment(seen.at_s)]
    if total.state:
        parts.append(f"{total.state}; last step:")
    parts.append(f"running {running(total)} waiting {waiting(total)}")
    parts.append(
        f"KV {percent(total.kv_frac)} budget {percent(total.budget_frac)} "
        f"output {number(total.output_per_s)} tok/s "
        f"preemptions {number(total.preempted_per_s)}/s steps {number(total.steps_per_s)}/s"
    )
    if len(seen.engines) > 1:
        each = ", ".join(f"{name_of(one)} {running(one)}+{one.waiting:,}" for one in seen.engines)
        parts.append(f"(running+waiting: {each})")
    if seen.verdicts:
        short = seen.verdicts[0]
        parts.append(f"| last {span(short)}, {age(short, seen.at_s)}: {verdict_text(short)}")
    return " ".join(parts)


def page(seen: Seen) -> str:
    """Everything, as a text of some lines."""
    at = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seen.at_s))
    total = seen.total()
    rows = [*seen.engines, *([total] if total and len(seen.engines) > 1 else [])]
    parts = [
        [
            f"{visible(seen.name or f'no run yet, {seen.awaited}')}, {at}",
            *(f"last {span(one)} ({age(one, seen.at_s)}): {verdict_text(one)}" for one in seen.verdicts),
        ],
        [_row(figures) for figures in rows],
        [
            f"{long(one.age_us):>8} {state(one)}{preempted(one)}  {visible(one.request_id)}"
            for one in seen.slowest
        ],
        [f"{moment(note.at_s)} {visible(note.text)}" for note in seen.notes],
    ]
    if seen.slowest:
        parts[2].insert(0, "requests (age, state): the longest waits, then the oldest")
    return "\n".join("".join(f"{line}\n" for line in part) for part in parts if part)


def _row(figures: Figures) -> str:
    return (
        f"{name_of(figures)}: running {running(figures)}, waiting {waiting(figures)}, "
        f"KV {percent(figures.kv_frac)}, budget {percent(figures.budget_frac)}, "
        f"{number(figures.output_per_s)} output tok/s, "
        f"{number(figures.preempted_per_s)} preemptions/s, {number(figures.steps_per_s)} steps/s"
        + (f"; {figures.state}" if figures.state else "")
    )


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
