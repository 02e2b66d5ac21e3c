"""What a recorded finding says, as ``tests/data/findings/<code>/sentences.txt`` and its page have it."""

from pathlib import Path

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.model.message import plain
from schedtrace.model.report import Finding
from schedtrace.read.run import read_run


def flat(findings: list[Finding]) -> list[Finding]:
    """Root causes and symptoms alike, each symptom after its root."""
    return [one for finding in findings for one in (finding, *flat(finding.symptoms))]


def sentences(finding: Finding) -> list[str]:
    """One line a sentence, after the word for its field; what a symptom lacks is left out."""
    lines = [
        ("title", finding.title),
        ("verdict", finding.verdict),
        ("holder", finding.holder),
        ("message", finding.message),
    ]
    for advice in finding.advice:
        lines += [("try", advice.message), ("costs", advice.costs)]
    lines.append(("example", finding.example or ""))
    return [f"{word}: {text}" for word, sentence in lines if (text := plain(sentence))]


def found_in(folder: Path, code: str) -> list[Finding]:
    """The findings of this kind in a run."""
    return [finding for finding in flat(analyze_run(read_run(folder)).findings) if finding.code == code]


def write_sentences(folder: Path) -> None:
    """Record what is found in a sample now."""
    [finding] = found_in(folder / "shows", folder.name)
    (folder / "sentences.txt").write_text("".join(f"{line}\n" for line in sentences(finding)))
