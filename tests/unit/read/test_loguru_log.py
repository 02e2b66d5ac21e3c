import time
from pathlib import Path

import pytest

from schedtrace.model.trace_facts import Fact
from schedtrace.read.loguru_log import parse_record, read_loguru_log, records
from schedtrace.read.text_stream import text_lines

THREAD = Path(__file__).parents[3] / "examples" / "forum-thread"
PREFIX = "2025-07-28 10:25:09.{:03} | DEBUG | vllm.v1.core.sched.scheduler:schedule:562 - "


def record(budget=100, *, left=None, **got):
    """``record(a=(0, 90))``: one call in which request a had computed nothing and got 90 tokens."""
    requests = [
        {"request_id": name, "computed_tokens": computed, "scheduled_tokens": tokens}
        for name, (computed, tokens) in got.items()
    ]
    used = sum(tokens for _, tokens in got.values())
    return {
        "token_budget": budget,
        "remaining_budget": budget - used if left is None else left,
        "total_requests": len(got),
        "requests": requests,
    }


@pytest.fixture
def read(tmp_path):
    """``read(record, ...)``: the trace of these records, one ms apart; text stands as it is."""

    def call(*records):
        path = tmp_path / "some.log"
        lines = [
            text if isinstance(text, str) else PREFIX.format(at) + repr(text)
            for at, text in enumerate(records)
        ]
        path.write_text("".join(line + "\n" for line in lines))
        [trace] = read_loguru_log(path)
        return trace

    return call


def told(trace, *columns):
    return trace.steps.select(*columns).rows()


@pytest.mark.parametrize("name", ["profile_1025_bs16_in1024_out64.log", "wrapped.log"])
def test_the_threads_first_run_has_two_rounds_however_it_was_written(name):
    [trace] = read_loguru_log(THREAD / name)
    assert told(
        trace, "step", "start_us", "total_requests", "remaining_budget", "num_new", "num_continued"
    ) == [
        (0, 0, 2, 14336, 2, 0),
        (1, 313_000, 16, 2046, 14, 2),
    ]
    assert trace.problems.garbled_lines == []
    assert (trace.header.token_budget, trace.facts) == (16384, {Fact.REQUESTS})
    got = (
        trace.requests()
        .collect()
        .filter(step=1)
        .select("request_id", "computed_tokens", "scheduled_tokens", "phase")
    )
    assert got.rows()[1:3] == [("1", 1024, 1, "running"), ("2", 0, 1024, "new")]


def test_the_threads_other_run_has_one_round_of_five():
    [trace] = read_loguru_log(THREAD / "profile_1031_bs16_in1024_out64.log")
    assert told(trace, "total_requests", "token_budget", "remaining_budget") == [(5, 16384, 11298)]
    assert trace.requests().collect()["scheduled_tokens"].to_list() == [990, 1024, 1024, 1024, 1024]


def test_nothing_is_invented_for_what_the_log_does_not_tell(read):
    trace = read(record(a=(0, 10)))
    unknown = (
        "schedule_us",
        "output_us",
        "num_waiting_after",
        "num_running_after",
        "prefill_tokens",
        "num_resumed",
    )
    assert told(trace, *unknown) == [(None,) * len(unknown)]
    assert (trace.header.model, trace.header.max_num_running_reqs, trace.header.pid) == (
        "unknown",
        None,
        None,
    )
    assert (trace.header.engine_rank, trace.header.wall_anchor_us) == (0, 0)


@pytest.mark.parametrize(("repeats", "words"), [(1, "1 repeated record"), (2, "2 repeated records")])
def test_a_record_written_by_several_sinks_counts_once(read, repeats, words):
    line = PREFIX.format(7) + repr(record(a=(0, 10)))
    trace = read(record(b=(0, 5)), line, *[line] * repeats)
    assert told(trace, "step", "total_requests") == [(0, 1), (1, 1)]
    assert trace.notices == [f"{words} left out: the logger wrote the same more than once"]


@pytest.mark.parametrize(
    ("literal", "request_id"),
    [
        ("""'a", "computed_tokens": 5, "b": "c'""", """a", "computed_tokens": 5, "b": "c"""),
        (""""a', 'computed_tokens': 5, 'b': 'c\"""", "a', 'computed_tokens': 5, 'b': 'c"),
        (r"'a\nb'", r"a\nb"),
    ],
)
def test_an_id_stays_as_it_is_written(read, literal, request_id):
    trace = read(f"{{'token_budget': 10, 'requests': [{{'request_id': {literal}, 'scheduled_tokens': 7}}]}}")
    [row] = trace.requests().collect().select("request_id", "computed_tokens", "scheduled_tokens").rows()
    assert row == (request_id, None, 7)


def test_the_same_record_at_another_time_is_another_step(read):
    assert read(record(), record()).steps.height == 2


def test_records_without_a_time_repeat_only_right_after_each_other(read):
    a, b = repr(record(a=(0, 10))), repr(record(b=(0, 10)))
    trace = read(a, a, b, a)
    assert told(trace, "step", "start_us") == [(0, None), (1, None), (2, None)]


