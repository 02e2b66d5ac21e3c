"""Workload files to loads: every value of the examples, every way in which a row can be wrong."""

import json
import os
import time
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from schedtrace.errors import InputError, UsageError
from schedtrace.model.message import plain
from schedtrace.workloads import open_workload, workload_files

EXAMPLES = Path(__file__).parents[3] / "examples" / "workloads"


def said(load):
    return [plain(note) for note in load.notes]


def rows(workload):
    return [
        (one.request_id, one.arrived_us, one.prompt_tokens, one.output_tokens, one.prefix) for one in workload
    ]


NO_PREFIX = "Which prompts begin alike is not in the file: no prefix is shared."


def test_mooncake_has_milliseconds_and_blocks_of_512_tokens():
    load = open_workload(EXAMPLES / "mooncake.jsonl")
    assert rows(load) == [
        ("r0", 0.0, 1300, 20, (0, 1, 2)),
        ("r1", 0.0, 1100, 35, (0, 1, 3)),
        ("r2", 150_000.0, 600, 4, (0, 4)),
        ("r3", 3_000_000.0, 1024, 12, (0, 1)),
        ("r4", 3_000_000.0, 90, 50, (5,)),
    ]
    assert (load.name, load.source, load.prefix_block) == ("mooncake.jsonl", "mooncake", 512)
    note = (
        "Timestamps are read as milliseconds (--time-unit). Ids are read as those of blocks of 512 tokens, "
        "which fits 5 of 5 rows (--prefix-block)."
    )
    assert said(load) == [note]
    assert (len(load), load.prompt_tokens, load.output_tokens, load.last_arrival_us) == (5, 4114, 121, 3e6)


def test_bailian_has_seconds_and_blocks_of_16_tokens():
    load = open_workload(EXAMPLES / "bailian.jsonl")
    assert rows(load) == [
        ("r0", 0.0, 40, 20, (7, 8, 9)),
        ("r1", 250_000.0, 33, 8, (7, 8, 10)),
        ("r2", 1_500_000.0, 16, 5, (11,)),
        ("r3", 3_625_000.0, 70, 30, (7, 8, 12, 13, 14)),
        ("r4", 3_625_000.0, 20, 2, (15, 16)),
    ]
    assert (load.source, load.prefix_block) == ("bailian", 16)


def test_azure_times_are_dates_with_or_without_a_zone():
    of_2023, of_2024 = (open_workload(EXAMPLES / f"azure-{year}.csv") for year in (2023, 2024))
    assert rows(of_2023) == [
        ("r0", 0.0, 480, 10, ()),
        ("r1", 25_000.0, 318, 8, ()),
        ("r2", 178_149.0, 110, 27, ()),
        ("r3", 200_000.0, 743, 14, ()),
        ("r4", 1_500_000.0, 34, 12, ()),
    ]
    assert [one.arrived_us for one in of_2024] == [0.0, 7_405.0, 990_070.0, 1_490_070.0, 3_240_070.0]
    assert (of_2023.source, of_2023.prefix_block, said(of_2023)) == ("azure", None, [NO_PREFIX])


def test_azure_times_without_a_zone_do_not_depend_on_the_machines(file, monkeypatch):
    path = file("x.csv", HEADER + "2024-01-01 00:00:00,1,1\n2024-01-01 00:00:01+00:00,1,1\n")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert [one.arrived_us for one in open_workload(path)] == [0.0, 1e6]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_burstgpt_leaves_out_requests_that_failed():
    load = open_workload(EXAMPLES / "burstgpt.csv")
    assert rows(load) == [
        ("r0", 0.0, 472, 18, ()),
        ("r1", 40e6, 108, 230, ()),
        ("r2", 113e6, 417, 276, ()),
        ("r3", 115e6, 64, 12, ()),
    ]
    assert said(load) == ["1 row without output tokens left out.", NO_PREFIX]


def test_newer_burstgpt_files_have_further_columns(file):
    content = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5.5,17,1.25,GPT-4,472.0,18,490,API log\n"
    )
    [request] = open_workload(file("x.csv", content))
    assert (request.prompt_tokens, request.output_tokens) == (472, 18)


