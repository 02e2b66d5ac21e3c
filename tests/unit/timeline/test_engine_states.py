"""Every moment of the engine, once, and when it is starved.

Steps take 100 ms, 97 of them on the device; where the engine is starved, they take 400 ms for 4 s.
"""

import polars as pl
import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.model.trace import Cpu
from schedtrace.model.trace_facts import ThreadTime
from schedtrace.timeline.engine_states import with_engine_time
from schedtrace.timeline.window import Window, windowed
from tests.makers import arrival, finish, step


def states(view):
    """When each state began, and which; then when the last one ended: no moment is in none or two."""
    rows = view.engine_states.select("begin_us", "end_us", "state").rows()
    assert [begin for begin, *_ in rows[1:]] == [end for _, end, _ in rows[:-1]]
    return " ".join([f"{begin} {state}" for begin, _, state in rows] + [str(rows[-1][1])])


GOT = {"got": {"a": 1}}
CAME = {"arrived": [arrival("a", None, queued=60)]}


def test_one_step_after_the_other(view_of):
    view = view_of(
        step(0, start=100, took=10, back=50, update_us=5, **GOT, **CAME),
        step(1, start=170, took=10, back=50, update_us=5, **GOT),
        step(2, start=300, took=10, back=None, finished=[finish("a", finished_us=223)]),
    )
    assert states(view) == (
        "100 schedule 110 device 150 update 155 host_gap "
        "170 schedule 180 device 220 update 225 idle 300 schedule 310"
    )
    assert view.busy_us == 310 - 100 - (300 - 225)


def test_host_work_behind_the_device_is_the_devices_time(view_of):
    view = view_of(
        step(0, start=100, took=10, back=90, update_us=5, **GOT, **CAME),
        step(1, start=120, took=10, back=170, update_us=5, **GOT),
    )
    assert states(view) == "100 schedule 110 device 290 update 295"


def test_the_workers_own_clock_counts_where_the_trace_has_it(view_of):
    view = view_of(
        step(0, start=100, took=10, back=90, execute_after_us=30, execute_us=40, **GOT, **CAME),
        step(1, start=190, took=10, back=None),
    )
    assert states(view) == "100 schedule 110 host_gap 130 device 170 host_gap 190 schedule 200"


def test_dummy_batches_stand_before_the_step_that_reports_them(view_of):
    view = view_of(
        step(0, start=100, took=10, back=None), step(1, start=300, took=10, back=None, dummy_us=50)
    )
    assert states(view) == "100 schedule 110 idle 250 dummy 300 schedule 310"


def test_a_trace_without_steps_has_no_states(view_of):
    assert view_of().engine_states.is_empty()


def test_a_requests_time_is_the_devices_the_hosts_or_idle(view_of):
    view = view_of(
        step(0, start=100, took=10, back=50, update_us=5, **GOT, **CAME),
        step(1, start=200, took=10, back=50, update_us=5, **GOT),
    )
    rows = pl.DataFrame({"begin_us": [60, 120, 105], "end_us": [100, 205, 260]})
    meet = with_engine_time(rows, view.engine_states)
    assert meet.select("device_us", "host_us", "idle_us").rows() == [(0, 0, 0), (30, 55, 0), (80, 70, 0)]


SECOND = 1_000_000
SLOW = range(20, 30)
"""Steps from 2 to 6 s."""
SHORT = (2, 3, 4, 5)
"""Seconds."""


def steps():
    """20 steps of 100 ms, 10 of 400 ms, 20 of 100 ms."""
    lines, start = [], 0
    for number in range(50):
        length = 400_000 if number in SLOW else 100_000
        first = number == 0
        lines.append(
            step(
                number,
                start=start,
                took=1000,
                back=length - 2000,
                got={"a": 1},
                new="a" if first else "",
                decode_tokens=1,
                arrived=[arrival("a", None, 0)] if first else [],
            )
        )
        start += length
    return lines


def cpu(worker, engine=(20_000, 0)):
    """A line each second; ``worker(second)`` and ``engine``: what a thread ran and waited in it."""
    sums = {"worker": [0, 0], "engine": [0, 0]}
    lines = []
    for second in range(9):
        threads = [
            ThreadTime(role, 10 + place, 10 + place, *sums[role]) for place, role in enumerate(sorted(sums))
        ]
        lines.append(Cpu(at_us=second * SECOND, threads=threads))
        for role, (ran, waited) in {"worker": worker(second), "engine": engine}.items():
            sums[role][0] += ran
            sums[role][1] += waited
    return lines


def short(second):
    """The worker runs a fifth of these seconds and waits three quarters of them."""
    return (200_000, 750_000) if second in SHORT else (970_000, 30_000)


