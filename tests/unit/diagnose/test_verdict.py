"""What is said first of a run: the verdict, and the requests' time as parts that add up."""

import pytest

from schedtrace.diagnose.rules.prefill_starves_decode import StretchedDecodes
from schedtrace.diagnose.verdict import (
    engine_split,
    engine_time,
    leading,
    request_time,
    time_split,
    unlimited,
    verdict,
)
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.message import NOTHING
from schedtrace.model.report import Gain
from schedtrace.model.say import say
from schedtrace.model.trace import ChunkCap, Exit, Preemption
from tests.makers import arrival, finding, finish, step

HOLDER = say("Somebody has it.")


def root(code, share, *, saved=None, title="A limit", **fields):
    """A root cause that says its code, and who holds it."""
    fixed = {"title": say(title), "verdict": say(f"It is {code}."), "holder": HOLDER}
    if saved is not None:
        fixed["gain"] = Gain(
            metric="output_tokens_per_s", change_frac=1, saved_frac=saved, method="step_time"
        )
    return finding(code, share_frac=share, **fixed | fields)


@pytest.fixture
def said(view_of):
    """``said(root(...), lines=[...])``: the messages."""

    def messages(*findings, lines=WORKS, **header):
        view = view_of(*lines, **header)
        return verdict([unlimited(view)], list(findings), time_split([engine_split(view)]))

    return messages


WORKS = [
    step(0, start=0, got={"a": 100}, new="a", arrived=[arrival("a", None, 0)]),
    step(1, start=1000, finished=[finish("a", finished_us=1000, queued_us=0, first_token_us=1000)]),
]
"""a runs for 1 ms, alone."""


def test_nothing_recorded_is_nothing_judged(said, recorded_words):
    recorded_words(said(lines=[]))


@pytest.mark.parametrize(
    "fields", [{"share": 0.05}, {"share": 0.0, "saved": 0.05}, {"share": 0.0, "leads": True}]
)
def test_a_root_cause_and_its_holder(said, fields):
    limit = root("kv-bound", **fields)
    assert said(limit) == [limit.verdict, limit.holder]


def test_who_holds_it_may_not_be_known(said):
    limit = root("kv-bound", 0.5, holder=NOTHING)
    assert said(limit) == [limit.verdict]


@pytest.mark.parametrize(("share", "is_named"), [(0.4, True), (0.39, False)])
def test_another_nearly_as_large_is_named(said, share, is_named, recorded_words):
    second = said(root("kv-bound", 0.5), root("max-num-seqs-bound", share, title="Too few seats"))[2:]
    assert len(second) == is_named
    recorded_words(second)


@pytest.mark.parametrize(
    ("before", "shares", "first"),
    [
        ("", {"token-budget-bound": 0.40, "kv-bound": 0.30}, "token-budget-bound"),
        ("kv-bound", {"token-budget-bound": 0.40, "kv-bound": 0.20}, "kv-bound"),
        ("kv-bound", {"token-budget-bound": 0.40, "kv-bound": 0.19}, "token-budget-bound"),
        ("", {"kv-bound": 0.049}, None),
        ("kv-bound", {"kv-bound": 0.025}, "kv-bound"),
        ("kv-bound", {"kv-bound": 0.024}, None),
        ("", {"kv-bound": 0.05}, "kv-bound"),
        ("head-of-line", {"token-budget-bound": 0.40, "kv-bound": 0.30}, "token-budget-bound"),
    ],
)
def test_near_equals_do_not_alternate_while_an_engine_is_watched(before, shares, first):
    found = leading([root(code, share) for code, share in shares.items()], before)
    assert [one.code for one in found][:1] == [code for code in [first] if code]


def test_what_leads_by_its_kind_does_so_at_once():
    found = leading([root("token-budget-bound", 0.1, leads=True), root("kv-bound", 0.3)], "kv-bound")
    assert [one.code for one in found] == ["token-budget-bound", "kv-bound"]


@pytest.mark.parametrize(
    ("fields", "paced"),
    [({}, True), ({"leads": True}, False)],
    ids=["slow", "stuck: it keeps up with nothing"],
)
def test_beside_a_cause_the_clients_that_set_the_throughput_are_named(view_of, fields, paced, recorded_words):
    """24 requests, one every 10 ms to 20 ms, each done after 2 ms."""
    lines, at = [], 0
    for number in range(24):
        name, at = f"r{number}", at + 10_000 + 1000 * (7 * number % 11)
        lines.append(
            step(
                number,
                start=at,
                back=2000,
                got={name: 100},
                new=name,
                arrived=[arrival(name, at)],
                finished=[finish(name, finished_us=at + 2000, prompt_tokens=100, output_tokens=1)],
            )
        )
    slow = root("prefill-starves-decode", 0.2, **fields)
    sentences = verdict([unlimited(view_of(*lines))], [slow], [])
    assert (len(sentences) == 3) is paced  # with the cause and its holder
    assert not paced or sentences[2] == slow.holder
    recorded_words(sentences[1:])