AT_ONCE = (
    "All requests arrive at once. A front end hands them over one by one, so an engine's first steps may see "
    "fewer."
)
NO_ANSWER = "1 conversation without a question and an answer left out."
ESTIMATED = "Lengths of texts are estimates: 4 characters a token."


def test_sharegpt_is_measured_by_a_tokenizer_or_estimated():
    path = EXAMPLES / "sharegpt.json"
    estimated = open_workload(path)
    assert [(one.prompt_tokens, one.output_tokens) for one in estimated] == [(5, 10), (3, 3), (5, 2), (6, 5)]
    assert said(estimated) == [NO_ANSWER, ESTIMATED, NO_PREFIX, AT_ONCE]
    measured = open_workload(path, count_tokens=lambda text: len(text.split()), prequeue=True)
    assert [(one.prompt_tokens, one.output_tokens) for one in measured] == [(4, 8), (2, 2), (3, 1), (4, 10)]
    assert said(measured) == [NO_ANSWER, NO_PREFIX]


def test_sharegpt_is_read_in_chunks_of_any_size(monkeypatch):
    whole = rows(open_workload(EXAMPLES / "sharegpt.json"))
    monkeypatch.setattr("schedtrace.workloads.rows.CHUNK_BYTES", 1)
    assert rows(open_workload(EXAMPLES / "sharegpt.json")) == whole


def test_own_rows_keep_their_priority():
    load = open_workload(EXAMPLES / "own.jsonl")
    found = [(one.prompt_tokens, one.output_tokens, one.priority) for one in load]
    assert found == [(5, 12, 0), (400, 30, 1), (20, 5, 0), (5, 2, 0), (64, 8, 0)]
    assert said(load) == [ESTIMATED, NO_PREFIX, AT_ONCE]


def test_own_rows_may_name_the_rank_that_gets_them(file):
    path = file("x.jsonl", '{"input_len": 3, "data_parallel_rank": 1}\n{"input_len": 4}\n')
    assert [one.data_parallel_rank for one in open_workload(path, output_len=7)] == [1, None]


def test_the_output_length_can_be_given(file):
    path = file("x.jsonl", '{"input_len": 3}\n')
    assert [one.output_tokens for one in open_workload(path, output_len=7)] == [7]
    assert [one.output_tokens for one in open_workload(EXAMPLES / "burstgpt.csv", output_len=7)] == [7] * 4


def test_a_load_can_be_iterated_again():
    load = open_workload(EXAMPLES / "mooncake.jsonl")
    assert list(load) == list(load)


def test_the_first_prompts_are_taken_and_the_rest_not_even_read(file):
    content = (EXAMPLES / "burstgpt.csv").read_text() + "garbage\n"
    load = open_workload(file("x.csv", content), num_prompts=2)
    assert ([one.prompt_tokens for one in load], load.last_arrival_us) == ([472, 108], 40e6)
    assert said(load) == [NO_PREFIX]  # the failed request comes later


def test_only_a_file_without_times_is_repeated():
    timed = open_workload(EXAMPLES / "azure-2023.csv", num_prompts=7)
    assert len(timed) == 5
    assert said(timed)[0] == "The file has 5 usable requests, not the 7 requests asked for."
    untimed = open_workload(EXAMPLES / "own.jsonl", num_prompts=7)
    assert [one.prompt_tokens for one in untimed] == [5, 400, 20, 5, 64, 5, 400]
    assert [one.request_id for one in untimed] == [f"r{number}" for number in range(7)]


def test_a_rate_draws_the_times_that_run_draws():
    load = open_workload(EXAMPLES / "mooncake.jsonl", rate=4.0, burstiness=0.5, seed=3)
    gaps = np.random.default_rng(3).gamma(0.5, 1 / (4.0 * 0.5), size=4)
    assert [one.arrived_us for one in load] == [at * 1e6 for at in [0.0, *np.cumsum(gaps)]]
    assert [one.prompt_tokens for one in load] == [1300, 1100, 600, 1024, 90]


