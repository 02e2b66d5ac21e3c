"""What is said first of a run."""

import pytest

from schedtrace.diagnose.rules.prefill_starves_decode import StretchedDecodes
from schedtrace.diagnose.verdict import engine_split, leading, time_split, unlimited, verdict
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.message import NOTHING
from schedtrace.model.report import Gain
from schedtrace.model.say import say
from schedtrace.model.trace import ChunkCap, Exit
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
