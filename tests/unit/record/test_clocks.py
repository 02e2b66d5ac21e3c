"""Where a trace's clock stands among others, with clocks and kernels by hand."""

import ctypes
import time
from types import SimpleNamespace

import pytest

from schedtrace.record import clocks

READINGS = [(0, 9_000), (10_000, 10_500), (20_000, 20_100), (30_000, 33_000), (40_000, 47_000)]
"""Of the monotonic clock, before and after each of the wall clock."""


def test_an_anchor_is_of_the_reading_that_was_interrupted_least(monkeypatch):
    ticks = iter([ns for pair in READINGS for ns in pair])
    walls = iter(range(1_000_000_000, 6_000_000_000, 1_000_000_000))
    monkeypatch.setattr(clocks.time, "monotonic_ns", lambda: next(ticks))
    monkeypatch.setattr(clocks.time, "time_ns", lambda: next(walls))
    assert clocks.read_anchor() == clocks.Anchor(ns=20_050, wall_us=3_000_000, uncertainty_us=1)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A boot id, a time namespace, and what the kernel says of its wall clock."""
    boot, namespace = tmp_path / "boot_id", tmp_path / "time"
    boot.write_text("b33f\n")
    namespace.symlink_to("time:[1]")
    monkeypatch.setattr(clocks, "_BOOT_ID", boot)
    monkeypatch.setattr(clocks, "_TIME_NAMESPACE", namespace)
    kernel = SimpleNamespace(answer=0, maxerror=1500, status=0)

    def adjtimex(reference):
        state = reference._obj
        state.maxerror, state.status = kernel.maxerror, kernel.status
        return kernel.answer

    monkeypatch.setattr(clocks.ctypes, "CDLL", lambda _: SimpleNamespace(adjtimex=adjtimex))
    return SimpleNamespace(boot=boot, namespace=namespace, kernel=kernel)


@pytest.mark.usefixtures("machine")
def test_the_header_says_where_the_clock_stands():
    found = clocks.facts(clocks.Anchor(ns=5_000_999, wall_us=7, uncertainty_us=2))
    assert found.pop("clock_id") == clocks.clock_id()
    assert found == {"monotonic_anchor_us": 5_000, "wall_uncertainty_us": 2, "wall_max_error_us": 1500}


def test_the_clock_is_another_after_a_boot_and_in_another_time_namespace(machine):
    seen = {clocks.clock_id()}
    machine.boot.write_text("cafe\n")
    seen.add(clocks.clock_id())
    machine.namespace.unlink()
    machine.namespace.symlink_to("time:[2]")
    seen.add(clocks.clock_id())
    machine.namespace.unlink()
    seen.add(clocks.clock_id())
    assert len(seen) == 4
    assert all(len(one) == 12 for one in seen)
    machine.boot.unlink()
    assert clocks.clock_id() is None


def test_a_wall_clock_that_nobody_disciplines_has_no_known_error(machine):
    assert clocks.wall_max_error_us() == 1500
    machine.kernel.status = 0x40
    assert clocks.wall_max_error_us() is None
    machine.kernel.status, machine.kernel.answer = 0, -1
    assert clocks.wall_max_error_us() is None


def test_a_system_without_adjtimex_tells_no_error(monkeypatch):
    monkeypatch.setattr(clocks.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert clocks.wall_max_error_us() is None


def test_the_kernels_structure_is_long_enough():
    assert ctypes.sizeof(clocks._Timex) > 208  # of Linux on 64 bits


def test_virtual_time_has_no_place_among_the_machines_clocks(monkeypatch):
    monkeypatch.setattr(clocks, "time", SimpleNamespace(virtual=True, monotonic_ns=time.monotonic_ns))
    assert clocks.facts(clocks.Anchor(0, 0, 0)) == {}
