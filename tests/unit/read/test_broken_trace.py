import pytest

from schedtrace.errors import ExitCode, InputError
from schedtrace.model.trace import End, Events, Exit
from schedtrace.read.problems import Problems
from schedtrace.read.trace import read_trace
from tests.makers import arrival, encoded, finish, header, step, write_trace

STEP = encoded(step(1, got={"a": 5}))
GARBAGE = {
    "bytes that are no text": b"\xff\xfe\x00\x81",
    "zeros, as after a power failure": b"\x00" * 64,
    "half a step": STEP[:40],
    "two steps run into each other": STEP[:40] + STEP,
    "no JSON at all": b"Traceback (most recent call last):",
    "a JSON list": b"[1, 2]",
    "a JSON number": b"7",
    "null": b"null",
    "an object without a type": b'{"step": 1}',
    "a line of an unknown type": b'{"type": "telemetry"}',
    "brackets without end": b"[" * 50_000,
    "an object in an object without end": b'{"a":' * 50_000,
    "a step with brackets without end": b'{"type":"step","a":' + b"[" * 50_000,
    "a notice with brackets without end": b'{"type":"notice","a":' + b"[" * 50_000,
    "a step with a text for a number": STEP.replace(b'"step":1', b'"step":"one"'),
    "a step with a text in an optional field": STEP.replace(b'"exits"', b'"num_resumed":"x","exits"'),
    "a step with null for its number": STEP.replace(b'"step":1', b'"step":null'),
    "a step whose requests are no list": STEP.replace(b'"requests":[', b'"requests":5,"x":['),
    "a step in a broken encoding": STEP.replace(b'"a"', b'"\xff"'),
    "a notice in a broken encoding": b'{"type":"notice","at_us":1,"message":"\xff"}',
    "a step without a field that it must have": STEP.replace(b'"schedule_us":100,', b""),
    "a request without a field that it must have": STEP.replace(b'"scheduled_tokens":5', b'"x":5'),
    "a finish that is null in a field that it must have": encoded(step(1, finished=[finish("a")])).replace(
        b'"prompt_tokens":100', b'"prompt_tokens":null'
    ),
    "a number of more than 64 bits": STEP.replace(b'"start_us":10000', b'"start_us":99999999999999999999'),
    "an output without its time": b'{"type":"output","step":1}',
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_a_garbled_line_is_dropped_and_named_and_the_others_stay(trace_of, garbage):
    trace = trace_of(step(0), garbage, step(2))
    assert trace.problems.garbled_lines == [3]
    assert trace.steps["step"].to_list() == [0, 2]


NOT_UNDERSTOOD = "{} not understood and dropped (line {})"


@pytest.mark.parametrize(
    ("lines", "numbers", "sentences"),
    [
        (
            [STEP[:40], step(0), b"x", b"y", step(1), STEP[:40], b"z", b""],
            [2, 4, 5, 7, 8],
            [NOT_UNDERSTOOD.format("5 lines were", "2, 4, 5, 7, 8")],
        ),
        ([b"x"] * 6, [2, 3, 4, 5, 6, 7], [NOT_UNDERSTOOD.format("6 lines were", "2, 3, 4, 5, 6, ...")]),
        (
            [step(0), b"x", step(2)],
            [3],
            [
                NOT_UNDERSTOOD.format("1 line was", "3"),
                "1 step is missing, and so is any request that arrived or ended in it",
            ],
        ),
    ],
)
def test_garbled_lines_are_counted_with_their_first_numbers_in_order(trace_of, lines, numbers, sentences):
    trace = trace_of(*lines)
    assert trace.problems.garbled_lines == numbers
    assert trace.problems.sentences(trace.path) == [f"{trace.path}: {said}" for said in sentences]


def test_a_line_has_the_same_fate_whatever_else_is_in_the_trace(trace_of):
    newer = step(0, got={"a": 1}, waiting=1, ended=Exit("waiting", "break", "disk_blocks"))
    for more in ([], [STEP[:40]], [STEP.replace(b'"start_us":10000', b'"start_us":99999999999999999999')]):
        trace = trace_of(newer, *more)
        assert trace.exits().collect()["cause"].to_list() == ["disk_blocks"]
        assert trace.problems.garbled_lines == [3] * len(more)


def test_lines_that_only_polars_refuses_are_found_among_many(trace_of):
    lines = [encoded(step(at, start=7)) for at in range(40)]
    for at in (0, 17, 18, 39):
        lines[at] = lines[at].replace(b'"start_us":7', b'"start_us":99999999999999999999')
    trace = trace_of(*lines)
    assert trace.problems.garbled_lines == [2, 19, 20, 41]
    assert trace.steps["step"].to_list() == [at for at in range(40) if at not in {0, 17, 18, 39}]
    nothing_else = trace_of(lines[0], lines[17])
    assert (nothing_else.steps.height, nothing_else.problems.garbled_lines) == (0, [2, 3])


UNCLOSED = "not closed, the engine was killed or still runs; up to one second before the end may be missing"


@pytest.mark.parametrize("tail", [b"", STEP[:60], STEP])
def test_what_stands_behind_the_last_newline_is_dropped_and_a_trace_without_an_end_unclosed(trace_of, tail):
    trace = trace_of(step(0), closed=False, tail=tail)
    assert trace.steps["step"].to_list() == [0]
    assert trace.problems == Problems(unclosed=True, truncated=bool(tail))
    said = ["the last line is cut off and was dropped"] if tail else []
    assert trace.problems.sentences(trace.path) == [f"{trace.path}: {one}" for one in (*said, UNCLOSED)]


def test_an_unclosed_trace_counts_the_requests_whose_end_is_missing(trace_of):
    lines = [step(0, arrived=[arrival("a", 0), arrival("b", 1)]), step(1, finished=[finish("a")])]
    more = Events(at_us=9, arrived=[arrival("c", 5), arrival("c", 6, streaming_update=True)])
    assert trace_of(*lines, more, closed=False).problems.unfinished_requests == 2
    assert trace_of(*lines, more).problems.unfinished_requests == 0


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        ([step(0), step(3), step(4)], 2),
        ([step(1), step(2)], 1),
        ([step(0), step(1), End(at_us=0, steps=5, dropped_steps=3)], 3),
        ([step(0), step(1), End(at_us=0, steps=2)], 0),
        ([End(at_us=0, steps=5)], 5),
        ([], 0),
    ],
)
def test_steps_that_the_numbering_or_the_end_line_tells_of_are_counted_as_missing(trace_of, lines, missing):
    trace = trace_of(*lines, closed=False)
    assert trace.problems.missing_steps == missing


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"hello\nworld\n", ":1: not a schedtrace trace"),
        (STEP + b"\n", ":1: not a schedtrace trace"),
        (b"[1]\n", ":1: not a schedtrace trace"),
        (b"\xff\xfe\n", ":1: not a schedtrace trace"),
        (encoded(header()).replace(b'"box"', b'"\xff"') + b"\n", ":1: not a schedtrace trace"),
        (encoded(header()), ":1: cut off in its first line"),
        (b'{"type":"header","schema_version":1}\n', ":1: broken header"),
        (b'{"type":"header","x":' + b"[" * 50_000 + b"\n", ":1: not a schedtrace trace"),
        (b'{"a":' * 50_000 + b"\n", ":1: not a schedtrace trace"),
        (encoded(header()).replace(b'"pid":1', b'"pid":"x"') + b"\n", "$.pid"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_place(tmp_path, content, says):
    path = tmp_path / "engine-0.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_trace(path)
    assert str(refused.value).startswith(str(path))
    assert says in str(refused.value)
    assert refused.value.exit_code is ExitCode.INPUT


def test_a_newer_schema_is_refused_with_both_versions_and_what_to_do(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", header(schema_version=5, schedtrace_version="9.0"))
    with pytest.raises(InputError, match=r":1: schema version 5.*schedtrace 9\.0.*up to 4: upgrade"):
        read_trace(path)


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"gone\.jsonl: cannot be read \(No such file"):
        read_trace(tmp_path / "gone.jsonl")


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([(0, 0), (1, 900), (2, 200), (3, 1000)], [0, 1, 3]),  # a time that goes back
        ([(0, 0), (2, 200), (1, 900), (3, 1000)], [0, 2, 3]),  # the same, not in the order of the numbers
        ([(0, 0), (2, 200), (1, 100), (3, 300)], [0, 1, 2, 3]),
        ([(0, 0), (1, 100), (1, 150), (2, 200)], [0, 1, 2]),  # a number that comes again
        ([(0, 0), (1, 100), (2, 100)], [0, 1, 2]),
        ([(2, 200), (1, 201), (0, 199), (1, 199)], [0, 1, 2]),
    ],
)
def test_a_step_is_dropped_that_comes_again_or_contradicts_the_time_of_those_beside_it(trace_of, steps, kept):
    trace = trace_of(*(step(number, start=start, got={"a": 1}) for number, start in steps))
    assert trace.steps["step"].to_list() == kept
    assert trace.steps["start_us"].is_sorted()
    assert trace.requests().collect()["step"].to_list() == kept
    dropped = [number for number, _ in steps]
    for number in kept:
        dropped.remove(number)
    assert trace.problems.refused == dropped
    if dropped:
        said = trace.problems.sentences(trace.path)[-1]
        assert said == (
            f"{trace.path}: 1 step ({dropped[0]}) dropped: the number had come before, or the step began "
            "before the one in front of it"
        )