def test_abbreviations_keep_their_capitals(said, recorded_words):
    recorded_words(
        said(root("max-num-seqs-bound", 0.5), root("kv-bound", 0.5, title="KV cache too small"))[2]
    )


@pytest.mark.parametrize(
    ("low", "high", "share", "first"),
    [
        (-0.25, -0.15, 0.10, "scheduler-overhead"),
        (-0.25, -0.09, 0.10, "token-budget-bound"),  # it may save less than what the other may save
        (-0.25, 0.05, 0.10, "token-budget-bound"),
        (None, None, 0.10, "token-budget-bound"),
        (-0.25, -0.15, 0.04, "scheduler-overhead"),  # nothing else limits this run
        (-0.25, -0.04, 0.04, None),  # nothing limits it
    ],
)
def test_advice_that_surely_saves_more_than_a_limit_costs_leads(low, high, share, first):
    gain = Gain(
        metric="tpot_p50_ms",
        change_frac=-0.2,
        low_frac=low,
        high_frac=high,
        saved_frac=0.2,
        method="step_time",
    )
    roots = [root("scheduler-overhead", 0.2, gain=gain), root("token-budget-bound", share)]
    assert [finding.code for finding in leading(roots)][:1] == [code for code in [first] if code]


def test_beside_what_leads_nothing_is_as_much(said):
    assert len(said(root("other-limit", 0.0, leads=True), root("kv-bound", 0.9))) == 2


@pytest.mark.parametrize(
    ("cause", "leads"),
    [
        (root("token-budget-bound", 0.10, saved=0.01), True),
        (root("token-budget-bound", 0.09, saved=0.01), False),
        (root("scheduler-overhead", 0.25), True),
        (root("scheduler-overhead", 0.24), False),
    ],
    ids=["nothing can be gained but it explains the run", "or not", "host time from a quarter on", "less"],
)
def test_what_limits_a_run_only_if_it_is_large(said, cause, leads, recorded_words):
    first = said(cause)[0]
    assert (first == cause.verdict) is leads
    recorded_words(first)


def test_host_time_that_vllm_cannot_hide_does_not_lead():
    refused = root("scheduler-overhead", 0.4, refuted=[say("No choice here.")])
    assert leading([refused, root("kv-bound", 0.06)])[0].code == "kv-bound"
    assert leading([root("scheduler-overhead", 0.4), root("kv-bound", 0.06)])[0].code == "scheduler-overhead"


def test_where_nothing_limits_it_the_time_is_split(said, recorded_words):
    recorded_words(said()[:2])


@pytest.mark.parametrize("loaded_us", [5_000, 4_900])
def test_a_wait_of_half_of_the_time_to_the_first_token_is_named(said, recorded_words, loaded_us):
    """b waits for its KV for 5 of the 10 ms until its first token."""
    pending = Exit("waiting", "continue", Cause.REMOTE_KV_PENDING, "b")
    lines = [
        step(0, start=0, back=1_000, got={"a": 1}, waiting=1, exits=[pending], arrived=[arrival("b", 0, 0)]),
        step(1, start=loaded_us, back=10_000 - loaded_us, got={"b": 100}, new="b"),
    ]
    ended = finish("b", arrived_us=0, queued_us=0, first_token_us=10_000, finished_us=11_000)
    lines.append(step(2, start=11_000, finished=[ended]))
    recorded_words(said(lines=lines)[0])


@pytest.mark.parametrize("stretch_frac", [0.25, 0.24])
def test_prefill_beside_decodes_that_takes_a_quarter_of_the_time_between_tokens_is_named(
    said, recorded_words, stretch_frac
):
    unknown = dict.fromkeys(StretchedDecodes.__struct_fields__)
    stretched = {"stretch_frac": stretch_frac, "mean_stretch_us": 43_000.0, "median_decode_step_us": 7_900.0}
    finding = root("prefill-starves-decode", None, evidence=StretchedDecodes(**unknown | stretched))
    sentence = said(finding)[1]
    assert said(root("token-budget-bound", 0.04, symptoms=[finding]))[1] == sentence
    recorded_words(sentence)