def test_gaps_can_be_shortened_or_dropped():
    path = EXAMPLES / "mooncake.jsonl"
    assert [one.arrived_us for one in open_workload(path, speedup=2)] == [0.0, 0.0, 75e3, 1.5e6, 1.5e6]
    assert {one.arrived_us for one in open_workload(path, prequeue=True)} == {0.0}


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_rows_out_of_order_are_sorted(file):
    path = file(
        "x.csv", HEADER + "2024-01-01 00:00:02,2,1\n2024-01-01 00:00:03,3,1\n2024-01-01 00:00:01,1,1\n"
    )
    load = open_workload(path)
    assert [(one.arrived_us, one.prompt_tokens) for one in load] == [(0.0, 1), (1e6, 2), (2e6, 3)]
    assert said(load) == ["Rows were not in order of time, and were sorted.", NO_PREFIX]
    drawn = open_workload(path, rate=1.0)
    assert ([one.prompt_tokens for one in drawn], said(drawn)) == ([2, 3, 1], [NO_PREFIX])


def test_more_than_fit_are_not_sorted(file, monkeypatch):
    monkeypatch.setattr(workload_files, "MOST_SORTED", 2)
    path = file(
        "x.csv", HEADER + "2024-01-01 00:00:02,2,1\n2024-01-01 00:00:01,3,1\n2024-01-01 00:00:03,1,1\n"
    )
    with pytest.raises(
        InputError, match=r"x\.csv:3: earlier than the row before it, and more than 2 requests"
    ):
        open_workload(path)


def test_images_of_the_multimodal_trace_are_said_to_be_left_out(file):
    content = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00.1,2,900,30\n"
    load = open_workload(file("x.csv", content))
    assert said(load) == [NO_PREFIX, "Images are left out: requests have the tokens of their texts only."]


def test_odd_block_ids_are_said(file):
    lines = [
        {"timestamp": 0, "input_length": 655, "output_length": 1, "hash_ids": [*range(20)]},
        {"timestamp": 0, "input_length": 655, "output_length": 1},
        {"timestamp": 0, "input_length": 0, "output_length": 1},
    ]
    path = file("x.jsonl", "\n".join(map(json.dumps, lines)))
    with pytest.raises(UsageError, match=r"hash_ids have no id for each block .* give --prefix-block TOKENS"):
        open_workload(path)
    load = open_workload(path, prefix_block=512)
    assert [one.prefix for one in load] == [(0, 1), ()]
    assert said(load) == [
        "1 row without prompt tokens left out.",
        "2 rows without block ids: they share no prefix.",
        "1 row with more block ids than the prompt has blocks: the last ids were ignored.",
    ]


