"""Stories of single steps, and their words."""

from functools import partial
from pathlib import Path

import pytest

from schedtrace.errors import UsageError
from schedtrace.explain.step import explain_step, step_stops, stop_values, victim_values, victims
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.message import Code, Count, Number, Requests, Setting, filled, plain
from schedtrace.model.trace import ChunkCap, Events, Exit, Preemption, ScheduledRequest
from schedtrace.model.trace_facts import DummyBatch
from schedtrace.present.pages.story import step_page
from schedtrace.present.report.step_sentences import step_words
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, manifest, run_folder, step
from tests.rank_traces import prefills, write_ranks
from tests.unit.present.test_goldens import check, text_of


@pytest.fixture
def story_of(run_of):
    """``story_of(step(0), ...)``: the story of the first of these steps."""
    return lambda *lines, **header: explain_step(run_of("r", *lines, **header), lines[0].step)


def test_who_came_and_went_is_told_from_the_steps_line_and_from_between(run_of):
    run = run_of(
        "r",
        step(0, start=0, got={"a": 1}, arrived=[arrival("a", -10, -5)]),
        Events(at_us=500_000, arrived=[arrival("b", 400, 450)], finished=[finish("a", finished_us=1_500)]),
        step(1, start=600_000, got={"b": 1}, arrived=[arrival("c", 590_000, 591_000, prompt_tokens=7)]),
    )
    first, story = explain_step(run, 0), explain_step(run, 1)
    arrivals = [
        (newcomer.request_id, newcomer.on_its_way_us, newcomer.prompt_tokens) for newcomer in story.arrived
    ]
    assert arrivals == [("b", 50, 100), ("c", 1000, 7)]
    assert [(one.request_id, one.status) for one in story.finished] == [("a", "LENGTH_CAPPED")]
    assert ([newcomer.request_id for newcomer in first.arrived], first.finished) == (["a"], [])


@pytest.mark.parametrize(("came", "late"), [(900, ["b"]), (1000, ["b"]), (1001, [])])
def test_who_reached_the_front_end_before_the_output_was_back_came_too_late(story_of, came, late):
    after = step(1, start=2000, arrived=[arrival("b", came, 1500), arrival("c", None, 1500)])
    story = story_of(step(0, start=0, back=1000, got={"a": 1}), after)
    assert [one.request_id for one in story.late] == late


def test_what_each_request_got_says_what_it_worked_on_and_what_cut_it(run_of):
    rows = [
        ScheduledRequest("a", 100, 1),
        ScheduledRequest("b", 0, 30, "resumed"),
        ScheduledRequest("c", 0, 20, "new"),
        ScheduledRequest("x", 5, 1),
    ]
    caps = [ChunkCap("c", Cap.LONG_PREFILL, 100, 50), ChunkCap("c", Cap.TOKEN_BUDGET, 50, 20)]
    first = step(0, arrived=[arrival(name, 0, 0) for name in "abc"], preempted=[Preemption("b", 40)])
    scheduled = explain_step(run_of("r", first, step(1, requests=rows, caps=caps)), 1).scheduled
    assert [
        (row.request_id, row.work, row.wanted_tokens, row.caps, row.prompt_tokens) for row in scheduled
    ] == [
        ("a", "decode", None, [], 100),
        ("b", "recompute", None, [], 100),
        ("c", "prefill", 100, ["long_prefill_token_threshold", "token_budget"], 100),
        ("x", None, None, [], None),
    ]


def test_exits_alike_that_follow_each_other_are_one_with_typed_arguments(story_of, recorded_words):
    place = {"via": "source", "location": "scheduler.py:10"}
    skips = [Exit("waiting", "continue", Cause.LORA_CAP, name, 900, **place) for name in "abcde"]
    skips[-1].count = 3
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "f", 800, **place)
    [skipped, stopped] = story_of(step(0, waiting=9, exits=[*skips, ended])).stops
    assert (skipped.count, skipped.request_ids) == (7, list("abcde"))
    recorded_words(skipped.message, stopped.message)
    assert [part for part in stopped.message.parts() if not isinstance(part, str)] == [
        *(
            Code("scheduler.py:10"),
            Setting("max_num_seqs"),
            Number(8),
            Requests(["f"], 1),
            Count(800, "token"),
        )
    ]


