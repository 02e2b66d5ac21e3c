"""Files of other programs as loads: chats, batches, sessions, ServeGen, requests of benchmarks."""

import json

import pytest

from schedtrace.errors import InputError, UsageError
from schedtrace.model.message import plain
from schedtrace.workloads import open_workload
from schedtrace.workloads.formats import FORMATS, _head

NO_PREFIX = "Which prompts begin alike is not in the file: no prefix is shared."


@pytest.fixture
def file(tmp_path):
    """``file(rows)``: a file with a JSON object on each line; of a text, with this text."""

    def write(content, name="x"):
        path = tmp_path / name
        text = content if isinstance(content, str) else "".join(f"{json.dumps(row)}\n" for row in content)
        path.write_text(text)
        return path

    return write


def lengths(load):
    return [(request.prompt_tokens, request.output_tokens) for request in load]


def turns(load):
    return [
        (request.request_id, request.arrived_us, request.after, request.delay_us, request.prompt_tokens)
        for request in load
    ]


def notes(load):
    return [plain(note) for note in load.notes]


def words(text):
    return len(text.split())


USER = {"role": "user", "content": "what limits a batch"}
SYSTEM = {"role": "system", "content": "be brief"}
ANSWER = {"role": "assistant", "content": "its seats"}
SAMPLES = {
    "a trace of Azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,480,10\n",
    "a trace of BurstGPT": "Timestamp,Request tokens,Response tokens\n5,4,1\n",
    "a workload of ServeGen": "request_id,timestamp,input_tokens,output_tokens\n0,0.5,100,20\n1,2.0,30,4\n",
    "a timed trace": [{"timestamp": 0, "input_length": 16, "output_length": 4, "hash_ids": [1]}],
    "sessions of AIPerf or Dynamo": [{"session_id": "a", "input_length": 10, "output_length": 4}],
    "chat messages": [{"messages": [SYSTEM, USER, ANSWER]}],
    "a batch of OpenAI requests": [
        {
            "custom_id": "1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [SYSTEM, USER], "max_tokens": 30},
        }
    ],
    "a detailed result of vllm bench serve": [
        {
            "model_id": "m",
            "completed": 2,
            "total_input_tokens": 30,
            "request_throughput": 1.0,
            "input_lens": [20, 10, 7],
            "output_lens": [5, 6, 0],
            "ttfts": [0.1, 0.1, 0.0],
            "itls": [[0.1], [0.1], []],
            "start_times": [1001.5, 1000.0, 1002.0],
        }
    ],
    "an export of AIPerf's requests": [
        {
            "metadata": {"request_start_ns": 1_759_813_207_532_900_363 + at, "was_cancelled": cancelled},
            "metrics": metrics,
        }
        for at, cancelled, metrics in [
            (
                500_000_000,
                False,
                {
                    "input_sequence_length": {"value": 550, "unit": "tokens"},
                    "output_sequence_length": {"value": 9, "unit": "tokens"},
                },
            ),
            (
                0,
                False,
                {
                    "input_sequence_length": {"value": 40, "unit": "tokens"},
                    "output_sequence_length": {"value": 3, "unit": "tokens"},
                },
            ),
            (9, True, {"error_isl": {"value": 550, "unit": "tokens"}}),
        ]
    ],
    "conversations of ShareGPT": '[{"conversations": [{"value": "a"}, {"value": "b"}]}]',
    "JSON Lines of one's own": [{"input_len": 5, "output_len": 3}],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_one_format_claims_a_file_and_reads_it(name, file):
    path = file(SAMPLES[name])
    assert [kind.name for kind in FORMATS if kind.claims(_head(path))] == [name]
    assert len(open_workload(path)) >= 1


def test_every_format_has_a_sample():
    assert [kind.name for kind in FORMATS] == list(SAMPLES)


def test_a_file_that_two_formats_claim_is_refused_with_both(file):
    with pytest.raises(InputError, match=r"looks like chat messages, and like a batch of OpenAI requests"):
        open_workload(file([{"messages": [USER], "custom_id": "1", "url": "/a", "body": {}}]))


def test_chat_messages_have_an_answer_or_a_length(file):
    rows = [
        {"messages": [SYSTEM, USER, ANSWER]},
        {"messages": [USER], "output_len": 7},
        {"messages": [USER, ANSWER, USER], "max_tokens": 9},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "see this"}, {"type": "image_url"}]}
            ]
        },
    ]
    load = open_workload(file(rows), count_tokens=words, output_len=5)
    assert lengths(load) == [(6, 5), (4, 5), (10, 5), (2, 5)]
    load = open_workload(file(rows[:3]), count_tokens=words)
    assert (load.source, lengths(load)) == ("chat", [(6, 2), (4, 7), (10, 9)])
    assert notes(load)[:2] == [
        "Messages are sent as one text each, without the model's chat template.",
        "1 row with the client's limit (max_tokens) as output length: answers may end before it.",
    ]
    assert "1 message with parts that are no text: these are left out." in notes(
        open_workload(file(rows), output_len=5)
    )


