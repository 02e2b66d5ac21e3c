import pytest

from schedtrace.engine.prompts import Prompt, make_requests
from schedtrace.errors import UsageError

pytest.importorskip("numpy")


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