KNOWN = {"via": "source"}
SKIP, LOST = partial(Exit, "waiting", "continue", Cause.LORA_CAP), partial(Preemption, "v")
EXITS = [
    [Exit("waiting", "gate", Cause.PREEMPTED_THIS_STEP, None, 5)],
    [Exit("waiting", "condition", Cause.TOKEN_BUDGET, None, **KNOWN)],
    [Exit("running", "continue", Cause.OUTPUT_IN_FLIGHT, "a", **KNOWN)],
    [Exit("running", "continue", Cause.OUTPUT_IN_FLIGHT, "a", 9, "pipeline_parallel", **KNOWN)],
    [Exit("running", "continue", Cause.OUTPUT_IN_FLIGHT, "a", 9, "diffusion_read_only", **KNOWN)],
    [Exit("waiting", "break", Cause.SPEC_DECODE_PADDING, "a", 9, "max_model_len", **KNOWN)],
    [Exit("running", "break", Cause.KV_BLOCKS, "a", 9, blocks_needed=1, blocks_free=0, **KNOWN)],
    [Exit("waiting", "break", "moon_phase", "a", **KNOWN)],
    [Exit("running", "break", Cause.OTHER, None, guard="x", **KNOWN)],
    [Exit("running", "break", Cause.OTHER, None, guard="x", values="x=1", **KNOWN)],
    [SKIP("a", 9)],
    [SKIP(None, 9)],
    [SKIP(None, 9, count=2)],
    [SKIP("a", 9), SKIP(None, 9, count=5)],
]
PREEMPTIONS = [
    LOST(50, "a", 1, blocks_needed=2, blocks_freed=5),
    LOST(1, "v", 3, blocks_needed=2),
    LOST(50),
    LOST(50, in_schedule=False),
]


def test_every_exit_and_preemption_is_a_sentence(run_of):
    """UPDATE_GOLDENS=1 writes them again (then read them)."""
    lines = [{"waiting": 9, "exits": exits} for exits in EXITS]
    lines += [{"preempted": [lost], "ended": None} for lost in PREEMPTIONS]
    run = run_of("r", *(step(number, **line) for number, line in enumerate(lines)))
    stories = [explain_step(run, number) for number in range(len(lines))]
    told = [plain(one.message) for story in stories for one in (*story.stops, *story.preempted)]
    check("step-sentences", "".join(f"{sentence}\n" for sentence in told))


def test_the_limit_of_active_requests_has_its_own_name(story_of):
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, None, 0)
    story = story_of(step(0, waiting=1, ended=ended), scheduler_config={"max_num_active_seqs": 3})
    assert story.seats == 3
    assert Setting("max_num_active_seqs") in story.stops[0].message.parts()


def test_who_waits_stands_in_order_with_its_time(run_of):
    arrivals = [arrival("v", 0, 0), arrival("a", 0, 0)]
    lost = {"preempted": [Preemption("v", 10)], "arrived": [arrival("b", 0, 9_000)]}
    run = run_of(
        "r",
        step(0, start=0, got={"v": 10}, new="v", arrived=arrivals, waiting=1),
        step(1, start=10_000, took=1_000, waiting=3, **lost),
    )
    story = explain_step(run, 1)
    rows = [
        (waiter.request_id, waiter.since_step, waiter.waited_ms, waiter.preempted) for waiter in story.waiting
    ]
    assert rows == [("v", 1, 1.0, True), ("a", 0, 11.0, False), ("b", 1, 2.0, False)]
    assert story.waiting_agrees


def test_a_queue_that_is_not_the_recorded_one_says_so(story_of):
    story = story_of(step(0, waiting=2, arrived=[arrival("a", 0, 0)]))
    assert (len(story.waiting), story.num_waiting_after, story.waiting_agrees) == (1, 2, False)


def test_the_warm_up_can_be_asked_about(story_of):
    assert story_of(step(0, trial=0), step(1, trial=1), trial_ids=True).trial == 0


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([], r"step 9: no step was recorded in .*r$"),
        ([0, 1, 2], r"step 9: .*r has the steps 0 to 2$"),
        ([0, 2], r"step 9: .*r has the steps 0 to 2, with gaps$"),
    ],
)
def test_a_step_that_is_not_there_says_which_are(run_of, steps, says):
    with pytest.raises(UsageError, match=says):
        explain_step(run_of("r", *map(step, steps)), 9)


def test_the_engine_is_chosen(tmp_path):
    for rank in (0, 1):
        folder = run_folder(tmp_path / "r", step(0, got={f"r{rank}": 1}), engine_rank=rank)
    story = explain_step(read_run(folder), 0, engine=1)
    assert (story.engine_rank, story.scheduled[0].request_id) == (1, "r1")
    with pytest.raises(UsageError, match=r"--engine 2: .* has engine 0, 1"):
        explain_step(read_run(folder), 0, engine=2)


