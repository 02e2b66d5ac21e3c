import re

import pytest

from schedtrace.model.report import Advice
from schedtrace.model.say import say
from tests.unit.recorded_words import TESTS, WORDS, RecordedWords, read_sections, texts


@pytest.mark.parametrize("path", sorted(WORDS.rglob("*.txt")), ids=lambda path: path.stem)
def test_recorded_sentences_belong_to_tests_that_exist(path):
    tests = (TESTS / path.relative_to(WORDS)).with_suffix(".py").read_text(encoding="utf-8")
    recorded = {name.partition("[")[0] for name in read_sections(path)}
    assert recorded <= set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))


def test_other_words_and_words_that_are_no_longer_said_fail(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.unit.recorded_words.WORDS", tmp_path)
    monkeypatch.setenv("UPDATE_GOLDENS", "1")
    RecordedWords(TESTS / "test_x.py", "test_y")("one sentence", "another")
    monkeypatch.delenv("UPDATE_GOLDENS")
    words = RecordedWords(TESTS / "test_x.py", "test_y")
    words("one sentence")
    with pytest.raises(AssertionError):
        words("another one")
    words = RecordedWords(TESTS / "test_x.py", "test_y")
    words("one sentence")
    with pytest.raises(AssertionError):
        words.check_all_said()
    with pytest.raises(AssertionError):
        RecordedWords(TESTS / "test_x.py", "test_z")("one sentence")


def test_what_can_be_said_is_one_line_a_sentence():
    advice = Advice(message=say("--max-num-seqs 9"), costs=say("longer steps"))
    assert texts(["words", None, "", say("{n:n}", n=1000), [advice]]) == [
        *("words", "1,000", "try: --max-num-seqs 9", "costs: longer steps")
    ]
