import json
from pathlib import Path

import pytest

from schedtrace.engine.prompts import (
    DEFAULT_RANDOM_OUTPUT_LEN,
    DEFAULT_RANDOM_PROMPTS,
    Prompt,
    check_ranks,
    load_prompts,
    make_requests,
    read_prompts,
)
from schedtrace.engine.run_spec import RunSpec
from schedtrace.errors import InputError, UsageError
from schedtrace.model.message import plain

EXAMPLES = Path(__file__).parents[3] / "examples" / "workloads"


FILES = Path(__file__).parents[2] / "data" / "files"


def prompts(**fields):
    return load_prompts(RunSpec(engine_args=[], **fields))


def notes_on(**fields):
    return [plain(note) for note in read_prompts(RunSpec(engine_args=[], **fields)).notes]


@pytest.fixture
def dataset(tmp_path):
    """``dataset("x.jsonl", "...")``: the path of a file with this text."""

    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_random_defaults_are_those_of_vllms_benchmark():
    made = prompts()
    assert (len(made), made[0]) == (1000, Prompt(input_len=1024, output_len=128))
    assert (DEFAULT_RANDOM_PROMPTS, DEFAULT_RANDOM_OUTPUT_LEN) == (1000, 128)


def test_random_lengths_are_the_same_for_the_same_seed_only():
    varied = {"input_len": 100, "output_len": 50, "range_ratio": 0.5, "num_prompts": 50}
    assert prompts(seed=1, **varied) == prompts(seed=1, **varied)
    assert prompts(seed=1, **varied) != prompts(seed=2, **varied)
    assert prompts(seed=1, **varied)[:5] == prompts(seed=1, **{**varied, "num_prompts": 5})


@pytest.mark.parametrize(
    ("ratio", "inputs", "outputs"),
    [(0.0, (100, 100), (10, 10)), (0.5, (50, 150), (5, 15)), (1.0, (1, 200), (1, 20))],
)
def test_random_lengths_reach_both_ends_of_their_range_and_never_leave_it(ratio, inputs, outputs):
    made = prompts(input_len=100, output_len=10, range_ratio=ratio, num_prompts=3000)
    for lengths, ends in (([p.input_len for p in made], inputs), ([p.output_len for p in made], outputs)):
        assert (min(lengths), max(lengths)) == ends


ROWS = '{"prompt": "hi", "output_len": 3}\n\n{"input_len": 7, "output_len": 4, "priority": 2}\n'


def test_jsonl_rows_are_texts_or_lengths(dataset):
    assert prompts(dataset=dataset("x.jsonl", ROWS)) == [
        Prompt(text="hi", output_len=3),
        Prompt(input_len=7, output_len=4, priority=2),
    ]


def test_output_len_given_replaces_the_data_sets_own(dataset):
    made = prompts(dataset=dataset("x.jsonl", ROWS + '{"prompt": "no length"}\n'), output_len=9)
    assert [prompt.output_len for prompt in made] == [9, 9, 9]


@pytest.mark.parametrize(("count", "texts"), [(1, "a"), (2, "ab"), (5, "ababa")])
def test_the_data_set_is_cut_or_repeated_to_the_number_asked_for(dataset, count, texts):
    rows = "".join(f'{{"prompt": "{text}", "output_len": 1}}\n' for text in "ab")
    made = prompts(dataset=dataset("x.jsonl", rows), num_prompts=count)
    assert "".join(prompt.text for prompt in made) == texts


def conversation(*turns):
    return {"conversations": [{"from": "x", "value": turn} for turn in turns]}