def test_a_step_that_is_dropped_for_its_time_is_not_also_missing(trace_of):
    trace = trace_of(step(0, start=10), step(1, start=5), step(2, start=20))
    assert (trace.problems.refused, trace.problems.missing_steps) == ([1], 0)


def test_requests_of_steps_that_the_recorder_dropped_are_there_and_the_steps_are_told(trace_of):
    dropped = Events(at_us=20_000, arrived=[arrival("b", 11_000)], finished=[finish("a")], dropped_steps=2)
    trace = trace_of(step(0, arrived=[arrival("a", 0)]), dropped, step(3))
    assert trace.arrivals["request_id"].to_list() == ["a", "b"]
    assert (trace.problems.missing_steps, trace.problems.requests_missing) == (2, False)
    lacks = (
        "2 steps are missing, the disk was too slow; requests that arrived or ended meanwhile are recorded"
    )
    assert trace.problems.sentences(trace.path) == [f"{trace.path}: {lacks}, what they were given is not"]


def test_requests_that_are_missing_are_told(trace_of):
    dropped = Events(at_us=20_000, dropped_steps=2, dropped_arrivals=3, dropped_finishes=1)
    trace = trace_of(step(0), dropped, step(3), step(5, finished=[finish("z")]))
    assert trace.problems.requests_missing
    assert trace.problems.sentences(trace.path)[1:] == [
        f"{trace.path}: 1 step is missing, and so is any request that arrived or ended in it",
        f"{trace.path}: the arrival of at least 3 requests is missing",
        f"{trace.path}: the end of at least 1 request is missing",
    ]


