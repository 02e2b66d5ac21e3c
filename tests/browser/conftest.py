"""The system's Chromium, one for all tests, and pages opened in it that watch what they do."""

import shutil
from dataclasses import dataclass, field
from typing import Any

import pytest

from schedtrace.cli.main import main

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT = 1280, 900


@pytest.fixture(scope="module")  # until it ends, its event loop keeps other files from running theirs
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page that is open, what it asked for, and what it complained of."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def js(self, script: str) -> Any:
        return self.page.evaluate(script)

    def painted(self) -> None:
        """Wait until what was asked for is drawn."""
        self.js("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture(scope="session")
def page_of(tmp_path_factory):
    """``page_of(run, ...)``: the file that ``schedtrace report`` writes, made once for all tests."""
    made = {}
    folder = tmp_path_factory.mktemp("pages")

    def write(*runs):
        if runs not in made:
            made[runs] = folder / f"{len(made)}.html"
            assert main(["report", *map(str, runs), "--output", str(made[runs])]) == 0
        return made[runs]

    return write


@pytest.fixture
def look(chromium):
    """``look(file, hash)``: the page, drawn; it must ask for nothing and complain of nothing."""
    opened = []

    def open_page(file, hash_="", **options):
        page = chromium.new_page(**{"viewport": {"width": WIDTH, "height": HEIGHT}, **options})
        one = Opened(page)
        page.on("request", lambda request: one.requests.append(request.url))
        page.on("console", lambda message: one.complaints.append(message.text))
        page.on("pageerror", lambda error: one.complaints.append(str(error)))
        page.goto(f"{file.as_uri()}{hash_}")
        page.wait_for_selector("#engines[data-painted]", state="attached")
        one.painted()
        opened.append((one, f"{file.as_uri()}{hash_}"))
        return one

    yield open_page
    for one, address in opened:
        assert one.complaints == []
        assert [url for url in one.requests if url.partition("#")[0] != address.partition("#")[0]] == []
        one.page.close()