@pytest.mark.parametrize(
    ("text", "budget", "left", "requests"),
    [
        ("{'requests': [{'request_id': 'a', 'scheduled_tokens': 7}], 'token_budget': 10}", 10, 3, 1),
        ("{'requests': [{'request_id': 'a', 'scheduled_tokens': 7}], 'remaining_budget': 3}", 10, 3, 1),
        ("{'requests': [{'request_id': 'a', 'scheduled_tokens': 7}]}", None, None, 1),
        ("{'token_budget': 10, 'requests': [{'request_id': 'a'}]}", 10, None, 1),
        ("{'token_budget': 10, 'remaining_budget': 4, 'total_requests': 2}", 10, 4, 2),
    ],
)
def test_missing_keys_are_put_together_from_the_others_or_unknown(read, text, budget, left, requests):
    columns = ("token_budget", "remaining_budget", "total_requests")
    assert told(read(PREFIX.format(0) + text), *columns) == [(budget, left, requests)]


def test_records_that_do_not_list_their_requests_tell_nothing_about_them(read):
    trace = read(record(a=(0, 5)), PREFIX.format(1) + "{'token_budget': 10, 'total_requests': 2}")
    assert told(trace, "num_new") == [(1,), (None,)]
    assert trace.facts == frozenset()
    assert trace.notices == ["1 of 2 records do not list all their requests"]


@pytest.mark.parametrize("computed", [50, 1])
def test_a_request_whose_computed_tokens_go_back_is_told_and_not_new_again(read, computed):
    trace = read(record(a=(0, computed)), record(a=(computed, 1)), record(a=(0, computed)))
    assert trace.steps["num_new"].to_list() == [1, 0, 0]
    assert trace.notices[0].startswith("computed_tokens of a request went back 1 times")


def test_other_lines_and_other_dicts_between_the_records_do_no_harm(read):
    other = "INFO 07-28 10:25:09 [arg_utils.py:1] non-default args: {'model': 'x', 'seed': {'a': 1}}"
    trace = read("starting {", other, record(a=(0, 5)), "}{][", "it's", record(a=(5, 1)), "requests {")
    assert trace.steps["total_requests"].to_list() == [1, 1]
    assert trace.problems.garbled_lines == []


def test_colours_of_a_terminal_and_two_records_on_a_line_are_read(read):
    line = "\x1b[32m" + PREFIX.format(3) + "\x1b[1m" + repr(record(a=(0, 5))) + "\x1b[0m"
    assert read(line + PREFIX.format(4) + repr(record(a=(5, 1)))).steps["total_requests"].to_list() == [1, 1]


@pytest.mark.parametrize(
    "broken",
    [
        "{'token_budget': 10, 'requests': [{'request_id'",
        "{'token_budget': 'ten'}",
        "{'token_budget': -1}",
        "{'token_budget': None}",
        "{'token_budget': 99999999999999999999}",
        "{'token_budget': nan}",
        "{'token_budget': 10, 'requests': [{'scheduled_tokens': 1}]}",
        "{'token_budget': 10, 'requests': 5}",
        "{'token_budget': " + "[" * 50_000,
        "{'token_budget': " + "-" * 50_000 + "1}",
        "{'token_budget': __import__('os').getpid()}",
        "{'token_budget': '\\'" + "\\'" * 50_000,
    ],
    ids=lambda text: text[:60],
)
def test_a_broken_record_is_dropped_and_named_and_the_others_stay(read, broken):
    trace = read(record(a=(0, 5)), PREFIX.format(1) + broken, record(a=(5, 1)))
    assert trace.problems.garbled_lines == [2]
    assert trace.steps["total_requests"].to_list() == [1, 1]


def test_a_record_cut_off_at_the_end_of_the_file_is_named(read):
    assert read(record(a=(0, 5)), PREFIX.format(1) + "{", "'token_budget': 10,").problems.garbled_lines == [2]


def test_a_wrong_date_is_no_time(read):
    trace = read(record(), "2025-99-99 10:25:09.014 - " + repr(record(a=(0, 1))))
    assert trace.steps["start_us"].to_list() == [0, None]


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("{'requests': [{'request_id': 0}, ...]}", ["0"]),
        ("{'requests': [..., {'request_id': 'it\\'s'}, ], }", ["it\\'s"]),
        ('{"requests": ({"request_id": "a # b"},), "x": None, "y": True}  ', ["a # b"]),
        ("{'requests': [  # nobody\n]}", []),
    ],
)
def test_python_is_read_as_far_as_people_write_it(text, requests):
    assert [str(request.request_id) for request in parse_record(text).requests] == requests


def test_a_record_without_an_end_does_not_swallow_more_than_a_lines_length(tmp_path, monkeypatch):
    monkeypatch.setattr("schedtrace.read.loguru_log.LONGEST_LINE", 50)
    path = tmp_path / "x.log"
    path.write_text("{'token_budget': 1,\n" + "'a': 1,\n" * 20)
    assert [(line, record) for line, _, record in records(text_lines(path))] == [(1, None)]


@pytest.mark.parametrize(
    "line",
    [
        "{'token_budget': 1}",
        "{'token_budget':",
        "{ ",
        "'",
        "{'requests': '\\'",
        "[{",
        "# {",
        "2025-07-28 10:25:09 ",
    ],
)
def test_a_long_line_takes_no_more_than_its_length(tmp_path, line):
    path = tmp_path / "x.log"
    path.write_text(line * (500_000 // len(line)))
    start = time.process_time()  # a busy machine makes it no longer
    read_loguru_log(path)
    assert time.process_time() - start < 5  # in the square of its length it would be 20 and more


def test_a_line_without_end_is_read_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("schedtrace.read.text_stream.LONGEST_LINE", 1000)
    path = tmp_path / "x.log"
    path.write_text("x" * 5000 + f"{record(a=(0, 5))}\n" + PREFIX.format(0) + f"{record(a=(0, 5))}\n")
    [trace] = read_loguru_log(path)
    assert trace.steps["step"].to_list() == [0]