def test_sharegpt_takes_the_first_question_and_answer_of_each_conversation(dataset):
    content = [conversation("q", "a", "q2", "a2"), conversation("alone"), {"id": 1}, conversation("p", "b")]
    made = prompts(dataset=dataset("x.json", json.dumps(content)))
    assert made == [Prompt(text="q", completion="a"), Prompt(text="p", completion="b")]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("mooncake.jsonl", [(1300, 20), (1100, 35)]),
        ("bailian.jsonl", [(40, 20), (33, 8)]),
        ("azure-2023.csv", [(480, 10), (318, 8)]),
        ("azure-2024.csv", [(216, 5), (239, 64)]),
        ("burstgpt.csv", [(472, 18), (108, 230)]),
    ],
)
def test_a_trace_with_times_is_sent_at_these_unless_told_otherwise(name, lengths):
    dataset, second = str(EXAMPLES / name), SECOND_AT_S[name]
    made = prompts(dataset=dataset, num_prompts=2)
    (first_in, first_out), (second_in, second_out) = lengths
    assert made == [
        Prompt(input_len=first_in, output_len=first_out, at_s=0.0),
        Prompt(input_len=second_in, output_len=second_out, at_s=second),
    ]
    [_, faster] = prompts(dataset=dataset, num_prompts=2, speedup=2.0)
    assert faster.at_s == second / 2
    for otherwise in ({"request_rate": 3.0}, {"at_once": True}, {"prequeue": True}):
        made = prompts(dataset=dataset, num_prompts=2, **otherwise)
        assert made == [Prompt(input_len=prompt, output_len=output) for prompt, output in lengths]


SECOND_AT_S = {
    "mooncake.jsonl": 0.0,
    "bailian.jsonl": 0.25,
    "azure-2023.csv": 0.025,
    "azure-2024.csv": 0.007405,
    "burstgpt.csv": 40.0,
}


def test_a_trace_with_times_is_repeated_only_where_they_are_not_used():
    dataset = str(EXAMPLES / "azure-2023.csv")
    made = prompts(dataset=dataset, num_prompts=6, request_rate=1.0)
    assert (len(made), made[5]) == (6, made[0])
    notes = notes_on(dataset=dataset, num_prompts=6)
    assert notes[0] == "The file has 5 usable requests, not the 6 requests asked for."
    assert notes[-1] == (
        "5 requests are sent at the times in azure-2023.csv, over 1,500 ms; --speedup shortens the gaps, "
        "--request-rate inf sends all at once."
    )


def test_what_is_left_out_of_a_file_is_said():
    path = str(EXAMPLES / "burstgpt.csv")
    assert notes_on(dataset=path, at_once=True) == [
        "1 row without output tokens left out.",
        "Which prompts begin alike is not in the file: no prefix is shared.",
        "The arrival times in burstgpt.csv are not used.",
    ]
    assert "Prompts are random: what they share in mooncake.jsonl is not sent." in notes_on(
        dataset=str(EXAMPLES / "mooncake.jsonl")
    )
    assert notes_on(dataset=str(EXAMPLES / "sharegpt.json"), output_len=5) == [
        "1 conversation without a question and an answer left out.",
        "--output-len replaces the output length of 4 rows.",
    ]


@pytest.mark.parametrize("option", ["speedup", "time_unit", "prefix_block"])
def test_an_option_of_files_with_times_is_refused_for_others(option):
    value = "s" if option == "time_unit" else 2
    for dataset in ("random", str(EXAMPLES / "sharegpt.json"), str(EXAMPLES / "own.jsonl")):
        with pytest.raises(UsageError, match=f"--{option.replace('_', '-')}"):
            prompts(dataset=dataset, **{option: value})


def test_a_speedup_goes_with_the_files_times_only():
    with pytest.raises(UsageError, match="--speedup shortens the gaps of the file: it cannot go with"):
        prompts(dataset=str(EXAMPLES / "mooncake.jsonl"), speedup=2.0, request_rate=1.0)