def test_chat_messages_may_be_a_list_over_several_lines(file):
    path = file(json.dumps([{"messages": [USER, ANSWER]}] * 2, indent=2))
    assert lengths(open_workload(path, count_tokens=words)) == [(4, 2)] * 2


def test_a_batch_has_limits_and_may_have_token_ids(file):
    def line(url, **body):
        return {"custom_id": "a", "method": "POST", "url": url, "body": body}

    rows = [
        line("/v1/chat/completions", messages=[SYSTEM, USER], max_completion_tokens=8),
        line("/v1/completions", prompt=[1, 2, 3], max_tokens=4),
        line("/v1/completions", prompt="a b", max_tokens=2),
        line("/v1/embeddings", input="a"),
    ]
    load = open_workload(file(rows), count_tokens=words)
    assert (load.source, lengths(load)) == ("openai_batch", [(6, 8), (3, 4), (2, 2)])
    assert "1 row that ask for something else than text left out." in notes(load)
    with pytest.raises(InputError, match=r"x:1: body: expected messages, input or prompt"):
        open_workload(file([line("/v1/completions", prompt=["a", "b"], max_tokens=2)]))
    with pytest.raises(InputError, match=r"x:1: no output_len"):
        open_workload(file([line("/v1/completions", prompt="a")]))


def test_servegen_has_seconds(file):
    load = open_workload(file(SAMPLES["a workload of ServeGen"]))
    assert [(request.arrived_us, request.prompt_tokens) for request in load] == [(0.0, 100), (1.5e6, 30)]
    assert load.source == "servegen"
    wider = file("request_id,timestamp,input_tokens,output_tokens,ttft_ms\n0,1696348800,256,128,1.0\n")
    with pytest.raises(InputError, match="unknown format"):
        open_workload(wider)
    with pytest.raises(InputError, match="looks like ServeGen's rates of a client"):
        open_workload(file("0,2.0,0.8,Gamma,2.0,300\n600,2.0,0.8,Gamma,2.0,300\n"))


def test_a_detailed_result_of_vllm_bench_serve_has_its_requests(file):
    [result] = SAMPLES["a detailed result of vllm bench serve"]
    load = open_workload(file([result]))
    assert [(request.arrived_us, *pair) for request, pair in zip(load, lengths(load), strict=True)] == [
        (0.0, 10, 6),
        (1.5e6, 20, 5),
    ]
    assert notes(load)[:2] == [
        "Requests are sent at the benchmark's times, however long answers take here.",
        "1 request that failed or were cancelled left out.",
    ]
    without = open_workload(file([{**result, "start_times": []}]))
    assert (lengths(without), without.last_arrival_us) == ([(20, 5), (10, 6)], 0.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"output_lens": [1]}, r"x:1: input_lens, output_lens and start_times differ in length"),
        ({"input_lens": [-1, 1, 1]}, r"x:1: input_lens -1.0 is not a number of tokens"),
    ],
)
def test_a_broken_result_is_refused(change, says, file):
    [result] = SAMPLES["a detailed result of vllm bench serve"]
    with pytest.raises(InputError, match=says):
        open_workload(file([{**result, **change}]))


def test_several_results_are_refused(file):
    with pytest.raises(InputError, match=r"x:2: a second result"):
        open_workload(file(SAMPLES["a detailed result of vllm bench serve"] * 2))


