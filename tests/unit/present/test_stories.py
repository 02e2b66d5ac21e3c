import pytest

from schedtrace.errors import UsageError
from schedtrace.explain.request import explain_request
from schedtrace.explain.step import explain_step
from schedtrace.model.manifest import write_manifest
from schedtrace.present.pages.story import request_page, step_page
from schedtrace.present.renderers.html import fragment
from schedtrace.present.report.page import stories
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, header, manifest, step, write_trace

HOSTILE = "a/<b>\u202e&"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two ranks, each with two steps and a request."""
    folder = tmp_path_factory.mktemp("two")
    write_manifest(folder, manifest(label="two"))
    for rank, name in enumerate(["t1", HOSTILE]):
        lines = [step(0, got={name: 9}, new=[name], arrived=[arrival(name, 0)]), step(1, got={name: 1})]
        write_trace(folder / f"engine-{rank}.jsonl", header(engine_rank=rank), *lines)
    return read_run(folder)


@pytest.fixture(scope="module")
def second(run):
    """The timeline of rank 1."""
    return make_timeline(run.traces[1], run.manifest, whole=True)


def test_stories_are_the_pages_of_step_and_request_by_their_links(run, second):
    found = stories(run, second, [(1, 0)], [HOSTILE, "t1", "gone"])
    assert found == {
        "step=0&rank=1": fragment(step_page(explain_step(run, 0, engine=1)).sections, rank=1, level=2),
        "request=a%2F%3Cb%3E%5Cu202e%26": fragment(
            request_page(explain_request(run, HOSTILE)).sections, rank=1, level=2
        ),
    }
    assert 'href="#request=a%2F%3Cb%3E%5Cu202e%26"' in found["step=0&rank=1"]
    assert 'href="#step=0&amp;rank=1"' in found["request=a%2F%3Cb%3E%5Cu202e%26"]


def test_a_step_that_is_not_there_is_an_error(run, second):
    with pytest.raises(UsageError, match="step 7"):
        stories(run, second, [(1, 7)], [])
