"""Every moment of the engine, once."""

import polars as pl

from schedtrace.timeline.engine_states import with_engine_time
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
