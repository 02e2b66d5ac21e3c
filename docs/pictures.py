# ruff: noqa: INP001  # a script to run, no package
"""Make the pictures of the README again: ``python docs/pictures.py [RUN]``.

They show the run of ``schedtrace demo``, unless another is given: 24 prompts of 450 + 200 tokens with a small
KV cache on vLLM's CPU engine. Writes ``analyze.svg``, ``report-light.png`` and ``report-dark.png`` to
``docs/pictures``. Needs Chromium.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.ansi import AnsiDecoder
from rich.console import Console

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH = 80
FONT = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace'
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FONT_OF_THE_WEB = re.compile(r"@font-face {.*?}\n", re.DOTALL)


def schedtrace(folder: Path, *arguments: str, **environment: str) -> str:
    """Return what the command prints when it is started in the folder."""
    command = [sys.executable, "-m", "schedtrace", *arguments]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, check=True, text=True, stdout=subprocess.PIPE
    )
    return done.stdout


def terminal(text: str, title: str) -> str:
    """Text with colours as an SVG picture that refers to nothing."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in AnsiDecoder().decode(text):
        console.print(line)
    picture = console.export_svg(title=title, unique_id="schedtrace")
    return FONT_OF_THE_WEB.sub("", picture).replace("Fira Code, monospace", FONT)


def screenshots(report: Path) -> None:
    """Return the page in both colour schemes."""
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)))
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1280, "height": 1150}, color_scheme=scheme)
            page.goto(report.as_uri())
            page.wait_for_selector("#engines[data-painted]", state="attached")
            page.screenshot(path=PICTURES / f"report-{scheme}.png")
        browser.close()


def main(given: str | None) -> None:
    """Draw the pictures of a run; None: of the run of ``schedtrace demo``."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        run = str(Path(given).resolve()) if given else "logs/kv"
        if not given:
            shutil.copytree(ROOT / "schedtrace" / "demo" / "kv", folder / run)
        text = schedtrace(folder, "analyze", run, FORCE_COLOR="1", COLUMNS=str(WIDTH), TERM="xterm-256color")
        (PICTURES / "analyze.svg").write_text(terminal(text, "schedtrace analyze logs/kv"))
        schedtrace(folder, "report", run, "-o", "report.html")
        screenshots(folder / "report.html")


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
