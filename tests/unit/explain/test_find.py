import pytest

from schedtrace.errors import UsageError
from schedtrace.explain.request import find_request
from schedtrace.model.printable import capped, hashed
from schedtrace.read.run import read_run
from tests import makers
from tests.makers import arrival, finish, step

IDS = ["t1-1-aa", "t1-12-bb", "t1-12-bc", "t1-1", "cmpl-7"]


@pytest.fixture
def run(run_of):
    arrivals = [arrival(name, 0, 0) for name in IDS]
    return run_of(
        "r", step(0, arrived=arrivals, got={"only-scheduled": 1}, finished=[finish("only-finished")])
    )


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("t1-1", "t1-1"),
        ("t1-1-aa", "t1-1-aa"),
        ("aa", "t1-1-aa"),
        ("t1-12-bc", "t1-12-bc"),
        ("c", None),
        ("cm", "cmpl-7"),
        ("7", "cmpl-7"),
        ("only-s", "only-scheduled"),
        ("finished", "only-finished"),
    ],
)
def test_a_beginning_or_end_is_enough_if_one_request_has_it(run, text, meant):
    if meant is None:
        with pytest.raises(UsageError, match="2 requests match: t1-12-bc, cmpl-7"):
            find_request(run, text)
    else:
        assert find_request(run, text)[1] == meant


def test_a_part_up_to_a_dash_goes_before_longer_ones(run_of):
    arrivals = [arrival(name, 0, 0) for name in ("t1-1-aa", "t1-12-bb")]
    assert find_request(run_of("r", step(0, arrived=arrivals)), "t1-1")[1] == "t1-1-aa"


def test_several_are_listed(run):
    with pytest.raises(UsageError) as told:
        find_request(run, "t1-12")
    assert str(told.value) == "request t1-12: 2 requests match: t1-12-bb, t1-12-bc"


def test_many_are_listed_in_part(run_of):
    arrivals = [arrival(f"x{n}", 0, 0) for n in range(10)]
    with pytest.raises(UsageError, match=r"10 requests match: x0, .*x7 and 2 more$"):
        find_request(run_of("r", step(0, arrived=arrivals)), "x")


@pytest.mark.parametrize("text", ["nobody", ""])
def test_none_says_what_is_there(run, text):
    with pytest.raises(UsageError, match=r"no request of .*r matches; it has 7 requests, such as t1-1-aa"):
        find_request(run, text)


def test_every_engine_is_searched(tmp_path):
    for rank in (0, 1):
        folder = makers.run_folder(tmp_path / "r", step(0, got={f"r{rank}": 1}), engine_rank=rank)
    trace, found = find_request(read_run(folder), "r1")
    assert (trace.header.engine_rank, found) == (1, "r1")


@pytest.mark.parametrize("text", ["a\x1b\n", r"a\x1b\n", "a\x1b", r"a\x1b", r"\n"])
def test_an_id_is_found_as_it_is_and_as_it_is_printed(run_of, text):
    come = [arrival("a\x1b\n", 0, 0), arrival("b", 0, 0)]
    assert find_request(run_of("r", step(0, arrived=come)), text)[1] == "a\x1b\n"


def test_two_ids_never_have_to_share_a_printed_form(run_of):
    run = run_of("r", step(0, arrived=[arrival(name, 0, 0) for name in ("a\x1b", r"a\x1b")]))
    assert find_request(run, "a\x1b")[1] == "a\x1b"
    assert find_request(run, r"a\\x1b")[1] == r"a\x1b"
    with pytest.raises(UsageError, match="2 requests match"):  # as it is, or as the other is printed
        find_request(run, r"a\x1b")


def test_a_long_id_is_found_by_the_whole_of_it_by_what_is_written_and_without_vllms_suffix(run_of):
    ids = [f"{name * 1000}-1234abcd" for name in ("a", "b")]
    run = run_of("r", step(0, arrived=[arrival(capped(name), 0, 0) for name in ids]))
    for text in (ids[0], capped(ids[0]), "a" * 1000, "a" * 64):
        assert find_request(run, text)[1] == capped(ids[0])


def test_a_hashed_id_is_found_by_the_id(run_of):
    run = run_of("r", step(0, arrived=[arrival(hashed("t1-6"), 0, 0)]), hashed_ids=True)
    assert find_request(run, "t1-6")[1] == hashed("t1-6")
