"""Engines that answer anything, and the commands that ask; ``tools/bench/fuzz_answers.py`` tries more."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.fuzz.answers import case


@pytest.mark.parametrize("number", range(12))
def test_no_answer_breaks_a_command(number):
    with TemporaryDirectory(prefix="s") as folder:  # a socket's path has 107 characters at most
        assert case(number, Path(folder)).wrong is None