MOONCAKE = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n'
AZURE = HEADER + "2023-11-16 18:17:03.9,480,10\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Log\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (MOONCAKE + "\n{", r"x:3: .*truncated"),
        (MOONCAKE + '{"timestamp": 0, "input_length": 1}\n', r"x:2: .*output_length"),
        (MOONCAKE + MOONCAKE.replace(" 0,", ' "0",'), r"x:2: Expected `float`.*timestamp"),
        (MOONCAKE + MOONCAKE.replace(" 0,", " -1,"), r"x:2: .*timestamp"),
        (MOONCAKE.replace(" 1,", " -1,"), r"x:1: input_length -1.0 is not a number of tokens"),
        (MOONCAKE.replace(" 1,", " 1.5,"), r"x:1: .*input_length"),
        (MOONCAKE.replace("[1]", "[-1]"), r"x:1: .*hash_ids"),
        (MOONCAKE + AZURE, "x:2: "),
        (AZURE + "yesterday,1,1\n", "x:3: TIMESTAMP 'yesterday' is not a date with a time"),
        (AZURE + "2023-11-16 18:17:04,1.5,1\n", "x:3: ContextTokens '1.5' is not a number of tokens"),
        (AZURE + "2023-11-16 18:17:04,1,-1\n", "x:3: GeneratedTokens '-1' is not"),
        (AZURE + "2023-11-16 18:17:04,1,inf\n", "x:3: GeneratedTokens 'inf' is not"),
        (AZURE + "\n2023-11-16 18:17:04,1\n", "x:4: 2 cells, but the header has 3"),
        (AZURE.encode() + b"2023-11-16,\xff,1\n", "x:3: .*utf-8"),
        (BURST + "noon,ChatGPT,1,1,2,Log\n", "x:3: Timestamp 'noon' is not a number of seconds"),
        (BURST + "nan,ChatGPT,1,1,2,Log\n", "x:3: Timestamp 'nan' is not"),
        (BURST + "6,ChatGPT,,1,2,Log\n", "x:3: Request tokens '' is not"),
        ('{"input_len": 3}\n', "x:1: no output_len or output_tokens: add it, or give --output-len"),
        ('{"input_len": 3, "prompt": "a", "output_len": 1}\n', "x:1: give either prompt"),
        (
            '[{"conversations": [{"value": "a"}, {"value": "b"}]}, 5]',
            r"not a ShareGPT file.* \(conversation 2: ",
        ),
        ('[{"conversations": [{"value": "a"}, {"value": "b"}]}', r"not a ShareGPT file.* \(conversation 2: "),
        ("", "x: empty; expected Mooncake"),
        ("\n \n", "x: empty; expected Mooncake"),
        ("{}", "x: looks like JSON of another program; expected Mooncake"),
        ("5", "x: unknown format; expected Mooncake"),
        (b"\xff\xfe", "x: unknown format; expected Mooncake"),
        (
            "a,b,c\n1,2,3\n",
            "x: unknown format; expected Mooncake or Qwen-Bailian .* Azure .* BurstGPT .* ShareGPT",
        ),
        ('{"model": "x"}', "x: looks like JSON of another program; expected Mooncake"),
        ('{"type": "header", "schema_version": 2}', "x: looks like a trace of schedtrace: replay it with"),
        (HEADER, "x: no usable request in it"),
        (BURST.replace(",18,", ",0,"), "x: no usable request in it"),
        ("[]", "x: no usable request in it"),
        ('{"input_len": 5.5, "output_len": 3}', r"x:1: input_len 5\.5 is not a number of tokens"),
        (
            '{"input_len": 5, "output_len": 3}\n{"input_len": 5, "output_tokens": 2.5}',
            "x:2: output_tokens 2.5 is",
        ),
        (
            '{\n"input_len": 5, "output_len": 3}\n{\n"input_len": -5,\n"output_len": 3}',
            "x:3: input_len -5.0 is not",
        ),
        (
            '[{"input_len": 5, "output_len": 3},\n\n{"input_len": 0, "output_len": 3}]',
            "x:3: input_len 0: a length",
        ),
        ('[{"input_len": 5, "output_len": 3},\n{"input_len": 5', "x:2: "),
        ('{\n  "input_len": 5,\n', "x:1: "),
        (
            '{"timestamp": 0, "input_length": 16.5, "output_length": 4}',
            "x:1: input_length 16.5 is not a number",
        ),
        ('{"timestamp": 1e999, "input_length": 16, "output_length": 4}', "x:1: "),
        (
            '{"messages": [{"role": "user", "content": "a"}]}\n',
            "x:1: no output_len or output_tokens: add it, or give --output-len",
        ),
        (
            '[{"messages": [{"role": "user", "content": "a"}]}]',
            "x:1: no output_len or output_tokens: add it, or give --output-len",
        ),
        (
            '{\n "load_summary": {},\n "successes": {}\n}',
            "x: looks like a result of inference-perf: it has no requests",
        ),
        (b"\x1f\x8b\x08\x00", "x: looks like a compressed file: unpack it first"),
        (
            "INFO 11-25 12:27:00 [a.py:9] Started\n",
            "x: looks like vLLM's log without iteration lines: it has no requests",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n\n", "x: no usable request in it"),
        (AZURE + "2023-11-16,1,1\n", "x:3: TIMESTAMP '2023-11-16' is not a date with a time"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_line(file, content, says):
    with pytest.raises(InputError, match=says):
        open_workload(file("x", content))


def test_a_mark_at_the_beginning_and_windows_line_ends_are_read(file):
    path = file("x.csv", b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode())
    assert [one.output_tokens for one in open_workload(path)] == [10]


@pytest.mark.parametrize(
    "options",
    [{"rate": 1.0, "prequeue": True}, {"rate": 1.0, "speedup": 2.0}, {"speedup": 2.0, "prequeue": True}],
)
def test_options_that_exclude_each_other_are_refused(options):
    with pytest.raises(UsageError, match="exclude each other"):
        open_workload(EXAMPLES / "mooncake.jsonl", **options)


def test_a_speedup_needs_times():
    with pytest.raises(UsageError, match="a speedup needs arrival times"):
        open_workload(EXAMPLES / "own.jsonl", speedup=2.0)


def test_no_regular_file_is_refused_before_it_blocks(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(InputError, match="not a regular file"):
            open_workload(path)
    with pytest.raises(InputError, match=r"gone: cannot be read \(No such file"):
        open_workload(tmp_path / "gone")


def test_1_500_requests_stream_in_bounded_memory(file):
    ids = list(range(100_000, 100_120))
    row = {"input_length": 61_440, "output_length": 9, "hash_ids": ids}
    content = "\n".join(json.dumps({"timestamp": 10 * number, **row}) for number in range(1500))
    path = file("x.jsonl", content)
    del content
    tracemalloc.start()
    try:
        load = open_workload(path)
        assert sum(len(one.prefix) for one in load) == 1500 * 120
        held = [tracemalloc.get_traced_memory()[1]]
    finally:
        tracemalloc.stop()
    assert (len(load), load.last_arrival_us) == (1500, 14_990_000.0)
    assert held[0] < 2**20  # all prefixes at once would be 180,000 numbers


def test_a_load_is_read_only_as_far_as_it_is_consumed(file):
    path = file("x.jsonl", MOONCAKE * 3)
    load = open_workload(path)
    path.write_text(MOONCAKE * 2 + "{")
    assert len(list(islice(load, 2))) == 2
    with pytest.raises(InputError, match=r"x\.jsonl:3: "):
        list(load)


FILES = Path(__file__).parents[2] / "data" / "files"
READ_AS = (
    "Timestamps are read as {} (--time-unit). Ids are read as those of blocks of {} tokens, which fits {} "
)


def test_vllms_timed_trace_has_seconds_and_blocks_of_16_tokens():
    load = open_workload(FILES / "07-timed-trace-seconds.jsonl")
    assert [one.arrived_us for one in load] == [0.0, 1.5e6, 3e6, 4.5e6]
    assert [one.prefix for one in load] == [
        (981, 4412, 7),
        (981, 4412, 8),
        (981, 4412, 7, 9),
        (981, 4412, 11),
    ]
    assert (load.source, load.prefix_block, load.prompt_tokens, load.output_tokens) == (
        "timed_trace",
        16,
        185,
        144,
    )
    assert said(load) == [READ_AS.format("seconds", 16, "4 of 4 rows") + "(--prefix-block)."]


def timed(*rows):
    """Lines of a timed trace; of each row time, prompt tokens and number of ids."""
    return "".join(
        json.dumps({"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": [*range(ids)]})
        + "\n"
        for at, length, ids in rows
    )


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(0, 40, 3), (2, 33, 3)], r"timestamps \(whole numbers, blocks of 16 tokens\) may be seconds or"),
        ([(0.5, 600, 2), (2, 33, 1)], r"\(with fractions, blocks of 512 tokens\) may be"),
        ([(0, 600, 0), (2, 33, 0)], r"\(whole numbers, no block ids that tell\) may be"),
        (
            [(0, 16, 1), (2, 3, 1)],
            r"\(whole numbers, no block ids that tell\) may be .* give --time-unit s or",
        ),
        ([(0, 128, 2), (2, 65, 2)], r"\(whole numbers, blocks of 64 tokens\) may be"),
    ],
)
def test_units_that_nothing_shows_are_asked_for(file, rows, says):
    path = file("x.jsonl", timed(*rows))
    with pytest.raises(UsageError, match=says):
        open_workload(path)
    assert [open_workload(path, time_unit=unit).last_arrival_us for unit in ("s", "ms", "us")] == [
        (rows[1][0] - rows[0][0]) * us for us in (1e6, 1e3, 1)
    ]