@pytest.mark.parametrize("later", [False, True])
def test_of_trials_that_were_sent_at_once_it_is_said_that_all_were_there(view_of, later, recorded_words):
    more = [step(2, start=2000, got={"b": 100}, new="b", arrived=[arrival("b", None, 1500)])]
    view = view_of(*WORKS, *(more if later else []))
    view.closed_workload = True
    recorded_words(verdict([unlimited(view)], [], time_split([engine_split(view)]))[0])


def test_idle_time_is_told(said, recorded_words):
    """The next step comes after 9 ms without a request."""
    recorded_words(said(lines=[*WORKS, step(2, start=10_000)])[-1])


def test_steps_that_scheduled_nothing(said, recorded_words):
    recorded_words(said(lines=[step(0)])[0])


def test_a_threshold_that_held_a_long_prompt_back_is_nothing_to_fix(said, recorded_words):
    cap = [ChunkCap("long", Cap.LONG_PREFILL, 900, 100)]
    lines = [
        step(0, start=0, got={"long": 100, "a": 50}, new=["long", "a"], caps=cap),
        step(1, start=1000, got={"long": 100, "a": 1}, caps=cap),
        step(
            2,
            start=2000,
            finished=[
                finish("a", queued_us=0, first_token_us=1000, finished_us=2000),
                finish("long", queued_us=0, first_token_us=9000, finished_us=2000),
            ],
        ),
    ]
    config = {"max_num_seqs": 8, "enable_chunked_prefill": True, "long_prefill_token_threshold": 100}
    recorded_words(
        said(lines=lines, scheduler_config=config)[0],
        said(lines=lines, scheduler_config={"max_num_seqs": 8})[0],
    )


def test_of_several_engines_the_holder_on_one_names_it(view_of, recorded_words):
    view = view_of(*WORKS)
    engines = [unlimited(view)] * 2
    quoting = root("kv-bound", 0.5, engine_rank=1, of_ranks=False)
    quoting.verdict = say("It took {share:%}.", share=0.5)
    other = root("kv-bound", 0.5, engine_rank=1, of_ranks=False)
    for limit in (quoting, other):
        recorded_words(verdict(engines, [limit], []))


def at(number, **fields):
    """A step whose device works 80 of 100 us."""
    return step(number, start=100 * number, took=20, back=100, **fields)


def parts(*views):
    return {
        (part.part, part.cause): (part.time_ms, part.share_frac)
        for part in time_split([*map(engine_split, views)])
    }


WAITS = [
    at(0, waiting=1, ended=Cause.KV_BLOCKS, arrived=[arrival("a", None, 0)]),
    at(1, got={"a": 100}, new="a"),
    at(2, finished=[finish("a", finished_us=200)]),
]


def test_waiting_and_computing(view_of):
    """a waits 100 us, and computes for 100 us, in 20 of which the engine schedules."""
    assert parts(view_of(*WAITS)) == {
        ("waiting", "kv_blocks"): (0.1, 0.5),
        ("prefill", None): (0.08, pytest.approx(0.4)),
        ("between_steps", None): (0.02, pytest.approx(0.1)),
    }


def test_engines_are_added_up(view_of):
    assert parts(view_of(*WAITS), view_of(*WAITS))["waiting", "kv_blocks"] == (0.2, 0.5)


def test_what_follows_from_a_preemption_is_waiting_for_kv_blocks(view_of):
    lines = [
        at(0, got={"a": 100}, new="a", arrived=[arrival("a", None, 0)]),
        at(
            1,
            waiting=1,
            ended=Exit("waiting", "break", Cause.PREEMPTED_THIS_STEP, "a"),
            preempted=[Preemption("a", 100)],
        ),
        at(2, got={"a": 100}, resumed="a", recomputed_tokens=100),
        at(3, finished=[finish("a", finished_us=300)]),
    ]
    found = parts(view_of(*lines))
    assert found["waiting", "kv_blocks"][0] == 0.1
    assert found["recompute", None][0] == 0.08


def test_the_parts_add_up_to_1_the_largest_first(view_of):
    split = time_split([engine_split(view_of(*WAITS))])
    shares = [part.share_frac for part in split]
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)


def test_without_requests_there_are_no_parts(view_of):
    assert time_split([engine_split(view_of(step(0)))]) == []


def waits(number, requests, cause, **fields):
    """A step, 100 us after the one before, in which these wait."""
    return step(number, start=100 * number, back=None, waiting=len(requests), ended=cause, **fields)


def came(names, at=0):
    return [arrival(name, None, queued=at) for name in names]


