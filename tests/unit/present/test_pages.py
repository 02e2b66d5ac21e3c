"""What pages say of documents, where that is more than their fields."""

from types import SimpleNamespace

import pytest

from schedtrace.diagnose.analyze import analyze
from schedtrace.explain.request import explain_request
from schedtrace.model.report import EffectiveSetting, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.story import Newcomer
from schedtrace.model.trace import Preemption
from schedtrace.present.pages.report import report_page
from schedtrace.present.pages.report_details import _cost, _where
from schedtrace.present.pages.run_header import SETTINGS, noteworthy
from schedtrace.present.pages.story import _late, request_page
from schedtrace.present.renderers.text import render
from schedtrace.present.sections import Page, table
from schedtrace.read.run import read_run
from tests.makers import arrival, finish, header, run_folder, step, write_trace
from tests.unit.present.test_goldens import text_of


def test_a_reset_of_the_prefix_cache_is_counted_apart_from_preemptions(tmp_path):
    lost = [Preemption("a", 10, "b", 1), Preemption("a", 10, None, 1, in_schedule=False)]
    arrivals = [arrival("a", 0, 0)]
    lines = [
        step(0, got={"a": 10}, new="a", arrived=arrivals),
        step(1, preempted=lost[:1], waiting=1),
        step(2, got={"a": 10}, resumed="a"),
        step(3, preempted=lost[:1], waiting=1),
        step(4, got={"a": 10}, resumed="a"),
        step(5, preempted=lost[1:], waiting=1),
    ]
    life = explain_request(read_run(run_folder(tmp_path / "r", *lines)), "a")
    assert (life.num_preemptions, life.num_cache_resets) == (2, 1)
    head = " ".join(text_of(request_page(life), 160).splitlines()[:2])
    assert head.endswith("; 2 preemptions, 1 time preempted by a reset of the prefix cache")


def found(**fields):
    told = dict.fromkeys(Finding.__struct_fields__) | {"cost_of": "busy time"}
    return Finding(**told | {"evidence": Evidence(), "steps": []} | fields)


def test_an_estimated_cost_below_what_it_resolves_is_left_out(recorded_words):
    assert not _cost(found(cost_ms=1e-9, cost_frac=1e-9, cost_error_frac=0.1))
    estimated = found(cost_ms=12.0, cost_frac=0.01, cost_error_frac=0.1)
    recorded_words(_cost(estimated), _cost(found(cost_ms=0.5, cost_frac=0.001, cost_of="run")))
    assert not _cost(found())


def test_where_a_finding_shows_is_a_place_ranges_of_steps_and_an_example(recorded_words):
    told = found(location="x.py:1", steps=[3, 4, 5], example=say("step {n}.", n="3"))
    recorded_words(_where(told), _where(found(steps=[7])), _where(found(steps=list(range(100)))))


@pytest.mark.parametrize("on_its_way_us", [30, 0])
def test_who_came_too_late_was_on_the_way_or_came_after_the_call(on_its_way_us, recorded_words):
    came = Newcomer(
        request_id="a", prompt_tokens=9, max_tokens=None, queued_us=120, on_its_way_us=on_its_way_us
    )
    recorded_words(_late(SimpleNamespace(start_us=0, schedule_us=100, late=[came]), everything=False))


GIVEN = [
    EffectiveSetting(name="max_num_batched_tokens", value=16384, origin="given"),
    EffectiveSetting(
        name="async_scheduling",
        value=False,
        origin="overridden",
        given=True,
        explanation=say("True was given"),
    ),
    EffectiveSetting(name="watermark", value=1e-05, origin="given", inert=True, explanation=say("no effect")),
    EffectiveSetting(name="cudagraph_capture_sizes", value=[1, 2, 4, 8, 16, 512], origin="derived"),
]


def test_every_setting_is_a_row_with_value_origin_and_note():
    text = render(Page(GIVEN, lambda shown: [table(shown, SETTINGS)]), width=100)
    assert [line.split() for line in text.splitlines() if line.strip()] == [
        ["setting", "value", "origin"],
        ["max_num_batched_tokens", "16,384", "given"],
        ["async_scheduling", "False", "overridden", "True", "was", "given"],
        ["watermark", "1e-05", "given,", "inert", "no", "effect"],
        ["cudagraph_capture_sizes", "1,", "2,", "4", "...", "512", "(6", "sizes)", "derived"],
    ]


def test_only_inert_and_overridden_settings_are_worth_a_line(recorded_words):
    recorded_words(noteworthy(GIVEN))
    assert not noteworthy([GIVEN[0], GIVEN[3]])


@pytest.fixture
def shown(tmp_path):
    """``shown(finished="ab", full=True)``: the report of three requests, a, b and c."""

    def show(*, finished="", trial=None, full=False):
        arrived = [arrival(name, trial) for name in "abc"]
        lines = [
            step(0, got=dict.fromkeys("abc", 10), new="abc", arrived=arrived, trial=trial),
            step(1, finished=[finish(name) for name in finished], trial=trial),
        ]
        about = header(trial_ids=trial is not None)
        write_trace(tmp_path / "engine-0.jsonl", about, *lines)
        return text_of(report_page(analyze([read_run(tmp_path)]), full=full))

    return show


@pytest.mark.parametrize(
    ("finished", "trial", "says"),
    [
        ("abc", None, "3 requests, "),
        ("", None, "0 of 3 requests finished, "),
        ("ab", None, "2 of 3 requests finished, "),
        ("abc", 1, "3 requests in 1 trial, "),
    ],
)
def test_the_first_line_says_how_many_requests_came_and_finished(shown, finished, trial, says):
    assert f"\n  {says}" in shown(finished=finished, trial=trial)


def test_the_table_of_a_server_has_no_trial_and_no_first_step(shown):
    of_server, of_trial = shown(finished="abc", full=True), shown(finished="abc", trial=1, full=True)
    assert all(word in of_trial for word in ("first step", "new requests", "trial"))
    assert not any(word in of_server for word in ("first step", "new requests", "trial"))