def test_a_request_that_ended_without_having_arrived_is_told_where_steps_are_missing(trace_of):
    trace = trace_of(step(0), step(2, finished=[finish("z"), finish("y")]))
    assert trace.problems.sentences(trace.path)[1:] == [
        f"{trace.path}: the arrival of at least 2 requests is missing"
    ]


def test_a_file_that_begins_later_lacks_no_step_of_its_own(trace_of):
    trace = trace_of(step(7), step(8), End(at_us=1, steps=9), first_step=7, closed=False)
    assert (trace.problems.missing_steps, trace.problems.requests_missing) == (0, True)
    assert trace.problems.sentences(trace.path) == [
        f"{trace.path}: begins at step 7 (2023-11-14 22:13:20 UTC); requests that ended before are not in it"
    ]


@pytest.mark.parametrize(
    "times", [{"wall_anchor_us": -1}, {"wall_anchor_us": 10**16}, {"monotonic_anchor_us": -1}]
)
def test_a_header_with_a_time_that_no_clock_has_is_refused(trace_of, times):
    with pytest.raises(InputError, match="broken header"):
        trace_of(step(0), **times)


@pytest.mark.parametrize("start_us", [-(10**15), 10**15])
def test_a_time_far_from_the_begin_of_the_trace_is_no_time(trace_of, start_us):
    trace = trace_of(step(0, start=0), step(1, start=start_us), step(2, start=5))
    assert trace.steps["step"].to_list() == [0, 2]
    assert trace.problems.garbled_lines == [3]
