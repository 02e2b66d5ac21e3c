"""What the commands print of recorded samples, to compare two checkouts.

``python tools/outputs.py DIR [code ...]``; without codes of all samples, which takes three minutes.
Each output is a file in DIR, for ``diff -r BEFORE AFTER``.
"""

import contextlib
import io
import os
import sys
from pathlib import Path

os.environ.update(COLUMNS="100", NO_COLOR="1")

from schedtrace.cli.main import app
from schedtrace.read.run import read_run

HERE = Path(__file__).parents[1]
SAMPLES = Path("tests/data/findings")


def printed(*arguments: str) -> str:
    """What a command prints, and its exit code."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = app(arguments, standalone_mode=False)
        except SystemExit as end:
            code = end.code
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what the command ended with
            code = f"{type(error).__name__}: {error}"
    return f"{text.getvalue()}exit: {code}\n"


def main(out: Path, codes: list[str]) -> None:
    """Write what is printed of these samples, or of all."""
    out.mkdir(parents=True, exist_ok=True)
    for sample in sorted(SAMPLES.iterdir()):
        if codes and sample.name not in codes:
            continue
        for kind in ("shows", "near-miss"):
            if not (sample / kind).is_dir():
                continue
            run = str(sample / kind)
            trace = next(iter(read_run(Path(run)).traces))
            steps = trace.steps["step"]
            ids = trace.arrivals["request_id"].unique().sort()
            name = f"{sample.name}.{kind}"
            commands = {
                "analyze.json": ["analyze", run, "--format", "json"],
                "analyze.txt": ["analyze", run, "--details"],
                "diff.json": ["diff", str(sample / "shows"), run, "--format", "json"],
            }
            for at in {0, len(steps) // 3, len(steps) // 2, len(steps) - 1}:
                commands[f"step{steps[at]}.json"] = ["step", run, str(steps[at]), "--format", "json"]
            for at in {0, len(ids) // 2, len(ids) - 1} if len(ids) else ():
                commands[f"request{at}.json"] = ["request", run, str(ids[at]), "--format", "json"]
            for command, arguments in commands.items():
                (out / f"{name}.{command}").write_text(printed(*arguments))


if __name__ == "__main__":
    os.chdir(HERE)
    main(Path(sys.argv[1]), sys.argv[2:])