def test_vllms_custom_data_set_has_its_own_output_lengths(dataset):
    path = FILES / "08-vllm-custom.jsonl"
    assert [prompt.output_len for prompt in prompts(dataset=str(path))] == [10, 1520, 819]
    assert notes_on(dataset=str(path), output_len=100) == [
        "--output-len replaces the output length of 3 rows."
    ]
    both = dataset("x.jsonl", '{"prompt": "a", "output_len": 2, "output_tokens": 3}')
    with pytest.raises(
        InputError, match=r"x\.jsonl:1: output_len 2 and output_tokens 3 contradict each other"
    ):
        prompts(dataset=both)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.jsonl", ROWS + "{", r"x\.jsonl:4: "),
        ("x.jsonl", '{"prompt": 5}', r"x\.jsonl:1: .*prompt"),
        ("x.jsonl", '{"input_len": "5"}', r"x\.jsonl:1: .*input_len"),
        ("x.jsonl", '{"input_len": -5, "output_len": 1}', r"x\.jsonl:1: .*input_len"),
        ("x.jsonl", '{"input_len": 0, "output_len": 1}', r"x\.jsonl:1: .*input_len"),
        ("x.jsonl", '{"input_len": 5, "output_len": 0}', r"x\.jsonl:1: .*output_len"),
        ("x.jsonl", b'{"prompt": "\xff", "output_len": 1}', r"x\.jsonl:1: "),
        ("x.jsonl", "[1]", r"not a ShareGPT file.* \(conversation 1: "),
        ("x.jsonl", '{"output_len": 1}', r"x\.jsonl:1: give either prompt"),
        ("x.jsonl", ROWS + "{}", r"x\.jsonl:4: give either prompt"),
        ("x.jsonl", '{"input_len": 7, "data_parallel_rank": -1}', r"x\.jsonl:1: .*data_parallel_rank"),
        ("x.json", "[", "not a ShareGPT file"),
        ("x.json", "[1]", "not a ShareGPT file"),
        ("x.json", '["text"]', "not a ShareGPT file"),
        ("x.json", '{"conversations": []}', "not a ShareGPT file"),
        ("x.json", '[{"conversations": [{"text": "q"}, {"text": "a"}]}]', "not a ShareGPT file"),
        ("x.json", json.dumps([conversation(None, "a")]), "not a ShareGPT file"),
        ("x.json", json.dumps([conversation(1, "a")]), "not a ShareGPT file"),
        ("x.json", b"[" * 100_000, "not a ShareGPT file"),
        ("x.json", "[]", "no usable prompt"),
        ("x.json", json.dumps([conversation("alone")]), "no usable prompt"),
    ],
)
def test_a_broken_data_set_is_refused_with_its_path(dataset, name, content, says):
    path = dataset(name, content)
    with pytest.raises(InputError, match=says) as refused:
        prompts(dataset=path)
    assert str(refused.value).startswith(path)


@pytest.mark.parametrize("name", ["gone.json", "ShareGPT"])
def test_a_name_that_is_no_file_is_refused(name):
    with pytest.raises(InputError, match=f"--dataset {name}: no such file; expected 'random' or a workload"):
        prompts(dataset=name)


def test_without_a_length_anywhere_it_has_to_be_given(dataset):
    with pytest.raises(UsageError, match="--output-len"):
        prompts(dataset=dataset("x.jsonl", '{"prompt": "a"}'))


SENT = '{"input_len": 7, "output_len": 4, "data_parallel_rank": 2}\n{"input_len": 5, "output_len": 4}\n'


def test_a_row_names_the_rank_that_gets_it(dataset):
    made = prompts(dataset=dataset("x.jsonl", SENT))
    assert [prompt.data_parallel_rank for prompt in made] == [2, None]
    requests = make_requests(made, seed=0, vocab_size=100, tokenizer=None)
    assert [request.data_parallel_rank for request in requests] == [2, None]


@pytest.mark.parametrize("size", ["--data-parallel-size", "-dp"])
def test_a_rank_that_there_will_not_be_is_refused_before_the_start(size, dataset):
    path = dataset("x.jsonl", SENT)
    check_ranks(RunSpec(engine_args=[size, "3"], dataset=path), prompts(dataset=path))
    message = (
        f"{path}: a request asks for data_parallel_rank 2, and there are 2 (ranks count from 0): "
        "give --data-parallel-size 3 or more"
    )
    with pytest.raises(UsageError) as told:
        check_ranks(RunSpec(engine_args=[size, "2"], dataset=path), prompts(dataset=path))
    assert str(told.value) == message
    with pytest.raises(UsageError, match="there are 1 "):
        check_ranks(RunSpec(engine_args=[], dataset=path), prompts(dataset=path))


