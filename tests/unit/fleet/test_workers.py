"""Processes that read engines, and processes that end."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from schedtrace.fleet.workers import HereOnly, LocalProcesses, Lost, call_outcomes


def square(number):
    return number * number


def joined(*arguments):
    return arguments


def fail(number):
    msg = f"no {number}"
    raise ValueError(msg)


def die_once(argument):
    """End this process at the first call with a number; the folder remembers it."""
    folder, number = argument
    mark = Path(folder) / str(number)
    if number == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die(argument):
    if argument == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return argument


def leave_a_file(number):
    """Print a line, leave a temporary file, and end this process at the call 1."""
    print("printed", number)
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(b"left")
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return file.name


def results(pool, function, arguments):
    try:
        return {done.argument: done for done in call_outcomes(pool, function, arguments)}
    finally:
        pool.close()


def test_here_every_call_has_its_result_or_its_error():
    assert {n: done.value for n, done in results(HereOnly(), square, range(4)).items()} == {
        0: 0,
        1: 1,
        2: 4,
        3: 9,
    }
    [done] = results(HereOnly(), fail, [7]).values()
    assert isinstance(done.value, ValueError)


def test_calls_of_a_process_that_ends_are_done_again_and_none_twice(tmp_path):
    arguments = [(str(tmp_path), number) for number in range(6)]
    pool, seen = LocalProcesses(2), []
    try:
        seen += [
            (each.argument[1], each.value, each.again) for each in call_outcomes(pool, die_once, arguments)
        ]
    finally:
        pool.close()
    assert sorted(number for number, _, _ in seen) == list(range(6))
    assert all(number == value for number, value, _ in seen)
    again = {number for number, _, again in seen if again}
    assert 2 in again
    assert len(again) <= 2


def test_a_call_whose_second_process_ends_as_well_is_lost_and_the_others_are_done():
    done = results(LocalProcesses(2), die, range(5))
    assert isinstance(done[2].value, Lost)
    assert {number: each.value for number, each in done.items() if number != 2} == {0: 0, 1: 1, 3: 3, 4: 4}


def test_no_file_of_a_process_is_left_and_what_it_prints_is_no_output(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = results(LocalProcesses(1), leave_a_file, range(3))
    assert Path(done[0].value).parent.parent == tmp_path
    assert isinstance(done[1].value, Lost)
    assert list(tmp_path.iterdir()) == []
    printed = capfd.readouterr()
    assert (printed.out, "printed 0" in printed.err) == ("", True)


@pytest.mark.parametrize("arguments", [(), (3,), (3, 4)])
def test_a_call_takes_any_number_of_arguments_and_a_shared_one(arguments):
    pool = LocalProcesses(1)
    try:
        shared = pool.shared("first")
        assert pool.submit(joined, shared, *arguments).result() == ("first", *arguments)
    finally:
        pool.close()


@pytest.mark.filterwarnings("default")  # of Ray and its dependencies
def test_a_call_on_ray_whose_worker_is_killed_is_done_again(tmp_path):
    pytest.importorskip("ray", reason="needs the extra ray")
    from schedtrace.fleet.workers import RayTasks

    arguments = [(str(tmp_path), number) for number in range(4)]
    pool, seen = RayTasks(2), []
    try:
        seen += [
            (each.argument[1], each.value, each.again) for each in call_outcomes(pool, die_once, arguments)
        ]
        assert pool.submit(joined, pool.shared("first"), 3).result() == ("first", 3)
    finally:
        pool.close()
    assert sorted(seen) == [(0, 0, False), (1, 1, False), (2, 2, True), (3, 3, False)]
