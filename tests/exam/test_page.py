"""docs/exam.md quotes what is really said."""

import pytest

pytest.importorskip("vllm")

from tests.exam.page import PAGE, table, with_table

pytestmark = pytest.mark.vllm


def test_the_page_has_the_present_sentences(recorded):
    text = PAGE.read_text()
    assert text == with_table(text, table(recorded))
