"""Make the pictures of the README again: ``python scripts/pictures.py [RUN]``, about a minute.

Records 24 prompts of 450 + 200 tokens with a small KV cache on vLLM's CPU engine unless a run is given. Writes
``docs/pictures/analyze.svg`` and ``report-light.png``, ``report-dark.png``. Needs Chromium and Playwright.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.ansi import AnsiDecoder
from rich.console import Console

from tests.browser.chromium import ARGUMENTS, chromium

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH = 80
SVG = """<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
<rect width="{terminal_width}" height="{terminal_height}" rx="8" fill="#0c0c0c"/>
<g transform="translate(8, 8)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""rich's own format has the address of a font in it; pictures here refer to nothing."""


def schedtrace(*arguments: str) -> str:
    """What the command prints on a terminal of 80 columns that has colours."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "schedtrace", *arguments]
    return subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout


def record(folder: Path) -> Path:
    """The run that the README tells about."""
    options = "--load-format dummy --num-gpu-blocks-override 45 --num-prompts 24 --input-len 450 --output-len 200 --trials 3"
    schedtrace("run", "--model", "examples/tiny-qwen3", *options.split(), "--output", str(folder), "--label", "kv")
    return folder / "kv"


def terminal(text: str, file: Path, title: str) -> None:
    """Text with colours as a picture."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115  # it lives as long
    for line in AnsiDecoder().decode(text):
        console.print(line)
    file.write_text(console.export_svg(title=title, code_format=SVG, unique_id="schedtrace"))


def screenshots(page_file: Path) -> None:
    """The report in both colour schemes."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme=scheme)
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-painted]")
            page.screenshot(path=PICTURES / f"report-{scheme}.png")
        browser.close()


def main(run: Path | None) -> None:
    """Record if no run is given, then draw."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = run or record(Path(folder))
        terminal(schedtrace("analyze", str(run)), PICTURES / "analyze.svg", "schedtrace analyze logs/kv")
        schedtrace("report", str(run), "-o", f"{folder}/report.html")
        screenshots(Path(folder) / "report.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
