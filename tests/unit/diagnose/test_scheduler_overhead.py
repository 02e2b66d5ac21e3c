"""``scheduler-overhead``: time that the device waited for the host."""

import polars as pl
import pytest

from schedtrace.diagnose.rules.scheduler_overhead import hidden_us
from tests.makers import arrival, step

CODE = "scheduler-overhead"


def one_after_the_other(gap, *, count=5, busy=1000, took=30, update=20, **fields):
    """Steps on one device; ``gap`` passes between an output and the end of the next ``schedule()``."""
    period = busy + gap
    given = {"took": took, "back": took + busy, "got": {"a": 1}, "running": 1, "update_us": update, **fields}
    return [step(n, start=n * period, **given) for n in range(count)]


def shares(finding):
    """Return the shares of the gaps in schedule() and update_from_output() that the message states."""
    arguments = finding.message.arguments
    return arguments["scheduling"].fraction, arguments["updating"].arguments["share"].fraction


def test_the_time_from_an_output_to_the_end_of_the_next_schedule_is_counted(found, recorded_words):
    """The first step has none before it, so 4 gaps of 100 us; the run is 4 * 1,100 + 1,050 us."""
    [finding] = found(CODE, *one_after_the_other(100))
    assert (finding.count, finding.steps) == (4, [1, 2, 3, 4])
    assert finding.evidence.gap_ms == finding.cost_ms == 0.4
    assert finding.cost_frac == 400 / 5450
    assert shares(finding) == (4 * 30 / 400, 4 * 20 / 400)
    assert finding.severity == "info"
    recorded_words(finding.message)


@pytest.mark.parametrize(("gap", "count"), [(10, 0), (11, 1)])
def test_little_of_it_is_not_worth_telling(found, gap, count):
    assert len(found(CODE, *one_after_the_other(gap, count=20))) == count


@pytest.mark.parametrize(
    "lines",
    [
        [step(n, start=n * 1000, took=30, back=1900, got={"a": 1}, running=1) for n in range(5)],
        [step(n, start=n * 5000, got={"a": 1}, num_running_before=0) for n in range(5)],
        [step(n, start=n * 100_000, got={"a": 1}, running=1, trial=n + 1) for n in range(5)],
    ],
    ids=["scheduled while the step before ran", "nobody to run", "the pause between two trials"],
)
def test_it_is_silent_about(found, lines):
    assert found(CODE, *lines) == []


def test_a_step_that_scheduled_nothing_kept_no_device_waiting(found):
    lines = one_after_the_other(100)
    lines[2] = step(2, start=2200, took=30, back=1030, running=1, update_us=20)
    [finding] = found(CODE, *lines)
    assert (finding.count, finding.steps) == (3, [1, 3, 4])


@pytest.mark.parametrize(
    ("on", "advice"),
    [
        (True, [None, None]),
        (False, ["async_scheduling", None]),
        (None, [None, None]),
    ],
)
def test_the_advice_depends_on_asynchronous_scheduling(found, on, advice, recorded_words):
    [finding] = found(CODE, *one_after_the_other(500), async_scheduling=on)
    assert [each.setting for each in finding.advice] == advice
    recorded_words(finding.advice)


def test_the_workers_own_clock_counts_where_the_trace_has_it(found):
    """The device works from 200 to 900 us of steps of 1,100 us: it waits 400 us before each but the first."""
    lines = one_after_the_other(100)
    for line in lines:
        line.execute_after_us, line.execute_us = 200, 700
    [finding] = found(CODE, *lines)
    assert finding.evidence.gap_ms == 4 * 0.4


@pytest.mark.parametrize(("in_schedule", "calls"), [(False, 39), (True, 38)])
def test_the_time_of_an_interruption_is_no_part_of_a_gap(found, in_schedule, calls):
    """The engine stands still for a second, before or in the 21st of 40 calls; each gap takes 500 us.

    All of a call that hangs is the interruption's, also the 30 us that other calls take.
    """
    lines = one_after_the_other(500, count=40)
    lines[0].arrived = [arrival("a", 0, 0)]
    for line in lines[20:]:
        line.start_us, line.output_us = line.start_us + 10**6, line.output_us + 10**6
    if in_schedule:
        lines[20].start_us, lines[20].schedule_us = lines[20].start_us - 10**6, 10**6 + 30
    [finding] = found(CODE, *lines)
    gap_us = 39 * 470 + calls * 30
    assert finding.evidence.gap_ms == gap_us / 1e3
    assert shares(finding) == (calls * 30 / gap_us, 39 * 20 / gap_us)


def test_host_work_behind_the_device_is_no_part_of_a_gap(found):
    """Asynchronous: schedule() and the update run while the device works; it waits 100 us in between."""
    work = {"took": 300, "back": 1600, "update_us": 200, "execute_after_us": 1000, "execute_us": 900}
    lines = [step(n, start=1000 * n, got={"a": 1}, running=1, **work) for n in range(6)]
    [finding] = found(CODE, *lines)
    assert finding.evidence.gap_ms == 0.5
    assert shares(finding) == (0, 0)


def test_an_update_whose_length_is_not_recorded_is_not_blamed(found, recorded_words):
    lines = one_after_the_other(100)
    for line in lines:
        line.update_us = None
    [finding] = found(CODE, *lines)
    recorded_words(finding.message)


def test_what_asynchronous_scheduling_hides_is_behind_the_devices_time_of_each_step():
    """Of the second step's 900 us only 500, as it works no longer; other work may hide or not."""
    rows = [(50, 30, 20, 1000), (900, 400, 300, 500), (200, 60, 40, 1000), (10, 5, 5, None)]
    gaps = pl.DataFrame(rows, schema=["gap_us", "in_schedule_us", "in_update_us", "busy_us"], orient="row")
    assert hidden_us(gaps) == (50 + 500 + 100, 50 + 500 + 200)