def test_units_are_inferred_up_to_a_broken_row_that_is_not_needed(file):
    path = file("x.jsonl", timed((0, 1300, 3), (1500, 513, 2)) + "{")
    load = open_workload(path, num_prompts=2)
    assert (load.source, load.prefix_block, load.last_arrival_us) == ("mooncake", 512, 1_500_000.0)
    with pytest.raises(InputError, match=r"x\.jsonl:3: "):
        open_workload(path)


def test_one_prompt_of_one_block_needs_no_unit():
    load = open_workload(FILES / "18-mooncake-float-lengths.jsonl")
    assert rows(load) == [("r0", 0.0, 16, 4, (1,))]
    assert said(load) == []


def test_prompts_of_one_block_of_more_than_16_tokens_are_mooncakes(file):
    load = open_workload(file("x.jsonl", timed((0, 100, 1), (50, 20, 1))))
    assert (load.source, load.prefix_block, load.last_arrival_us) == ("mooncake", 512, 50e3)


def test_given_units_win_and_are_not_said(file):
    load = open_workload(file("x.jsonl", timed((0, 1300, 3), (2, 513, 2))), time_unit="s", prefix_block=512)
    assert (load.source, load.last_arrival_us, said(load)) == ("timed_trace", 2e6, [])


@pytest.mark.parametrize("options", [{"time_unit": "s"}, {"prefix_block": 16}])
def test_units_go_with_timed_traces_in_json_only(options):
    for name in ("own.jsonl", "azure-2023.csv", "sharegpt.json"):
        with pytest.raises(UsageError, match=r"--(time-unit|prefix-block) is for timed traces in JSON"):
            open_workload(EXAMPLES / name, **options)


