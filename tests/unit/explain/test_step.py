import pytest

from schedtrace.errors import UsageError
from schedtrace.explain.step import explain_step
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.message import Code, Count, Number, Requests, Setting
from schedtrace.model.trace import ChunkCap, Events, Exit, Preemption, ScheduledRequest
from schedtrace.present.phrases import plain
from schedtrace.read.run import read_run
from tests import makers
from tests.makers import arrival, finish, step


def test_who_came_and_went_is_told_from_the_steps_line_and_from_between(run_of):
    run = run_of(
        "r",
        step(0, start=0, got={"a": 1}, arrived=[arrival("a", -10, -5)]),
        Events(at_us=500_000, arrived=[arrival("b", 400, 450)], finished=[finish("a", finished_us=1_500)]),
        step(1, start=600_000, got={"b": 1}, arrived=[arrival("c", 590_000, 591_000, prompt_tokens=7)]),
    )
    story = explain_step(run, 1)
    assert [(one.request_id, one.on_its_way_us, one.prompt_tokens) for one in story.arrived] == [
        ("b", 50, 100),
        ("c", 1000, 7),
    ]
    assert [(one.request_id, one.status) for one in story.finished] == [("a", "LENGTH_CAPPED")]
    assert [one.request_id for one in explain_step(run, 0).arrived] == ["a"]
    assert explain_step(run, 0).finished == []


@pytest.mark.parametrize(("came", "late"), [(900, ["b"]), (1000, ["b"]), (1001, [])])
def test_who_reached_the_front_end_before_the_output_was_back_came_too_late(run_of, came, late):
    run = run_of(
        "r",
        step(0, start=0, back=1000, got={"a": 1}),
        step(1, start=2000, arrived=[arrival("b", came, 1500), arrival("c", None, 1500)]),
    )
    assert [one.request_id for one in explain_step(run, 0).late] == late


def test_what_each_request_got_says_what_it_worked_on_and_what_cut_it(run_of):
    rows = [
        ScheduledRequest("a", 100, 1),
        ScheduledRequest("b", 0, 30, "resumed"),
        ScheduledRequest("c", 0, 20, "new"),
        ScheduledRequest("x", 5, 1),
    ]
    caps = [ChunkCap("c", Cap.LONG_PREFILL, 100, 50), ChunkCap("c", Cap.TOKEN_BUDGET, 50, 20)]
    run = run_of(
        "r",
        step(0, arrived=[arrival(name, 0, 0) for name in "abc"], preempted=[Preemption("b", 40)]),
        step(1, requests=rows, caps=caps),
    )
    told = [
        (one.request_id, one.work, one.wanted_tokens, one.caps, one.prompt_tokens)
        for one in explain_step(run, 1).scheduled
    ]
    assert told == [
        ("a", "decode", None, [], 100),
        ("b", "recompute", None, [], 100),
        ("c", "prefill", 100, ["long_prefill_token_threshold", "token_budget"], 100),
        ("x", None, None, [], None),
    ]


def test_exits_alike_that_follow_each_other_are_one(run_of):
    place = {"via": "source", "location": "scheduler.py:10"}
    skips = [Exit("waiting", "continue", Cause.LORA_CAP, name, 900, **place) for name in "abcde"]
    skips[-1].count = 3
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "f", 800, **place)
    [skipped, stopped] = explain_step(run_of("r", step(0, waiting=9, exits=[*skips, ended])), 0).stops
    assert (skipped.count, skipped.request_ids) == (7, list("abcde"))
    assert plain(skipped.message) == (
        "The waiting loop skipped a, b, c and 4 others at scheduler.py:10: max_loras other adapters were "
        "already in the batch; 900 tokens of budget left."
    )
    assert plain(stopped.message) == (
        "The waiting loop ended at scheduler.py:10: as many requests ran as max_num_seqs 8 allows; f next in "
        "line, 800 tokens of budget left."
    )


@pytest.mark.parametrize(
    ("exit_", "says"),
    [
        (
            Exit("waiting", "gate", Cause.PREEMPTED_THIS_STEP, None, 5),
            (
                "The waiting loop was not entered (inferred): the step had preempted a request, which closes "
                "admission for that step; 5 tokens of budget left."
            ),
        ),
        (
            Exit("waiting", "condition", Cause.TOKEN_BUDGET, None, 0, via="source"),
            "The waiting loop ended: the token budget was spent; 0 tokens of budget left.",
        ),
        (
            Exit("running", "continue", Cause.OUTPUT_IN_FLIGHT, "a", 9, via="source"),
            (
                "The running loop skipped a: its last token was in flight already (asynchronous scheduling); "
                "9 tokens of budget left."
            ),
        ),
        (
            Exit("running", "continue", Cause.OUTPUT_IN_FLIGHT, "a", 9, "pipeline_parallel", via="source"),
            (
                "The running loop skipped a: its last step's output was in flight: with pipeline parallelism "
                "it has one step in flight at most; 9 tokens of budget left."
            ),
        ),
        (
            Exit("running", "continue", Cause.OUTPUT_IN_FLIGHT, "a", 9, "diffusion_read_only", via="source"),
            (
                "The running loop skipped a: all its denoising steps were in flight (diffusion model); "
                "9 tokens of budget left."
            ),
        ),
        (
            Exit("waiting", "break", Cause.SPEC_DECODE_PADDING, "a", 9, "max_model_len", via="source"),
            (
                "The waiting loop ended: the next request's decode, padded for drafts, would have gone "
                "beyond max_model_len; a next in line, 9 tokens of budget left."
            ),
        ),
        (
            Exit("running", "break", Cause.KV_BLOCKS, "a", 9, via="source", blocks_needed=1, blocks_free=0),
            (
                "The running loop ended: the KV cache had no room for its next token (1 block needed, 0 "
                "free); at a, 9 tokens of budget left."
            ),
        ),
        (
            Exit("waiting", "break", "moon_phase", "a", 9, via="source"),
            "The waiting loop ended: cause moon_phase; a next in line, 9 tokens of budget left.",
        ),
        (
            Exit("running", "break", Cause.OTHER, None, 9, via="source", guard="x"),
            "The running loop ended: this version does not know the reason (x); 9 tokens of budget left.",
        ),
    ],
)
def test_an_exit_is_a_sentence(run_of, exit_, says):
    [stop] = explain_step(run_of("r", step(0, waiting=1, exits=[exit_])), 0).stops
    assert plain(stop.message) == says


