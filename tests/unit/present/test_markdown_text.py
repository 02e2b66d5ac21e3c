import pytest

from schedtrace.present.renderers.markdown import cell, code, prose


@pytest.mark.parametrize(
    ("value", "span"),
    [
        ("a", "`a`"),
        (40, "`40`"),
        ("[x](y) <b> @team", "`[x](y) <b> @team`"),
        ("a`b", "``a`b``"),
        ("`", "`` ` ``"),
        ("``a", "``` ``a ```"),
        ("", "`  `"),
        (" ", "`   `"),
    ],
)
def test_a_code_span_cannot_be_ended_by_what_is_in_it(value, span):
    assert code(value) == span


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("2 steps of 8 left 80 % (<1 %), 0 -> 2.", "2 steps of 8 left 80 % (<1 %), 0 -> 2."),
        ("--max-num-seqs and max_num_seqs: 3*4", "--max-num-seqs and max_num_seqs: `3*4`"),
        ("request [red]<img> waited", "request `[red]<img>` waited"),
        ("_x_ y_", "`_x_` `y_`"),
        ("@team #1 ~~a~~ $x$ :smile:", "`@team` `#1` `~~a~~` `$x$` `:smile:`"),
        ("https://x www.y a@b", "`https://x` `www.y` `a@b`"),
        ("&lt; & a&b; AT&T", "`&lt;` & `a&b;` `AT&T`"),
        (r"\x1b a\|b", r"`\x1b` `a\|b`"),
    ],
)
def test_words_that_could_mean_something_become_code_spans(text, markdown):
    assert prose(text) == markdown


def test_a_cell_ends_neither_the_cell_nor_the_line():
    assert cell("a | b\n c") == r"a \| b c"