def test_an_export_of_aiperf_has_times_and_units(file):
    rows = SAMPLES["an export of AIPerf's requests"]
    load = open_workload(file(rows))
    assert (load.source, lengths(load)) == ("aiperf", [(40, 3), (550, 9)])
    assert load.last_arrival_us == pytest.approx(500_000.0, abs=1)
    assert "1 request that failed or were cancelled left out." in notes(load)
    metrics = {
        name: {"value": 5, "unit": "characters"}
        for name in ("input_sequence_length", "output_sequence_length")
    }
    with pytest.raises(InputError, match=r"x:1: sequence lengths are not in tokens"):
        open_workload(file([{**rows[0], "metrics": metrics}]))


def session(name, *rows):
    keys = ("input_length", "output_length", "hash_ids", "delay", "timestamp")
    return [
        {
            "session_id": name,
            **{key: value for key, value in zip(keys, row, strict=False) if value is not None},
        }
        for row in rows
    ]


WHOLE = [
    *session("a", (1024, 100, [0, 1], None, 0), (1200, 10, [0, 1, 2], 500)),
    *session("b", (1000, 50, [0, 5], None, 250), (2000, 7, [0, 5, 6, 7], 100)),
]


def test_turns_with_the_block_ids_of_the_turn_before_are_whole_prompts(file):
    load = open_workload(file(WHOLE))
    assert turns(load) == [
        ("r0", 0.0, None, 0.0, 1024),
        ("r1", 250_000.0, None, 0.0, 1000),
        ("r2", 350_000.0, "r1", 100_000.0, 2000),
        ("r3", 500_000.0, "r0", 500_000.0, 1200),
    ]
    assert [request.prefix for request in load] == [(0, 1), (0, 5), (0, 5, 6, 7), (0, 1, 2)]
    assert (load.source, load.prefix_block, load.later_turns) == ("sessions", 512, 2)
    [note] = notes(load)
    assert "read as milliseconds" in note
    assert "whole prompts (2 of 2 later turns can be whole prompts)." in note


NEW_ONLY = [
    *session("a", (1024, 152, [0, 1]), (192, 104, [2], 500)),
    *session("b", (1024, 143, [0, 1]), (183, 123, [4], 500)),
]


def test_turns_with_other_block_ids_are_what_is_new(file):
    load = open_workload(file(NEW_ONLY))
    assert [request.prompt_tokens for request in load] == [1024, 1024, 1368, 1350]
    first, second, third, fourth = [request.prefix for request in load]
    assert first == second == (0, 1) == third[:2] == fourth[:2]
    assert len(third) == len(fourth) == 2  # 1,368 tokens are two whole blocks
    assert "after the conversation so far (0 of 2 later turns can be whole prompts)." in notes(load)[0]


@pytest.mark.parametrize(
    ("mode", "prompts"),
    [
        ("deltas_without_responses", [100, 100 + 10 + 30]),
        ("deltas_with_responses", [100, 100 + 30]),
        ("message_array_with_responses", [100, 30]),
    ],
)
def test_context_mode_says_what_a_length_counts(mode, prompts, file):
    rows = [{**row, "context_mode": mode} for row in session("a", (100, 10), (30, 5))]
    load = open_workload(file(rows))
    assert [request.prompt_tokens for request in load] == prompts


def test_context_modes_that_differ_are_refused(file):
    rows = session("a", (100, 10), (30, 5))
    rows = [{**row, "context_mode": mode} for row, mode in zip(rows, ("a", "b"), strict=True)]
    with pytest.raises(UsageError, match="context_mode differs"):
        open_workload(file(rows))


def test_a_session_shares_its_own_beginning_with_no_other(file):
    rows = [*session("a", (160, 16), (32, 4)), *session("b", (160, 16), (32, 4))]
    load = open_workload(file(rows))
    by_id = {request.request_id: request for request in load}
    later = [request for request in load if request.after]
    assert [request.prompt_tokens for request in later] == [208, 208]
    for request in later:
        before = by_id[request.after]
        assert request.prefix[: len(before.prefix)] == before.prefix
        assert len(before.prefix) == 10  # blocks of 16 tokens
    assert set(later[0].prefix).isdisjoint(later[1].prefix)


def test_conversations_of_texts_grow_by_their_answers(file):
    texts = [{"text": "a b c"}, {"text": "d e", "delay": 1000}]
    rows = [{"session_id": "s", "turns": [{**turn, "output_length": 4} for turn in texts]}]
    load = open_workload(file(rows), count_tokens=words)
    assert turns(load) == [("r0", 0.0, None, 0.0, 3), ("r1", 1e6, "r0", 1e6, 9)]


