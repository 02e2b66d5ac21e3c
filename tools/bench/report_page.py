"""Size and speed of the report page: ``python tools/bench/report_page.py [STEPS [SEATS [FOLDER]]]``.

Makes a trace of that size (50,000 steps, 256 running), or takes the run in FOLDER. Prints one JSON object:
the processor's seconds of ``analyze`` and what ``report`` adds, the file's size, when the page is painted,
and how long a redraw takes over 200 zooms, from the whole run to one step. Needs a Chromium.
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from schedtrace.diagnose.analyze import Timelines, analyze_run
from schedtrace.present.report.page import run_html
from schedtrace.read.run import read_run
from tools.bench.big_trace import write_big_trace

ZOOMS = """() => {
    const {view, whole, zoomTo, draw, engines} = schedtrace, took = [];
    let random = 7;
    const chance = () => (random = random * 16807 % 2147483647) / 2147483647;
    for (let i = 0; i < 200; i++) {
        const all = whole.end - whole.begin, length = all * 10 ** (-4 * chance());
        const at = whole.begin + chance() * (all - length);
        zoomTo(at, at + length);
        const before = performance.now();
        draw();
        for (const e of engines) e.canvas.getContext("2d").getImageData(0, 0, 1, 1);  // waits for the raster
        took.push(performance.now() - before);
    }
    return took.sort((a, b) => a - b);
}"""


def made(folder: Path) -> dict[str, float]:
    """Write ``report.html`` in the folder; the processor's seconds for each part."""
    run = read_run(folder)
    times = [time.process_time()]
    timelines = Timelines(run)
    report = analyze_run(run, timelines=timelines)
    times.append(time.process_time())
    html = run_html(report, run, timelines)
    times.append(time.process_time())
    (folder / "report.html").write_text(html)
    return {
        "analyze_s": round(times[1] - times[0], 2),
        "page_s": round(times[2] - times[1], 2),
        "kb": len(html.encode()) // 1000,
    }


def drawn(file: Path) -> dict[str, float]:
    """Open the page: milliseconds until it is painted, of redraws, and megabytes of its script."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(file.as_uri())
        page.wait_for_selector("#engines[data-painted]", state="attached")
        painted = int(page.get_attribute("#engines", "data-painted"))
        took = page.evaluate(ZOOMS)
        memory = page.evaluate("performance.memory.usedJSHeapSize") // 1_000_000
        browser.close()
    return {
        "painted_ms": painted,
        "zoom_median_ms": round(took[len(took) // 2], 1),
        "zoom_p95_ms": round(took[int(0.95 * len(took))], 1),
        "heap_mb": memory,
    }


def main(steps: int, seats: int, folder: Path) -> None:
    """Measure one run."""
    if not list(folder.glob("engine-*.jsonl")):
        write_big_trace(folder / "engine-0.jsonl", steps, seats, version=2)
    print(json.dumps({"steps": steps, "seats": seats, **made(folder), **drawn(folder / "report.html")}))


if __name__ == "__main__":
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory() as temporary:
        main(
            int(given[0]) if given else 50_000,
            int(given[1]) if len(given) > 1 else 256,
            Path(given[2]) if len(given) > 2 else Path(temporary),
        )