@pytest.mark.parametrize(
    ("names", "counts", "says"),
    [
        (["a"], [1], "a"),
        ([None], [1], "a request"),
        ([None], [2], "2 requests"),
        ([None], [3], "3 requests"),
        (["a", None], [1, 5], "a and 5 others"),
    ],
)
def test_skipped_requests_are_named_as_far_as_they_are_known(run_of, names, counts, says):
    skips = [
        Exit("waiting", "continue", Cause.LORA_CAP, name, 9, count=count)
        for name, count in zip(names, counts, strict=True)
    ]
    [stop] = explain_step(run_of("r", step(0, waiting=9, exits=skips)), 0).stops
    assert plain(stop.message).startswith(f"The waiting loop skipped {says} (inferred): ")


def test_a_sentence_has_typed_arguments(run_of):
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "f", 800, via="source", location="scheduler.py:10")
    [stop] = explain_step(run_of("r", step(0, waiting=1, ended=ended)), 0).stops
    assert [part for part in stop.message.parts() if not isinstance(part, str)] == [
        Code("scheduler.py:10"),
        Setting("max_num_seqs"),
        Number(8),
        Requests(["f"], 1),
        Count(800, "token"),
    ]


def test_the_limit_of_active_requests_has_its_own_name(run_of):
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, None, 0)
    run = run_of("r", step(0, waiting=1, ended=ended), scheduler_config={"max_num_active_seqs": 3})
    story = explain_step(run, 0)
    assert story.seats == 3
    assert "as max_num_active_seqs 3 allows" in plain(story.stops[0].message)


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        (
            Preemption("v", 50, "a", 1, blocks_needed=2, blocks_freed=5),
            (
                "vLLM preempted v for a, which needed 2 more KV blocks: v lost 50 computed tokens and freed "
                "5 blocks at once."
            ),
        ),
        (
            Preemption("v", 1, "v", 3),
            (
                "vLLM preempted v because it needed blocks itself and no other request was left to preempt: "
                "v lost 1 computed token (preempted 3 times so far)."
            ),
        ),
        (
            Preemption("v", 50),
            "vLLM preempted v for a request that is not recorded: v lost 50 computed tokens.",
        ),
        (
            Preemption("v", 50, in_schedule=False),
            "vLLM preempted v outside schedule(), in a reset of the prefix cache: v lost 50 computed tokens.",
        ),
    ],
)
def test_a_preemption_is_a_sentence(run_of, lost, says):
    [victim] = explain_step(run_of("r", step(0, preempted=[lost])), 0).preempted
    assert plain(victim.message) == says


def test_who_waits_stands_in_order_with_its_time(run_of):
    run = run_of(
        "r",
        step(0, start=0, got={"v": 10}, new="v", arrived=[arrival("v", 0, 0), arrival("a", 0, 0)], waiting=1),
        step(
            1,
            start=10_000,
            took=1_000,
            preempted=[Preemption("v", 10)],
            waiting=3,
            arrived=[arrival("b", 0, 9_000)],
        ),
    )
    story = explain_step(run, 1)
    told = [(one.request_id, one.since_step, one.waited_ms, one.preempted) for one in story.waiting]
    assert told == [("v", 1, 1.0, True), ("a", 0, 11.0, False), ("b", 1, 2.0, False)]
    assert story.waiting_agrees


def test_a_queue_that_is_not_the_recorded_one_says_so(run_of):
    story = explain_step(run_of("r", step(0, waiting=2, arrived=[arrival("a", 0, 0)])), 0)
    assert (len(story.waiting), story.num_waiting_after, story.waiting_agrees) == (1, 2, False)


def test_the_warm_up_can_be_asked_about(run_of):
    assert explain_step(run_of("r", step(0, trial=0), step(1, trial=1), trial_ids=True), 0).trial == 0


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
        explain_step(run_of("r", *(step(number) for number in steps)), 9)


def test_the_engine_is_chosen(tmp_path):
    for rank in (0, 1):
        folder = makers.run_folder(tmp_path / "r", step(0, got={f"r{rank}": 1}), engine_rank=rank)
    story = explain_step(read_run(folder), 0, engine=1)
    assert (story.engine_rank, story.scheduled[0].request_id) == (1, "r1")
    with pytest.raises(UsageError, match=r"--engine 2: .* has engine 0, 1"):
        explain_step(read_run(folder), 0, engine=2)
