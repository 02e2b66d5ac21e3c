"""What pages say of documents, where that is more than their fields; the queue, and a replayed fleet."""

from types import SimpleNamespace

import pytest

from schedtrace.diagnose.analyze import analyze
from schedtrace.explain.request import explain_request
from schedtrace.model.live import EngineQueue, EngineQueues, QueueEntry
from schedtrace.model.report import EffectiveSetting
from schedtrace.model.say import say
from schedtrace.model.story import Newcomer
from schedtrace.model.trace import Exit, Preemption
from schedtrace.model.what_if import Baseline, Configuration, Figure, LoadPart, ReplayedLoad, Replays
from schedtrace.present.pages.queue import queue_page
from schedtrace.present.pages.report import report_page
from schedtrace.present.pages.report_details import _cost, _where
from schedtrace.present.pages.run_header import SETTINGS, noteworthy
from schedtrace.present.pages.story import _late, request_page
from schedtrace.present.pages.what_if import fleet_answer, fleet_replay_page
from schedtrace.present.renderers import Format, renderer
from schedtrace.present.renderers.text import render
from schedtrace.present.sections import Page, table
from schedtrace.read.run import read_run
from tests.makers import arrival, finding, finish, header, run_folder, step, write_trace
from tests.unit.present.test_goldens import check, text_of


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


def test_an_estimated_cost_below_what_it_resolves_is_left_out(recorded_words):
    assert not _cost(finding(cost_ms=1e-9, cost_frac=1e-9, cost_error_frac=0.1))
    estimated = finding(cost_ms=12.0, cost_frac=0.01, cost_error_frac=0.1)
    recorded_words(_cost(estimated), _cost(finding(cost_ms=0.5, cost_frac=0.001, cost_of="run")))
    assert not _cost(finding())


def test_where_a_finding_shows_is_a_place_ranges_of_steps_and_an_example(recorded_words):
    told = finding(location="x.py:1", steps=[3, 4, 5], example=say("step {n}.", n="3"))
    recorded_words(_where(where, 1) for where in (told, finding(steps=[7]), finding(steps=list(range(100)))))


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


def entry(name, state="waiting", **fields):
    defaults = {"age_s": 1.5, "prompt_tokens": 100, "computed_tokens": 0, "output_tokens": 0, "blocks": 0}
    return QueueEntry(request_id=name, state=state, **{**defaults, **fields})


def queue(**fields):
    defaults = {
        "rank": 0,
        "pid": 12345,
        "model": "tiny",
        "unix_s": 1.0,
        "held_us": 20.0,
        "between_steps": True,
        "policy": "fcfs",
        "seats": 2,
        "token_budget": 256,
        "blocks_usable": 1023,
        "blocks_free": 1000,
        "running": [],
        "waiting": [],
        "exits": [],
    }
    return EngineQueue(**{**defaults, **fields})


def text(*queues, most=20):
    return renderer(Format.TEXT)(queue_page(EngineQueues(engines=list(queues)), most=most), width=80)


def test_who_waits_for_what_and_who_holds_it():
    running = [
        entry("r0", "running", computed_tokens=120, output_tokens=21, blocks=8),
        entry("r1", "running", computed_tokens=230, output_tokens=131, blocks=15, num_preemptions=1),
    ]
    waiting = [
        entry("r2", "preempted", refused_for="kv_blocks"),
        entry("r3", refused_for="kv_blocks"),
        entry("r4", "waiting_for_remote_kvs", refused_for="remote_kv_pending", age_s=0.25),
    ]
    assert (
        text(queue(running=running, waiting=waiting), most=2)
        == """\
Engine 0 (pid 12345): tiny
  2 of 2 seats taken, 3 waiting (fcfs); 23 of 1,023 KV blocks held
  waiting for kv_blocks (2), remote_kv_pending (1)

Waiting, next first

#  request  state        age  prompt  for
1  r2       preempted  1.5 s     100  kv_blocks
2  r3       waiting    1.5 s     100  kv_blocks
1 more: --limit shows more

Running, most KV blocks first

request    age  prompt  computed  output  blocks  preempted
r1       1.5 s     100       230     131      15          1
r0       1.5 s     100       120      21       8          -
"""
    )


def test_an_idle_engine():
    assert (
        text(queue(policy=None, blocks_usable=None, blocks_free=None))
        == """\
Engine 0 (pid 12345): tiny
  0 of 2 seats taken, 0 waiting
"""
    )


