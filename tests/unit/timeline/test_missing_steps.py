"""Of what happened in missing steps nothing is claimed: no wait, no state, no first token."""

import pytest

from schedtrace.diagnose.analyze import analyze
from schedtrace.explain.request import explain_request
from schedtrace.explain.step import explain_step
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Events, Exit
from schedtrace.present.pages.report import report_page
from schedtrace.present.pages.story import request_page, step_page
from schedtrace.present.renderers import Format, renderer
from tests.makers import arrival, finish, step

FULL = Exit("waiting", "break", Cause.MAX_NUM_SEQS)


@pytest.fixture
def dropped():
    """Steps 1 to 3 are missing: ``b`` began in them, ``c`` came and went, ``d`` came and waits on."""
    arrivals = [arrival(name, 12_000) for name in "bcd"]
    gone = [finish("c", finished_us=35_000, arrived_us=12_000, scheduled_us=20_000)]
    return [
        step(0, got={"a": 100}, new="a", arrived=[arrival("a", -20)]),
        Events(at_us=30_000, arrived=arrivals, finished=gone, dropped_steps=3),
        step(4, got={"a": 1, "b": 1}, waiting=1, ended=FULL),
        step(5, got={"a": 1, "b": 1, "d": 100}, new="d"),
        Events(at_us=60_000, finished=[finish("b", finished_us=58_000, arrived_us=12_000)]),
    ]


def test_who_is_first_seen_running_does_not_wait_on(view_of, dropped):
    waits = view_of(*dropped).waits.select("request_id", "since_step", "left_step")
    assert waits.rows() == [("d", 4, 5)]


def test_states_begin_where_steps_are_known(view_of, dropped):
    states = view_of(*dropped).request_states.select("request_id", "state", "cause", "begin_us")
    of = {name: [row[1:] for row in states.rows() if row[0] == name] for name in "bcd"}
    assert of["c"] == []
    assert of["b"][0] == ("prefill", None, 40_000)
    assert of["d"][0] == ("waiting", "max_num_seqs", 40_000)


def test_states_of_a_file_that_was_begun_anew_begin_with_it(view_of):
    here = Events(at_us=70_000, arrived=[arrival("a", 10), arrival("w", 20)])
    lines = [here, step(7, got={"a": 1}, waiting=1, ended=FULL), step(8, got={"a": 1, "w": 9}, new="w")]
    view = view_of(*lines, first_step=7)
    assert view.waits.select("request_id", "since_step", "left_step").rows() == [("w", 7, 8)]
    begins = view.request_states.group_by("request_id").agg(begin="begin_us").sort("request_id")
    assert [(name, min(us)) for name, us in begins.rows()] == [("a", 70_000), ("w", 70_000)]


def test_an_arrival_between_steps_waits_from_when_it_was_queued_where_none_is_missing(view_of):
    lines = [step(0), Events(at_us=5, arrived=[arrival("a", 4_000)]), step(1, got={"a": 100}, new="a")]
    begins = view_of(*lines).request_states.filter(request_id="a")["begin_us"]
    assert begins.to_list()[0] == 4_000


def test_a_first_token_that_may_have_come_in_missing_steps_is_not_guessed(run_of, dropped):
    run = run_of("r", *dropped)
    assert explain_request(run, "b").ttft_ms is None
    life = explain_request(run, "c")
    assert (life.states, life.e2e_ms, life.ttft_ms) == ([], 23.0, None)


def test_every_answer_says_what_is_missing(run_of, dropped):
    run = run_of("r", *dropped[:1], *dropped[2:])
    lacks = "3 steps are missing, and so is any request that arrived or ended in them"
    said = f"! {run.path}/engine-0.jsonl: {lacks}"
    pages = [
        report_page(analyze([run])),
        step_page(explain_step(run, 4)),
        request_page(explain_request(run, "a")),
    ]
    texts = [" ".join(renderer(Format.TEXT)(page, width=200).split()) for page in pages]
    assert [said in text for text in texts] == [True] * 3
    assert "at least 0 requests" in texts[0] or "at least 1 request" in texts[0]


def test_a_whole_trace_is_counted_exactly(run_of):
    lines = [step(0, arrived=[arrival("a", 0)], got={"a": 1}, new="a"), step(1, finished=[finish("a")])]
    text = renderer(Format.TEXT)(report_page(analyze([run_of("r", *lines)])), width=200)
    assert "at least" not in text
    assert "  1 request, " in text
