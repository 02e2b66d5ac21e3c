"""Two traces on one clock."""

import msgspec

from schedtrace.timeline.engine_ranks import offset
from tests.makers import header

PLAIN = header(host="a", wall_anchor_us=1_000, wall_uncertainty_us=2, wall_max_error_us=300)
ON_LINUX = msgspec.structs.replace(PLAIN, monotonic_anchor_us=50, clock_id="x")


def other(of, **fields):
    return msgspec.structs.replace(of, **{"wall_anchor_us": 1_700, **fields})


def test_one_machines_processes_are_lined_up_exactly():
    assert offset(other(ON_LINUX, monotonic_anchor_us=80), ON_LINUX) == (30, 0)
    assert offset(ON_LINUX, other(ON_LINUX, monotonic_anchor_us=80)) == (-30, 0)


def test_after_a_boot_the_wall_clock_counts():
    assert offset(other(ON_LINUX, monotonic_anchor_us=9, clock_id="y"), ON_LINUX) == (700, 4)


def test_between_hosts_ntps_error_counts_as_well():
    assert offset(other(PLAIN, host="b"), PLAIN) == (700, 604)
    assert offset(other(PLAIN, host="b", wall_max_error_us=None), PLAIN) == (700, None)


def test_a_trace_that_does_not_tell_leaves_it_open():
    assert offset(other(PLAIN, wall_uncertainty_us=None), PLAIN) == (700, None)