@pytest.mark.parametrize(
    ("state", "causes", "says"),
    [
        (
            "waiting",
            ["queue_empty"],
            "no request waited after the latest known step: these have arrived since",
        ),
        ("waiting", ["max_loras", "queue_empty"], "the cause of their wait is not known"),
        ("preempted", ["queue_empty"], "the cause of their wait is not known"),
        ("waiting", [], "the cause of their wait is not known"),
    ],
)
def test_who_has_arrived_since_the_latest_step_waits_for_nothing_yet(state, causes, says):
    exits = [Exit("waiting", "condition", cause) for cause in causes]
    assert f"  {says}" in text(queue(waiting=[entry("r1", state)], exits=exits))


def test_what_is_not_known_and_what_holds_all_up():
    shown = text(queue(waiting=[entry("r1")], pause="PAUSED_ALL", between_steps=False))
    assert "#  request    age  prompt  for\n1  r1       1.5 s     100\n" in shown
    assert "  waiting until a client resumes the scheduler\n" in shown
    assert "The scheduler is paused (PAUSED_ALL)." in shown
    assert "The engine has been within one step for 5 s and was read meanwhile." in shown


def test_a_pause_comes_before_the_limit_that_refused_them():
    waiting = [entry("r1", refused_for="max_num_seqs")]
    shown = " ".join(text(queue(waiting=waiting, pause="PAUSED_NEW")).split())
    assert (
        "waiting until a client resumes the scheduler; the latest step refused them for max_num_seqs" in shown
    )


def test_requests_that_are_left_out_are_counted():
    shown = text(queue(waiting=[entry("r2", refused_for="kv_blocks")], more_waiting=299_999), most=1)
    assert "0 of 2 seats taken, 300,000 waiting (fcfs)" in shown
    assert "the first 1 wait for kv_blocks (1)" in shown
    assert "299,999 more waiting requests are left out: an answer has 10,000 at most." in shown


def e2e(change, low, high):
    return Figure(
        name="E2E mean",
        unit="ms",
        higher_is_better=False,
        decided=False,
        value=100 * (1 + change),
        before=100.0,
        change_frac=change,
        low_frac=low,
        high_frac=high,
    )


def replays(engines, figure, **fields):
    part = LoadPart(requests=900, whole_requests=4000, begin_s=0.0, end_s=61.0)
    load = ReplayedLoad(
        label="fleet",
        path="fleet",
        recorded_version="0.32.0",
        trials=1,
        requests=900,
        prompt_tokens=200_000,
        output_tokens=70_000,
        by_arrival=True,
        part=part,
    )
    return Replays(
        load=load,
        vllm_version="0.32.0",
        step_times="Fitted to 900 steps of 20 engines.",
        settings={"data_parallel_size": 20, "router": "as recorded"},
        baseline=Baseline(judged_by="E2E mean", misfit_frac=0.02),
        configurations=[
            Configuration(changes={}, recorded=True, figures=[e2e(0.02, None, None)], kv_blocks=700),
            Configuration(
                changes={"data_parallel_size": engines, "router": "least-running"},
                figures=[figure],
                kv_blocks=700,
            ),
        ],
        notes=[],
        **fields,
    )


@pytest.mark.parametrize(
    ("engines", "figure", "begins"),
    [
        (20, e2e(-0.4, -0.5, -0.3), "The router is to blame:"),
        (20, e2e(0.4, 0.3, 0.5), "The router is not to blame:"),
        (20, e2e(-0.1, -0.3, 0.2), "The router is not to blame as far as"),
        (20, e2e(-0.1, None, None), "The router is not to blame as far as"),
        (12, e2e(0.4, 0.3, 0.5), "{now} instead of {before} serve requests more slowly:"),
        (30, e2e(-0.4, -0.5, -0.3), "{now} instead of {before} serve requests faster:"),
        (12, e2e(0.1, -0.1, 0.3), "{now} instead of {before} would do as far as"),
    ],
)
def test_the_answer_needs_an_interval_that_excludes_no_change(engines, figure, begins):
    assert fleet_answer(replays(engines, figure)).template.startswith(begins)


def test_without_the_judged_figure_there_is_no_answer():
    document = replays(12, e2e(0.1, 0.0, 0.2))
    document.configurations[1].figures = []
    assert fleet_answer(document).arguments == {}


def test_the_page():
    check("fleet-replay", text_of(fleet_replay_page(replays(12, e2e(0.4, 0.3, 0.5)))))
