"""``schedtrace demo``: the recorded run in the package is whole, and is analyzed as any other."""

import webbrowser
from importlib.resources import files

from schedtrace.cli.demo import RUN
from schedtrace.diagnose.analyze import analyze_run
from schedtrace.read.run import read_run


def test_the_run_is_copied_analyzed_and_drawn(cli, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    folder = tmp_path / "a" / "b"
    code, out, _ = cli("demo", folder)
    page = folder / "report.html"
    assert (code, opened) == (0, [])
    assert page.read_text().startswith("<!doctype html>")
    assert str(page) in out
    run = read_run(folder / RUN)
    assert run.problems == []
    assert analyze_run(run).findings[0].code == "kv-bound"


def test_the_page_is_opened_where_that_is_asked_for(cli, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    for name in ("analyze", "report"):  # the test above calls them
        monkeypatch.setattr(f"schedtrace.cli.demo.{name}", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    assert cli("demo", "here", "--open")[0] == 0
    assert opened == [(tmp_path / "here" / "report.html").as_uri()]


def test_a_folder_that_holds_something_is_left_alone(cli, tmp_path):
    (tmp_path / "mine").write_text("")
    code, _, err = cli("demo", tmp_path)
    assert (code, len(err.splitlines())) == (2, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_run_has_no_name_of_a_machine():
    run = read_run(files("schedtrace") / "demo" / RUN)
    assert (run.traces[0].header.host, run.manifest.host) == ("host", "host")