def test_a_conversation_has_the_answers_that_are_asked_for(file):
    load = open_workload(file(session("a", (100, 10), (30, 5))), output_len=50)
    assert lengths(load) == [(100, 50), (180, 50)]


def test_messages_of_a_session_are_whole_prompts(file):
    rows = [
        {"session_id": "s", "messages": [USER], "output_length": 2},
        {"session_id": "s", "messages": [USER, ANSWER, USER], "output_length": 3, "delay": 4503.332},
    ]
    load = open_workload(file(rows), count_tokens=words)
    assert turns(load) == [("r0", 0.0, None, 0.0, 4), ("r1", 4_503_332.0, "r0", 4_503_332.0, 10)]


@pytest.mark.parametrize(("timestamp", "arrives_us"), [(200, 500e3), (900, 900e3)])
def test_a_later_turn_comes_at_its_time_but_not_before_its_delay(file, timestamp, arrives_us):
    load = open_workload(file(session("a", (100, 10, None, None, 0), (30, 5, None, 500, timestamp))))
    assert [request.arrived_us for request in load] == [0.0, arrives_us]


def test_rows_without_sessions_and_times_are_lengths(file):
    load = open_workload(
        file([{"input_length": 9, "output_length": 3}, {"text_input": "a b", "output_length": 1}])
    )
    assert (lengths(load), load.later_turns, load.last_arrival_us) == ([(9, 3), (1, 1)], 0, 0.0)
    assert all(request.prefix == () for request in load)


def test_only_sessions_and_times_have_a_note_on_them(file):
    rows = [{"text_input": "a b", "output_length": 1}]
    assert not any("Timestamps" in note for note in notes(open_workload(file(rows), count_tokens=words)))
    assert any("Timestamps" in note for note in notes(open_workload(file([{**rows[0], "delay": 5}]))))


def test_a_timed_trace_may_take_its_output_lengths_from_the_command(file):
    rows = file([{"timestamp": at, "input_length": 600, "hash_ids": [at, 9]} for at in (0, 50)])
    with pytest.raises(InputError, match="x:1: no output_length: add it, or give --output-len"):
        open_workload(rows)
    load = open_workload(rows, output_len=7)
    assert [(each.arrived_us, each.output_tokens) for each in load] == [(0.0, 7), (50_000.0, 7)]


def test_a_list_after_a_list_is_not_left_out(file):
    lists = file('[{"input_len": 3, "output_len": 2}]\n[{"input_len": 4, "output_len": 2}]\n')
    with pytest.raises(InputError, match="x:2: content after the end of the list"):
        open_workload(lists)


def test_requests_in_another_format_are_not_said_to_be_none(file):
    with pytest.raises(InputError, match="x: looks like requests in a format that is not read; expected "):
        open_workload(file([{"block_size": 64, "requests": [{"t": 0, "in": 3, "hash_ids": [1]}]}]))


def test_a_rate_draws_the_times_of_first_turns_only(file):
    load = open_workload(file(WHOLE), rate=2.0, seed=1)
    arrived = {request.request_id: request.arrived_us for request in load}
    firsts = [request for request in load if request.after is None]
    assert (len(firsts), load.later_turns) == (2, 2)
    for request in load:
        if request.after is not None:
            assert request.arrived_us == arrived[request.after] + request.delay_us


def test_a_session_without_lengths_is_refused(file):
    for row, says in [
        ({"session_id": "a", "input_length": 5}, "x:1: no output_length: add it, or give --output-len"),
        (
            {"session_id": "a", "turns": [{"output_length": 3}]},
            "x:1: no input_length, text_input, messages or",
        ),
        ({"session_id": "a", "input_length": 5, "output_length": 1, "delay": -1}, "x:1: "),
    ]:
        with pytest.raises(InputError, match=says):
            open_workload(file([row]))


def test_a_result_without_its_requests_is_named(file):
    [result] = SAMPLES["a detailed result of vllm bench serve"]
    names = ("model_id", "completed", "total_input_tokens", "request_throughput")
    with pytest.raises(InputError, match=r"x: looks like a result of vllm bench serve: .* --save-detailed"):
        open_workload(file([{name: result[name] for name in names}]))
