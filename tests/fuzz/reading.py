"""Every command that reads a run, on a run that was made to break it; and how that ended."""

import contextlib
import io
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from schedtrace.cli.main import main
from schedtrace.errors import ExitCode, SchedtraceError
from schedtrace.read.run import find_runs, read_run
from tests.fuzz import meaning, mutate

SOUND = mutate.SAMPLE
"""What ``diff`` and ``report`` compare with."""
FORMATS = ("text", "json", "markdown", "html")
EXPORTS = ("parquet", "csv", "jsonl", "perfetto", "chrome")
FINE = {int(code) for code in (ExitCode.OK, ExitCode.FINDINGS, ExitCode.USAGE, ExitCode.INPUT)}


@dataclass(frozen=True)
class Ended:
    """How one command ended."""

    words: list[str]
    how: str
    """``0``, ``2`` or ``3``: its exit code; else what is wrong."""
    cpu_s: float
    peak_kb: int
    """Of the process so far."""


def case(random: Random) -> dict[str, bytes]:
    """The files of a run: broken by their meaning or, now and then, as bytes."""
    return meaning.case(random) if random.random() < 0.85 else mutate.case(random)


def commands(files: dict[str, bytes], run: Path, out: Path, random: Random) -> list[list[str]]:
    """Command lines that read a run, in a random order; ``recorded`` is what replays begin with.

    Args:
        files: What is in the run.
        run: Its folder, or its only file.
        out: A folder for what is written.
        random: Makes every choice.
    """
    try:
        numbers, ids = meaning.steps(files), meaning.ids(files)
    except (ValueError, AttributeError, TypeError):  # broken as bytes
        numbers, ids = [], []
    number = random.choice([*numbers, 0, 1, 10**18])
    name = random.choice([*ids, "r0", "nobody"]) or "r"
    shown = random.choice(FORMATS)
    span = random.choice([["--last", "1"], ["--from", "0.01"], ["--to", "5ms"], ["--last", "1h"], []])
    pair = random.sample([str(run), str(SOUND)], 2) if random.random() < 0.8 else [str(run), str(run)]
    found = [
        ["analyze", str(run), *random.choice([[], ["--details"]]), "--format", shown, *span],
        ["analyze", str(run), "--details", "--format", shown],
        ["report", str(run), "--output", str(out / "report.html"), "--force", *span],
        ["report", *pair, "--output", str(out / "both.html"), "--force"],
        ["step", "--format", shown, "--all", "--", str(run), str(number)],
        ["step", "--format", shown, "--engine", str(random.choice([0, 1])), "--", str(run), str(number)],
        ["request", "--format", shown, "--", str(run), name],
        ["diff", *pair, "--format", shown],
        ["export", str(run), "--to", random.choice(EXPORTS), "--output", str(out / "export"), "--force"],
        ["export", str(run), "--to", random.choice(EXPORTS), "--output", str(out / "export"), "--force"],
        ["watch", str(run), "--once"],
        ["recorded", str(run)],
    ]
    random.shuffle(found)
    return found


def ends(words: list[str]) -> Ended:
    """Run one command line in this process."""
    if words[0] == "recorded":
        return timed(words, lambda: _recorded(Path(words[1])))
    return timed(words, lambda: _command(words))


def timed(words: list[str], run: Callable[[], str]) -> Ended:
    """Run something, and return how it ended."""
    began = time.process_time()
    try:
        how = run()
    except Exception as error:  # noqa: BLE001  # that is what is counted
        how = _where(error)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Ended(words, how, time.process_time() - began, peak)


def runs(random: Random, home: Path, most: int) -> Iterator[tuple[list[str], Callable[[], Ended]]]:
    """Some command lines on one case, each with what runs it; the case lies in ``home`` meanwhile.

    Args:
        random: Makes every choice.
        home: An empty folder.
        most: So many commands.
    """
    files = case(random)
    run, out = home / "run", home / "out"
    run.mkdir()
    out.mkdir()
    for name, content in files.items():
        (run / name).write_bytes(content)
    path = run if any(name.startswith("engine") for name in files) else run / next(iter(files))
    for words in commands(files, path, out, random)[:most]:
        yield words, lambda words=words: ends(words)  # type: ignore[misc]  # a default binds it


def _command(words: list[str]) -> str:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = int(main(words))
    except Exception as error:  # noqa: BLE001  # that is what is counted
        return _where(error)
    if "Traceback" in err.getvalue():
        return err.getvalue()
    if code not in FINE:
        return f"exit code {code}: {err.getvalue()[:300]}"
    if code and not err.getvalue():
        return f"exit code {code} without a word"
    return str(code)


def _recorded(path: Path) -> str:
    from schedtrace.whatif.prediction import recorded_load  # takes a second

    try:
        recorded_load(read_run(find_runs([path])[0]))
    except SchedtraceError as error:
        return str(int(error.exit_code))
    except Exception as error:  # noqa: BLE001  # likewise
        return _where(error)
    return "0"


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/schedtrace/" in frame.filename]
    places = [f"{frame.filename.rpartition('/schedtrace/')[2]}:{frame.lineno}" for frame in ours[-3:]]
    return f"{type(error).__name__} in {' > '.join(places)}: {str(error)[:200]}"