class Tokenizer:
    """Takes every character for a token."""

    all_special_ids = (0, 3)

    def encode(self, text, *, add_special_tokens):
        assert add_special_tokens is False
        return list(text)


def requests(*prompts, seed=0, vocab_size=5, tokenizer=None):
    return make_requests(list(prompts), seed=seed, vocab_size=vocab_size, tokenizer=tokenizer)


def ids_of(request):
    return request.prompt["prompt_token_ids"]


def test_lengths_become_exactly_so_many_random_tokens():
    [request] = requests(Prompt(input_len=40, output_len=7, priority=2))
    assert (len(ids_of(request)), request.input_tokens, request.output_len, request.priority) == (
        40,
        40,
        7,
        2,
    )
    assert set(ids_of(request)) == {0, 1, 2, 3, 4}


def test_special_tokens_are_never_drawn():
    [request] = requests(Prompt(input_len=200, output_len=1), tokenizer=Tokenizer())
    assert set(ids_of(request)) == {1, 2, 4}


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others():
    def draw(seed):
        return ids_of(requests(Prompt(input_len=50, output_len=1), seed=seed, vocab_size=1000)[0])

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_each_prompt_is_drawn_for_itself():
    first, second = requests(*[Prompt(input_len=50, output_len=1)] * 2, vocab_size=1000)
    assert ids_of(first)[:2] != ids_of(second)[:2]


def test_a_text_is_left_to_the_front_end():
    [request] = requests(Prompt(text="hi", output_len=3), tokenizer=Tokenizer())
    assert (request.prompt, request.input_tokens, request.output_len) == ("hi", None, 3)


@pytest.mark.parametrize(("completion", "tokens"), [("four", 4), ("", 1)])
def test_without_a_length_as_much_is_generated_as_the_answer_has(completion, tokens):
    [request] = requests(Prompt(text="hi", completion=completion), tokenizer=Tokenizer())
    assert request.output_len == tokens


def test_a_text_without_a_tokenizer_is_refused():
    with pytest.raises(UsageError, match="no tokenizer"):
        requests(Prompt(text="hi", output_len=3))


SESSIONS = """\
{"session_id": "a", "input_length": 64, "output_length": 5}
{"session_id": "b", "input_length": 32, "output_length": 5}
{"session_id": "a", "delay": 1500, "input_length": 16, "output_length": 3}
"""


def test_turns_of_sessions_wait_for_the_answer_to_the_turn_before(dataset):
    made = prompts(dataset=dataset("x.jsonl", SESSIONS))
    assert made == [
        Prompt(input_len=64, output_len=5),
        Prompt(input_len=32, output_len=5),
        Prompt(input_len=64 + 5 + 16, output_len=3, after=0, delay_s=1.5),
    ]
    timed = SESSIONS.replace('"input_length": 64', '"timestamp": 0, "input_length": 64')
    timed = timed.replace('"input_length": 32', '"timestamp": 250, "input_length": 32')
    assert [prompt.at_s for prompt in prompts(dataset=dataset("y.jsonl", timed))] == [0.0, 0.25, 1.5]


def test_turns_cannot_be_queued_before_the_first_step(dataset):
    with pytest.raises(UsageError, match="--prequeue queues all requests at once, and turns of"):
        prompts(dataset=dataset("x.jsonl", SESSIONS), prequeue=True)


def test_a_speedup_needs_the_times_of_sessions(dataset):
    with pytest.raises(UsageError, match=r"--speedup: .* has no arrival times"):
        prompts(dataset=dataset("x.jsonl", SESSIONS), speedup=2.0)


CHAT = """\
{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
{"messages": [{"role": "user", "content": "p"}], "max_tokens": 7}
"""


def test_chats_are_sent_as_texts(dataset):
    path = dataset("x.jsonl", CHAT)
    assert prompts(dataset=path) == [Prompt(text="q", completion="a"), Prompt(text="p", output_len=7)]
    assert notes_on(dataset=path) == [
        "Messages are sent as one text each, without the model's chat template.",
        "1 row with the client's limit (max_tokens) as output length: answers may end before it.",
    ]
