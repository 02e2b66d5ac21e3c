"""The page with a timeline: its document, its script's data, and its stories."""

import json
from html import unescape
from pathlib import Path

import pytest

from schedtrace.errors import UsageError
from schedtrace.explain.request import explain_request
from schedtrace.explain.step import explain_step
from schedtrace.model.manifest import write_manifest
from schedtrace.present.pages.story import request_page, step_page
from schedtrace.present.renderers.html import fragment
from schedtrace.present.report.data import step_ranges
from schedtrace.present.report.page import in_script, stories
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, header, manifest, run_folder, step, write_trace

RECORDED = Path(__file__).parents[3] / "data" / "findings"


@pytest.mark.parametrize(
    ("steps", "found"), [([], []), ([3], [[3, 3]]), ([5, 3, 4, 9, 3], [[3, 5], [9, 9]])], ids=str
)
def test_ranges(steps, found):
    assert step_ranges(steps) == found


def test_data_cannot_end_its_element():
    text = "</script><!--\u2028&\u2029"
    written = in_script({"a": text})
    assert not set(written) & set("<>&\u2028\u2029")
    assert json.loads(written) == {"a": text}
    with pytest.raises(ValueError, match="not JSON compliant"):
        in_script({"a": float("nan")})


@pytest.fixture
def run(tmp_path):
    return run_folder(
        tmp_path / "run", step(0, got={"a": 1}, new="a", arrived=[arrival("a", 0, 0)]), about=manifest()
    )


def test_the_command_writes_one_private_file_that_allows_only_what_stands_in_it(cli, run):
    code, out, err = cli("report", run)
    file = run / "report.html"
    assert (code, err) == (0, "")
    assert out.split() == [str(file), "0.1", "MB"]
    assert file.stat().st_mode & 0o777 == 0o600
    html = file.read_text()
    assert html.count("<style>") == html.count("<script>") == 1
    assert "default-src 'none'; style-src 'sha256-" in unescape(html)
    assert " style=" not in html.partition("<script>")[0]


def test_an_existing_file_is_replaced_only_when_asked(cli, run):
    assert cli("report", run)[0] == 0
    code, out, err = cli("report", run)
    assert (code, out) == (2, "")
    assert err == f"schedtrace: {run / 'report.html'} exists already: --force replaces it\n"
    assert cli("report", run, "--force")[0] == 0


def test_the_verdict_is_marked_by_how_bad_it_is(cli, run):
    assert cli("report", run)[0] == 0
    assert '<div id="verdict">' in (run / "report.html").read_text()  # nothing limited it
    kv = RECORDED / "kv-bound" / "shows"
    file = run / "kv.html"
    assert cli("report", kv, "-o", file)[0] == 0
    severity = json.loads(cli("analyze", kv, "--format", "json")[1])["runs"][0]["findings"][0]["severity"]
    assert f'<div id="verdict" class="{severity}">' in file.read_text()


def test_two_runs_have_their_verdict_once(cli, run):
    code, out, _ = cli("report", run, run)
    assert (code, out.split()[0]) == (0, str(run / "comparison.html"))
    html = (run / "comparison.html").read_text().partition("<script")[0]
    assert html.count("Verdict: ") == 1
    assert html.count("servers have no trials") == 1


def test_what_cannot_be_is_one_line(cli, run, tmp_path):
    assert cli("report", run, run, run)[0] == 2
    assert cli("report", run, run, "--last", "1s")[0] == 2
    code, _, err = cli("report", run, "-o", tmp_path / "none" / "x.html")
    assert (code, err.count("\n")) == (3, 1)


def test_of_two_runs_a_note_says_which_it_is_about(cli, run, tmp_path, monkeypatch):
    for module in ("data", "page"):
        monkeypatch.setattr(f"schedtrace.present.report.{module}.MOST_ENGINES", 2)
    for rank in range(3):
        run_folder(tmp_path / "many", step(0, got={"a": 1}, new="a"), engine_rank=rank)
    assert cli("report", run, tmp_path / "many", "-o", tmp_path / "both.html")[0] == 0
    assert '<p class="hint">New run: 2 of 3 engines are drawn;' in (tmp_path / "both.html").read_text()


HOSTILE = "a/<b>\u202e&"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two ranks, each with two steps and a request."""
    folder = tmp_path_factory.mktemp("two")
    write_manifest(folder, manifest(label="two"))
    for rank, name in enumerate(["t1", HOSTILE]):
        lines = [step(0, got={name: 9}, new=[name], arrived=[arrival(name, 0)]), step(1, got={name: 1})]
        write_trace(folder / f"engine-{rank}.jsonl", header(engine_rank=rank), *lines)
    return read_run(folder)


@pytest.fixture(scope="module")
def second(ranks):
    """The timeline of rank 1."""
    return make_timeline(ranks.traces[1], ranks.manifest, whole=True)


def test_stories_are_the_pages_of_step_and_request_by_their_links(ranks, second):
    found = stories(ranks, second, [(1, 0)], [HOSTILE, "t1", "gone"])
    assert found == {
        "step=0&rank=1": fragment(step_page(explain_step(ranks, 0, engine=1)).sections, rank=1, level=2),
        "request=a%2F%3Cb%3E%5Cu202e%26": fragment(
            request_page(explain_request(ranks, HOSTILE)).sections, rank=1, level=2
        ),
    }
    assert 'href="#request=a%2F%3Cb%3E%5Cu202e%26"' in found["step=0&rank=1"]
    assert 'href="#step=0&amp;rank=1"' in found["request=a%2F%3Cb%3E%5Cu202e%26"]


def test_a_step_that_is_not_there_is_an_error(ranks, second):
    with pytest.raises(UsageError, match="step 7"):
        stories(ranks, second, [(1, 7)], [])