def test_what_a_worker_waited_while_the_device_had_its_turn_is_lost(view_of):
    view = view_of(*steps(), *cpu(short))
    spans = view.starved
    assert spans.select("begin_us", "end_us").rows() == [(at * SECOND, (at + 1) * SECOND) for at in SHORT]
    assert spans["device_frac"].to_list() == pytest.approx([750 / 993, 750 / 992] * 2)
    assert spans["host_frac"].to_list() == [0] * 4
    assert view.starved_steps.to_list() == [*SLOW]
    lost = view.tables.thread_times.filter(role="worker")["lost_us"]
    assert lost.to_list() == [0, 0, *[750_000] * 4, 0, 0]


def test_linux_counts_a_wait_when_it_is_over(view_of):
    """1.5 s of two seconds are counted in the second of them, which has room for 0.8."""
    late = {2: (200_000, 0), 3: (200_000, 1_500_000)}
    view = view_of(*steps(), *cpu(lambda second: late.get(second, short(second))))
    waited = view.tables.thread_times.filter(role="worker")["waited_us"].to_list()
    assert waited[2:4] == [700_000, 800_000]
    assert view.starved["device_frac"].to_list()[:2] == pytest.approx([700 / 993, 792 / 992])


def test_a_thread_that_polls_while_another_works_loses_nothing(view_of):
    view = view_of(*steps(), *cpu(lambda _: (970_000, 30_000), engine=(100_000, 900_000)))
    assert view.starved.is_empty()
    assert view.starved_steps.is_empty()


def test_steps_without_processors_are_taken_from_all_other_explanations(view_of, found, recorded_words):
    """Without ``cpu`` lines they are slow steps, and the model of step times is fitted to them."""
    lines, seen = steps(), cpu(short)
    assert {event["kind"] for event in view_of(*lines).events.to_dicts()} == {"periodic"}
    assert {event["kind"] for event in view_of(*lines, *seen).events.to_dicts()} == {"starved"}
    model = view_of(*lines, *seen).step_time
    assert (model.steps, model.error_frac) == (40, 0)
    assert found("slow-steps", *lines, *seen) == []
    [finding] = found("interruption", *lines, *seen)
    assert (finding.cause, finding.steps) == ("starved", [*SLOW])
    assert finding.cost_ms == pytest.approx(3000, abs=0.1)
    recorded_words(finding)


def test_a_slow_host_without_processors_is_no_event_of_its_own(view_of):
    lines = steps()
    lines[25].schedule_us = 200_000
    assert "schedule" in view_of(*lines).events["part"]
    assert view_of(*lines, *cpu(short)).events["kind"].unique().to_list() == ["starved"]


def test_most_steps_without_processors_are_not_unexplained(found):
    """In 35 s of 40 a third of the steps take five times as long, and no recorded fact tells which."""
    lines, start = [], 0
    while start < 40 * SECOND:
        number = len(lines)
        first = number == 0
        is_slow = start >= 5 * SECOND and number * number % 7 in {1, 2}
        length = 500_000 if is_slow else 100_000
        arrived = [arrival("a", None, 0)] if first else []
        fields = {"got": {"a": 1}, "new": "a" if first else "", "decode_tokens": 1, "arrived": arrived}
        lines.append(step(number, start=start, took=1000, back=length - 2000, **fields))
        start += length
    threads = [(second * SECOND, max(0, second - 5) * 500_000) for second in range(42)]
    seen = [Cpu(at_us=at, threads=[ThreadTime("worker", 10, 10, at // 2, waited)]) for at, waited in threads]
    assert found("slow-steps", *lines) != []
    assert found("interruption", *lines, *seen)[0].cause == "starved"
    assert found("slow-steps", *lines, *seen) == []


def test_the_bars_say_what_the_verdict_says(run_of):
    """3,000 ms of 7,998, the last output's end."""
    [part] = [
        one
        for one in analyze_run(run_of("run", *steps(), *cpu(short))).time_split
        if one.part == "interrupted"
    ]
    assert part.time_ms == pytest.approx(3000, abs=0.1)


def test_less_than_a_fifth_is_how_a_shared_machine_is(view_of):
    view = view_of(*steps(), *cpu(lambda second: (790_000, 190_000) if second in SHORT else (970_000, 0)))
    assert view.starved.is_empty()


def test_a_window_has_what_was_lost_in_it(view_of):
    """The shares lost are those of the whole seconds, of which the window has parts."""
    cut = windowed(view_of(*steps(), *cpu(short)), Window(begin_us=3_400_000, end_us=4_600_000))
    starving = cut.events.filter(kind="starved")
    lost_us = (starving["end_us"] - starving["begin_us"]).sum()
    assert lost_us == pytest.approx(0.756 * 1_200_000, rel=0.02)
