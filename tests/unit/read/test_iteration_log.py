from pathlib import Path

import pytest

from schedtrace.errors import InputError
from schedtrace.read.iteration_log import read_iteration_log

DATA = Path(__file__).parent / "data"
LINE = (
    "Iteration({}): 1 context requests, 512 context tokens, 3 generation requests, 3 generation tokens, "
    "iteration elapsed time: 12.34 ms"
)


@pytest.fixture
def read(tmp_path):
    def call(*lines):
        path = tmp_path / "vllm.log"
        path.write_text("".join(line + "\n" for line in lines))
        return read_iteration_log(path)

    return call


def told(trace, *columns):
    return trace.steps.select(*columns).rows()


def test_the_lines_of_a_real_engine_of_today_are_read():
    [trace] = read_iteration_log(DATA / "iteration-details.log")
    columns = (
        "step",
        "total_requests",
        "prefill_tokens",
        "decode_tokens",
        "elapsed_us",
        "kv_cache_usage_frac",
    )
    assert told(trace, *columns)[:3] == [
        (0, 1, 300, 0, 18_700, 0.012),
        (1, 6, 1500, 1, 16_700, pytest.approx(0.071)),
        (2, 6, 0, 6, 1_200, pytest.approx(0.071)),
    ]
    assert (trace.header.vllm_version, trace.header.model) == ("0.32.0", "examples/tiny-qwen3")
    assert (trace.steps.height, trace.notices, trace.facts) == (6, [], frozenset())


def test_the_lines_of_older_engines_are_read_engine_by_engine():
    traces = read_iteration_log(DATA / "iteration-details-0.19.log")
    assert [trace.header.engine_rank for trace in traces] == [0, 1]
    assert told(traces[0], "step", "total_requests", "prefill_tokens") == [
        (0, 1, 512),
        (1, 4, 1536),
        (2, 4, 0),
    ]
    assert told(traces[1], "step", "total_requests", "dummy_batches") == [(0, 2, 1)]
    assert traces[0].notices == ["engine 0: 1 iterations are missing, by their numbers"]
    assert traces[1].notices == []
    assert traces[0].problems is not traces[1].problems  # said once


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("", 0),
        ("INFO 11-20 12:00:00 [core.py:123] ", 0),
        ("(EngineCore_DP3 pid=7) INFO 11-20 12:00:00 [core.py:123] ", 3),
        ("(APIServer pid=7) \x1b[32mINFO\x1b[0m 11-20 12:00:00 [v1/metrics/loggers.py:199] Engine 012: ", 12),
        ("2026-11-20T12:00:00Z pod-1 (EngineCore_DP1 pid=7) INFO 11-20 12:00:00 Engine 002: ", 2),
        ("\xe9\u2028 ", 0),
    ],
)
def test_any_prefix_is_read_and_names_the_engine(read, prefix, rank):
    [trace] = read(prefix + LINE.format(5))
    assert (trace.header.engine_rank, told(trace, "step", "total_requests")) == (rank, [(0, 4)])


@pytest.mark.parametrize(
    ("suffix", "usage"),
    [
        ("", None),
        (", GPU KV cache usage: 45.5%", 0.455),
        (", CPU KV cache usage: 0.0%, encoder inputs: 2, encoder output embeddings: 1200", 0.0),
    ],
)
def test_what_newer_versions_add_is_read(read, suffix, usage):
    [trace] = read(LINE.format(0) + suffix)
    assert told(trace, "kv_cache_usage_frac", "elapsed_us") == [(usage, 12_340)]


def test_dummy_batches_are_no_steps_and_count_with_the_next_one(read):
    [trace] = read(
        LINE.format(0),
        LINE.format(1) + " (dummy)",
        LINE.format(2) + " (dummy), GPU KV cache usage: 1.0%",
        LINE.format(3),
    )
    assert told(trace, "step", "dummy_batches") == [(0, 0), (1, 2)]
    assert trace.notices == []


def test_numbers_that_start_again_are_told(read):
    [trace] = read(LINE.format(7), LINE.format(8), LINE.format(0), LINE.format(1))
    assert trace.steps["step"].to_list() == [0, 1, 2, 3]
    [said] = trace.notices
    assert said.startswith("iterations are numbered from the start again 1 times")


@pytest.mark.parametrize(
    "broken",
    [
        LINE.format(1)[:40],
        LINE.format(1).replace("512", "-1"),
        LINE.format(1).replace("12.34", "nan"),
        LINE.format(1).replace("512", "9" * 15),
        LINE.format("9" * 40),
    ],
)
def test_a_broken_line_is_dropped_and_named(read, broken):
    [trace] = read(LINE.format(0), broken)
    assert (trace.problems.garbled_lines, trace.steps.height) == ([2], 1)


def test_a_log_with_nothing_but_broken_lines_is_refused(read):
    with pytest.raises(
        InputError, match=r"vllm\.log: none of its Iteration\(N\) lines can be read \(line 1\)"
    ):
        read(LINE.format(0).replace("512", "9" * 15))


def stamped(index, second, elapsed="12.50"):
    line = LINE.format(index).replace("12.34", elapsed)
    return f"(EngineCore_DP0 pid=1) INFO 11-20 12:00:{second:02} [core.py:312] {line}"


def test_the_times_of_the_lines_say_how_much_time_passed(read):
    lines = [stamped(index, index // 2) for index in range(41)]
    assert read(*lines)[0].notices == [
        (
            "40 iterations within 20 s by the times of their lines, one per 500.0 ms; "
            "their elapsed times add up to 0.5 s"
        ),
    ]


def test_the_times_of_the_lines_say_nothing_of_gaps_starts_and_short_logs(read):
    lines = [stamped(index, index // 2) for index in range(41)]
    assert read(*lines[:19])[0].notices == []
    for others in (lines[:20] + lines[21:], [*lines, stamped(0, 21)]):
        assert not any("by the times" in notice for notice in read(*others)[0].notices)
