"""Hangs: what waits meanwhile waits for them, whatever else the steps show."""

import pytest

from schedtrace.diagnose.analyze import analyze
from schedtrace.diagnose.rules import RULES
from schedtrace.model.trace import Control, End, Notice
from schedtrace.model.trace_facts import Stalled
from schedtrace.present.pages.report import report_page
from schedtrace.present.renderers.text import render
from schedtrace.read.run import read_run
from tests.makers import arrival, finish, header, step, write_trace

LONG_US = 14_800_000


def hang(*, at=20, took=LONG_US, count=60, ends=True):
    """One request decodes; ``schedule()`` of a step takes long, and nine come that it takes later."""
    lines, start = [header(schema_version=2, scheduler_class="mine.Spins")], 0
    for number in range(count):
        late = number > at
        first, came = number == 0, number == at + 1
        ids = "abcdefghij" if late else "a"
        lines.append(
            step(
                number,
                start=start,
                took=took if number == at else 10,
                back=(took if number == at else 10) + 970,
                got=dict.fromkeys(ids, 1),
                new=ids[1:] if came else "a" if first else "",
                decode_tokens=len(ids),
                arrived=[arrival("a", 0, 0)]
                if first
                else [
                    arrival(one, start - LONG_US, start - 5, received_us=start - LONG_US + 100)
                    for one in "bcdefghij"
                ]
                if came
                else [],
                finished=[finish(one, finished_us=start) for one in ids]
                if ends and number == count - 1
                else [],
            )
        )
        start += (took if number == at else 10) + 990
    return [*lines, End(at_us=start, steps=count)]


@pytest.fixture
def reported(tmp_path):
    def make(*lines):
        write_trace(tmp_path / "run" / "engine-0.jsonl", *lines, closed=False)
        report = analyze([read_run(tmp_path / "run")])
        return report.runs[0], render(report_page(report), width=110)

    return make


def test_a_call_of_schedule_that_takes_seconds_is_one_event_that_all_wait_for(reported):
    run, text = reported(*hang())
    [found] = [one for one in run.findings if one.code == "interruption"]
    assert (found.cause, found.severity, found.steps) == ("hung", "critical", [20])
    assert "One call of schedule() did not return for 14.8 s while 10 requests waited for it" in text
    assert "schedule() of Spins" in text
    assert "garbage" not in text
    assert "The longest took 14.8 s, in step 20." in text
    [largest, *_] = run.time_split
    assert (largest.part, largest.share_frac > 0.98) == ("interrupted", True)
    assert not [part for part in run.time_split if part.part == "front_end" and part.share_frac > 0.01]


def stalled(**fields):
    given = {
        "kind": "engine",
        "since_us": 30_000,
        "sentence": "schedule() has not returned for 9 s: the engine is in mine.py:7 pick",
        "running": 1, "waiting": 0, "input_requests": 60, "holders": ["running: 1 of 8 seats: a"],
        "stacks": [
            "Thread 0x1 MainThread (most recent call first):",
            '  File "/srv/mine.py", line 7 in pick',
            '  File "/srv/mine.py", line 3 in schedule',
            "Thread 0x2 other (most recent call first):",
            '  File "/srv/other.py", line 1 in run',
        ],
    }  # fmt: skip
    return Stalled(**{**given, **fields})


def test_a_trace_that_ends_in_a_hang_says_so_first(reported):
    *lines, _ = hang(count=20, ends=False)
    seen = stalled(since_us=19_500)
    run, text = reported(
        *lines, Notice(at_us=10_020_000, message=seen.sentence, stalled=seen), End(at_us=12_019_500, steps=20)
    )
    assert (
        "When this trace ends, no step has made progress for 12.0 s: schedule() has not returned for 9 s"
        in text
    )
    assert "60 requests had reached the engine's process, but no step had seen them" in " ".join(text.split())
    assert "The engine's thread was in mine.py:7 pick, called by mine.py:3 schedule" in " ".join(text.split())
    assert "10.0 s, after step 19" in text or "12.0 s, after step 19" in text
    [first, *_] = run.findings
    assert (first.cause, first.severity, first.evidence.open) == ("hung", "critical", True)
    assert run.problems == []
    assert run.time_split[0].part == "interrupted"


@pytest.mark.parametrize(("end_us", "stands"), [(9_000_000, False), (12_019_000, True)])
def test_a_batch_without_an_output_long_before_the_end_is_a_stall_without_a_watchdog(
    reported, end_us, stands
):
    *lines, last, _ = hang(count=20, ends=False)
    last.output_us = last.update_us = None
    run, text = reported(*lines, last, End(at_us=end_us, steps=20))
    sentence = "When this trace ends, no step has made progress for 12.0 s: the worker does not answer"
    assert (sentence in text) == stands
    assert [one.cause for one in run.findings if one.code == "interruption"] == ["stalled"] * stands


@pytest.mark.parametrize("kind", ["scheduler", "livelock"])
def test_a_stall_in_which_the_engine_steps_is_said_and_charged_to_what_refuses(kind, reported):
    *lines, _ = hang(count=20, ends=False)
    seen = stalled(kind=kind, sentence="the scheduler refuses", input_requests=0)
    run, text = reported(
        *lines, Notice(at_us=10_020_000, message=seen.sentence, stalled=seen), End(at_us=10_030_000, steps=20)
    )
    assert "When this trace ends, no step has made progress for 10.0 s: the scheduler refuses." in text
    assert [one for one in run.findings if one.cause in {"hung", "stalled"}] == []


def test_a_stall_that_has_ended_is_not_the_end(reported):
    lines = hang()
    seen = stalled(since_us=20_500, until_us=14_821_000)
    run, text = reported(
        *lines[:-1], Notice(at_us=10_000_000, message=seen.sentence, stalled=seen), lines[-1]
    )
    assert "When this trace ends" not in text
    [found] = [one for one in run.findings if one.cause == "hung"]
    assert (found.evidence.times, found.evidence.stacks) == (1, seen.stacks)


def test_a_hang_before_the_first_step_has_the_bar_that_its_verdict_is_about(reported):
    """Two requests come at 1 ms; the first step begins at 12 s and all 30 take 30 ms."""
    seen = stalled(since_us=1000, until_us=12_000_000, sentence="a call of the workers has not returned")
    came = [arrival(request_id, 0, 500) for request_id in "ab"]
    steps = [
        step(
            number,
            start=12_000_000 + 1000 * number,
            got={"a": 1, "b": 1},
            new="" if number else "ab",
            arrived=[] if number else came,
            finished=[finish(request_id, finished_us=12_029_000) for request_id in "ab" if number == 29],
        )
        for number in range(30)
    ]
    run, text = reported(
        header(),
        Notice(at_us=10_500_000, message=seen.sentence, stalled=seen),
        *steps,
        End(at_us=12_030_000, steps=30),
    )
    assert "The engine made no step for 12.0 s while 2 requests waited" in text
    shares = {part.part: part.time_ms for part in run.time_split}
    assert shares["interrupted"] == 2 * 11_999
    assert shares["next_step"] == 2 * 0.5


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