def turns(story, *fields):
    return [tuple(getattr(turn, name) for name in fields) for turn in story.ranks]


def test_all_ranks_in_one_common_step(tmp_path):
    """Pass 5: rank 0 decodes 8 and prefills 500 tokens, rank 1 decodes; both are back after 15.7 ms."""
    run = read_run(write_ranks(tmp_path / "run", prefills(20, {0: 10}, {0: 5})))
    story = explain_step(run, 5, engine=1)
    assert (story.wave, story.step_counter) == (0, 5)
    rows = turns(story, "engine_rank", "step", "prefill_tokens", "decode_tokens", "back_us")
    assert rows == [(0, 5, 500, 8, 15_700), (1, 5, 0, 8, 15_700)]
    assert "All ranks in this common step (wave 0, counter 5):" in text_of(step_page(story))


def test_dummy_batches_are_told_only_where_they_were_recorded(tmp_path):
    one = step(0, start=1000, got={"a": 1}, back=500, wave=0, step_counter=3)
    dummies = [DummyBatch(began_us=1100, took_us=600, wave=0, step_counter=3)]
    for rank, line in enumerate((one, Events(at_us=2000, dummies=dummies), Events(at_us=2000))):
        later = {"wall_anchor_us": 10**15 + 40 * rank, "engine_rank": rank}  # each has a clock of its own
        run_folder(tmp_path / "r", line, about=manifest(), data_parallel_size=3, **later)
    rows = turns(explain_step(read_run(tmp_path / "r"), 0), "step", "dummy", "back_us")
    assert rows == [(0, False, 500), (None, True, 740), (None, None, None)]


def test_independent_ranks_show_none(tmp_path):
    run = read_run(write_ranks(tmp_path / "run", prefills(20, {0: 10}, {0: 5}), lockstep=False))
    assert explain_step(run, 5).ranks == []


RECORDED = ["blocked-budget", "kv-bound", "preemption", "pipeline-bubbles"]


def timelines_of(run):
    return [make_timeline(trace, run.manifest, whole=True) for trace in run.traces]


def by_step(words, values):
    """Step to its sentences, the templates filled."""
    found = {}
    for row in words.rows.to_dicts():
        found.setdefault(row["step"], []).append(filled(words.templates[row["template"]], values(row)))
    return found


def check_all(timeline):
    words = step_words(timeline)
    stopped = by_step(words["stops"], stop_values)
    lost = by_step(words["preempted"], victim_values)
    for number in timeline.steps["step"]:
        assert stopped.get(number, []) == [stop.message for stop in step_stops(timeline, number)]
        assert lost.get(number, []) == [victim.message for victim in victims(timeline, number)]
    return words


@pytest.mark.parametrize("name", RECORDED)
def test_the_words_of_every_recorded_step_are_those_of_its_story(name):
    for timeline in timelines_of(read_run(Path("tests/data/findings") / name / "shows")):
        check_all(timeline)


def exit_(kind, request_id, cause=Cause.KV_BLOCKS, loop="waiting", **fields):
    return Exit(loop, kind, cause, request_id, 7, **fields)


def lacking(needed, request_id):
    lacked = exit_("break", request_id)
    lacked.blocks_needed, lacked.blocks_free = needed, 2
    return lacked


def test_every_form_of_a_sentence_has_a_template_of_its_own(run_of, recorded_words):
    [timeline] = timelines_of(
        run_of(
            "r",
            step(0, exits=[exit_("continue", "a"), exit_("continue", "b"), lacking(9, "c")]),
            step(1, exits=[exit_("continue", None), lacking(1, "c")]),
            step(2, exits=[exit_("continue", None, count=2), exit_("break", None)]),
            step(3, exits=[exit_("gate", None, guard="x > 1"), exit_("continue", "", loop="running")]),
            step(
                4,
                preempted=[
                    Preemption("a", 5, "a", 1),
                    Preemption("b", 1, "c", 3, blocks_needed=2, blocks_freed=1),
                    Preemption("d", 1, None, 1),
                ],
            ),
            step(5, preempted=[Preemption("e", 2, "f", 4, blocks_needed=1, blocks_freed=2)]),
        )
    )
    words = check_all(timeline)
    rows = words["stops"].rows.filter(words["stops"].rows["step"] < 4)
    assert rows["template"].to_list() == [0, 1, 2, 1, 3, 4, 5, 6]
    assert rows["request_ids"].to_list() == [["a", "b"], ["c"], [], ["c"], [], [], [], []]
    assert words["preempted"].rows["template"].to_list() == [0, 1, 2, 1]
    recorded_words(words["stops"].templates[1], words["preempted"].templates[1])