BLOCKED = [
    waits(
        0,
        "abc",
        Cause.KV_BLOCKS,
        arrived=came("abc"),
        kv_blocks_free_after=10,
        remaining_budget=900,
        running=1,
    ),
    waits(1, "c", Cause.MAX_NUM_SEQS, got={"a": 100, "b": 100}, new="ab"),
    step(2, start=200, back=None, got={"c": 100}, new="c"),
    step(3, start=300, back=None, finished=[finish(name, finished_us=300) for name in "abc"]),
]


def test_the_shares_of_all_states_add_up_to_the_requests_time(view_of):
    shares = request_time(view_of(*BLOCKED))
    told = [(share.state, share.cause, share.time_ms, share.requests) for share in shares]
    assert told == [
        ("prefill", None, 0.3, 3),
        ("waiting", "kv_blocks", 0.3, 3),
        ("stalled", "other", 0.2, 2),
        ("waiting", "max_num_seqs", 0.1, 1),
    ]
    assert sum(share.share_frac for share in shares) == pytest.approx(1)


def test_a_strip_shows_the_share_of_each_part_of_the_run(view_of):
    of = {(share.state, share.cause): share.strip for share in request_time(view_of(*BLOCKED))}
    assert of["waiting", "kv_blocks"] == [1, 0, 0, 0]
    assert of["waiting", "max_num_seqs"] == pytest.approx([0, 1 / 3, 0, 0])


def test_shares_of_an_engine_are_of_its_busy_time(view_of):
    view = view_of(
        step(0, start=0, took=20, back=100, got={"a": 1}, arrived=came("a"), update_us=30),
        step(1, start=600, took=20, back=None, finished=[finish("a", finished_us=150)]),
    )
    told = {share.state: (share.time_ms, share.busy_frac) for share in engine_time(view)}
    assert told == {
        "device": (0.08, 80 / 170),
        "schedule": (0.04, 40 / 170),
        "update": (0.03, 30 / 170),
        "host_gap": (0.02, 20 / 170),
        "idle": (0.45, None),
    }


def test_nothing_recorded_takes_no_time(view_of):
    assert request_time(view_of()) == engine_time(view_of()) == []


def test_a_limit_is_found_with_its_share_of_the_requests_time(found, recorded_words):
    [finding] = found("kv-bound", *BLOCKED)
    evidence = finding.evidence
    assert (finding.share_frac, evidence.wait_ms, evidence.requests) == (3 / 9, 0.3, 3)
    assert evidence.mean_budget_left_frac == 0.9
    assert (evidence.running, evidence.blocks_held, evidence.blocks_free) == (1, 89, 10)
    assert (finding.count, finding.steps, finding.cause) == (1, [0], "kv_blocks")
    recorded_words(finding.verdict)
    [seats] = found("max-num-seqs-bound", *BLOCKED)
    assert (seats.share_frac, seats.evidence.requests) == (1 / 9, 1)
    assert found("token-budget-bound", *BLOCKED) == []


def test_seats_are_named_by_the_limit_that_counts(found, recorded_words):
    lines = [waits(0, "a", Cause.MAX_NUM_SEQS, arrived=came("a")), step(1, start=100, got={"a": 1}, new="a")]
    [finding] = found("max-num-seqs-bound", *lines)
    assert finding.evidence.seats == 8
    recorded_words(finding.verdict)
    [finding] = found("max-num-seqs-bound", *lines, scheduler_config={"max_num_active_seqs": 5})
    assert finding.evidence.seats == 5
    recorded_words(finding.verdict)


def test_more_seats_alone_are_no_advice_where_the_kv_cache_or_vllm_has_no_room_for_them(
    found, recorded_words
):
    for fields, about in (
        ({"kv_blocks_free_after": 0}, {}),
        ({}, {"scheduler_config": {"max_num_batched_tokens": 8}}),
    ):
        came_too = [*came("a"), *came("b")]
        first = waits(0, "ab", Cause.MAX_NUM_SEQS, arrived=came_too, **{"running": 8, **fields})
        lines = [first, step(1, start=100, got={"a": 1, "b": 1}, new="ab")]
        [finding] = found("max-num-seqs-bound", *lines, **about)
        [advice] = finding.advice
        assert (finding.gain, advice.setting, advice.value) == (None, None, None)
        recorded_words(advice)


def test_a_spent_budget_is_a_limit_too(found):
    lines = [
        waits(0, "a", Cause.TOKEN_BUDGET, arrived=came("a"), got={"x": 1000}),
        step(1, start=100, got={"a": 1}, new="a"),
    ]
    [finding] = found("token-budget-bound", *lines)
    assert (finding.share_frac, finding.evidence.full_steps) == (100 / 2200, 1)
