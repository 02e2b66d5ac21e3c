"""Every command and format on a hostile run, its output checked character by character."""

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from schedtrace.cli.main import main
from schedtrace.model.printable import visible
from tests.fuzz import hostile

SGR = re.compile(r"\x1b\[[\d;]*m")
ESCAPED = re.compile(r"\\.")
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(?:.*?[^`])\1(?!`)")
MEANS_MORE = re.compile(r"<[a-z/!?]|[@#$~\[\]`]|://|&\w+;|(?<!\*)\*(?!\*)[^ *]", re.IGNORECASE)
"""Of what is left without code spans."""
FOUND = "--"
"""Ends the options; stands before an id that must be found."""
COLOUR = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
PLAIN = {"NO_COLOR": "1", "TERM": "dumb"}


def check(home: Path, random: Random) -> Iterator[str]:
    """What is wrong, one sentence each; nothing if all is well.

    Args:
        home: An empty folder.
        random: Makes every choice.
    """
    base, new = home / hostile.folder_name(random), home / f"{hostile.folder_name(random)}-new"
    ids = hostile.run(base, random)
    hostile.run(new, random)
    for command in _commands(home, base, new, random.choice(ids), random):
        yield from _wrong([str(word) for word in command])
    for file in (home / "csv").glob("*.csv"):
        if found := hostile.unsafe(file.read_text(encoding="utf-8")):
            yield f"{file.name} holds {sorted(found)!a}"
    shutil.rmtree(home)


def _commands(home: Path, base: Path, new: Path, known: str, random: Random) -> list[list[Any]]:
    wrong = hostile.hostile(random).replace("\x00", "") + random.choice(["", "?", "\udcff"]) or "?"
    path = wrong.replace("/", "")[:60]
    return [
        ["analyze", base],
        ["analyze", home, "--format", "json"],
        ["analyze", base, "--only", wrong],
        ["analyze", base / path],
        ["step", base, random.randrange(6), "--all"],
        ["step", base, random.randrange(6), "--format", "json"],
        ["step", base, wrong],
        ["request", base, FOUND, visible(known)],
        ["request", "--format", "json", base, FOUND, visible(known)],
        ["request", base, f"{wrong}?"],
        ["request", base, known[:1].replace("\x00", "") or "t"],
        ["diff", base, new],
        ["diff", base, new, "--format", "json"],
        ["diff", base, new, "--format", "markdown"],
        ["analyze", base, "--format", "markdown"],
        ["step", base, random.randrange(6), "--all", "--format", "markdown"],
        ["request", "--format", "markdown", base, FOUND, visible(known)],
        ["diff", base, base, "--fail-on", f"regression:{wrong}"],
        ["export", base, "--to", "csv", "--output", home / "csv", "--force"],
        ["export", base, "--to", "csv", "--output", home / "csv"],
        ["findings", wrong],
        [wrong],
        [f"--{wrong}"],
        ["run", "--model", home / "none", "--label", wrong],
        ["run", "--model", base, "--output", home, "--label", wrong, "--config", base / path],
    ]


def _wrong(words: list[str]) -> Iterator[str]:
    code, out, err = run(words, PLAIN)
    for name, text in (("stdout", out), ("stderr", err)):
        if found := hostile.unsafe(text):
            yield f"{words}: {name} holds {sorted(found)!a}"
    if "Traceback" in err:
        yield f"{words}: {err}"
    if FOUND in words and (code, err) != (0, ""):
        yield f"{words}: not found: {err}"
    if "json" in words and code == 0:
        json.loads(out)
    elif "markdown" in words and code == 0 and (broken := broken_markdown(out)):
        yield f"{words}: Markdown {broken}"
    elif "--format" not in words and words[0] in {"analyze", "step", "request", "diff"}:
        coloured = SGR.sub("", run(words, COLOUR)[1])
        if _trimmed(coloured) != _trimmed(out):
            yield f"{words}: colour changes what is printed"


def broken_markdown(text: str) -> str:
    """What data have become in it: cells, or more than text; empty if all is well."""
    cells = 0
    for line in text.splitlines():
        row = ESCAPED.sub("", line).count("|") if line.startswith("|") else 0
        if row and cells and row != cells:
            return f"has {row} cells in {line!a}"
        cells = row
        if found := MEANS_MORE.search(CODE_SPAN.sub("", line)):
            return f"takes {found[0]!a} for more than text in {line!a}"
    return ""


def run(words: list[str], terminal: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command line."""
    out, err = io.StringIO(), io.StringIO()
    before = dict(os.environ)
    for name in (*COLOUR, *PLAIN):
        os.environ.pop(name, None)
    os.environ.update(terminal)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = int(main(list(words)))
    finally:
        os.environ.clear()
        os.environ.update(before)
    return code, out.getvalue(), err.getvalue()


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]