@pytest.mark.parametrize(
    ("content", "lengths"),
    [
        ('{"input_len": 5.0, "output_len": 3.0}', [(5, 3)]),
        (
            '{"input_len": 5, "output_tokens": 3}\n\n{"prompt": "abcd", "output_tokens": 2.0}',
            [(5, 3), (1, 2)],
        ),
        (
            '{\n  "input_len": 5,\n  "output_len": 3\n}\n{\n  "input_len": 6,\n  "output_len": 4\n}\n',
            [(5, 3), (6, 4)],
        ),
        ('[\n  {"input_len": 5, "output_len": 3},\n  {"input_len": 6, "output_len": 4}\n]', [(5, 3), (6, 4)]),
        (
            '\ufeff{"input_len": 5, "output_len": 3}\r\n{"input_len": 6, "output_len": 4}\r\n',
            [(5, 3), (6, 4)],
        ),
        ("[" + timed((0, 1300, 3)) + "]", [(1300, 1)]),
        (json.dumps({"timestamp": 0, "input_length": 7.0, "output_length": 2.0}, indent=1), [(7, 2)]),
    ],
)
def test_json_is_read_however_it_is_laid_out(file, content, lengths):
    load = open_workload(file("x.json", content))
    assert [(one.prompt_tokens, one.output_tokens) for one in load] == lengths


def test_days_and_time_zones_are_counted(file):
    path = file(
        "x.csv", HEADER + "2024-02-28 23:59:59,1,1\n2024-03-01T00:00:01+01:00,2,1\n2024-03-01 00:00:00Z,3,1\n"
    )
    assert [one.arrived_us for one in open_workload(path)] == [
        0.0,
        (23 * 3600 + 2) * 1e6,
        (24 * 3600 + 1) * 1e6,
    ]


def test_output_lengths_that_are_replaced_are_said():
    load = open_workload(FILES / "08-vllm-custom.jsonl", output_len=100)
    assert [one.output_tokens for one in load] == [100] * 3
    assert said(load)[0] == "--output-len replaces the output length of 3 rows."


def test_timestamps_beside_texts_are_said_to_be_ignored(file):
    content = '{"timestamp": 5, "prompt": "abcd", "output_tokens": 2}\n{"prompt": "a", "output_tokens": 2}\n'
    load = open_workload(file("x.jsonl", content))
    assert said(load)[0] == (
        "1 row with a timestamp, which is not read: only a timed trace, with input_length and output_length, "
        "says when its requests arrive."
    )
