"""Sentences that tests make by hand, as ``tests/unit/golden/words/`` records them: one file a test file."""

import os
from collections.abc import Iterable
from pathlib import Path

from schedtrace.model.message import Message, plain
from schedtrace.model.report import Advice, Finding

TESTS = Path(__file__).parent
WORDS = TESTS / "golden" / "words"
HEAD = "== "

Sayable = str | Message | Advice | Finding | None


def texts(sayable: Sayable | Iterable[Sayable]) -> list[str]:
    """Return every sentence of these, one a line."""
    if sayable is None:
        return []
    if isinstance(sayable, str | Message):
        return [text] if (text := plain(sayable)) else []
    if isinstance(sayable, Advice):
        return [f"{word}: {text}" for word, text in advice_texts(sayable)]
    if isinstance(sayable, Finding):
        from tests.unit.diagnose.sentences import sentences

        return sentences(sayable)
    return [text for part in sayable for text in texts(part)]


def advice_texts(advice: Advice) -> list[tuple[str, str]]:
    """Return what to try and what it costs, if that is said."""
    return [
        (word, text)
        for word, text in (("try", plain(advice.message)), ("costs", plain(advice.costs)))
        if text
    ]


def read_sections(path: Path) -> dict[str, list[str]]:
    """Return the recorded sentences of each test of a file, by the test's name."""
    sections: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith(HEAD):
            sections[line.removeprefix(HEAD)] = lines = []
        else:
            lines.append(line)
    return sections


class RecordedWords:
    """The recorded sentences of one test: a call compares the next ones.

    ``UPDATE_GOLDENS=1`` records them instead.
    """

    def __init__(self, test_file: Path, test: str) -> None:
        self.path = (WORDS / test_file.relative_to(TESTS)).with_suffix(".txt")
        self.test = test
        self.said: list[str] = []

    def __call__(self, *sayables: Sayable | Iterable[Sayable]) -> None:
        start = len(self.said)
        self.said += texts(sayables)
        sections = read_sections(self.path)
        if self.said and os.environ.get("UPDATE_GOLDENS"):
            sections[self.test] = [*self.said]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = [line for name, body in sections.items() for line in (f"{HEAD}{name}", *body)]
            self.path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        recorded = sections.get(self.test, [])
        assert self.said[start:] == recorded[start : len(self.said)]

    def check_all_said(self) -> None:
        """Fail if more is recorded than the test has said."""
        if self.said:
            assert self.said == read_sections(self.path).get(self.test)
