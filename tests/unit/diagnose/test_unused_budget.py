from dataclasses import replace
from pathlib import Path

import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.rules import RULES
from schedtrace.model.causes import NOT_A_REFUSAL, Cause
from schedtrace.model.report import MAX_STEPS
from schedtrace.model.trace import Exit
from schedtrace.model.trace_facts import Fact
from schedtrace.read.run import read_run
from tests.makers import step

CODE = "blocked-budget"
REFUSALS = [cause for cause in Cause if cause not in {*NOT_A_REFUSAL, Cause.TOKEN_BUDGET}]


def refused(number, cause=Cause.KV_BLOCKS, got=100, waiting=2, waiting_tokens=300, **fields):
    ended = cause if isinstance(cause, Exit) else Exit("waiting", "break", cause, "next")
    tokens = {"waiting": waiting, "waiting_tokens_after": waiting_tokens, "ended": ended}
    return step(number, got={"x": got} if got else {}, **tokens, **fields)


def kv_exit(detail=None, **fields):
    return Exit("waiting", "break", Cause.KV_BLOCKS, "next", detail=detail, **fields)


def test_budget_left_while_requests_waited_is_found_with_exact_figures(found, recorded_words):
    [finding] = found(
        CODE,
        refused(0, got=100, waiting=2, waiting_tokens=300, kv_blocks_free_after=7),
        refused(1, got=500, waiting=4, waiting_tokens=800, kv_blocks_free_after=3),
        step(2, got={"x": 1}),
    )
    assert (finding.severity, finding.cause, finding.via) == ("warning", "kv_blocks", "inferred")
    assert (finding.count, finding.steps, finding.trials) == (2, [0, 1], [])
    assert (finding.tokens, finding.advice) == (300 + 500, [])
    assert finding.evidence.mean_budget_left_frac == pytest.approx(0.7)
    assert finding.evidence.mean_waiting == 3
    recorded_words(finding.message, finding.example)


@pytest.mark.parametrize("cause", REFUSALS)
def test_every_refusal_is_a_finding_of_its_own_cause(found, cause, recorded_words):
    [finding] = found(CODE, refused(0, cause))
    assert (finding.cause, finding.count) == (cause, 1)
    assert finding.severity == ("info" if cause is Cause.PAUSED else "warning")
    recorded_words(finding.message.arguments["reason"])


@pytest.mark.parametrize(
    "line",
    [
        *(refused(0, cause) for cause in sorted({*Cause} - set(REFUSALS))),
        refused(0, got=1000),
        refused(0, waiting=0),
        step(0, got={"x": 100}, ended=None),
    ],
)
def test_no_budget_or_nobody_eligible_is_no_refusal(found, line):
    assert found(CODE, line) == []


def test_several_causes_are_several_findings_most_tokens_first(found):
    findings = found(
        CODE,
        refused(0, Cause.MAX_NUM_SEQS, waiting_tokens=10),
        refused(1, Cause.KV_BLOCKS, waiting_tokens=50),
        refused(2, Cause.MAX_NUM_SEQS, waiting_tokens=20),
    )
    told = [(one.cause, one.steps, one.tokens) for one in findings]
    assert told == [("kv_blocks", [1], 50), ("max_num_seqs", [0, 2], 30)]


def test_a_step_that_scheduled_nothing_can_be_blocked(found, recorded_words):
    [finding] = found(CODE, refused(0, Cause.PAUSED, got=0), step(1))
    assert (finding.count, finding.evidence.mean_budget_left_frac) == (1, 1.0)
    recorded_words(finding.message)


@pytest.mark.parametrize(
    ("lines", "tokens"),
    [
        ([(100, None), (100, None)], 1800),
        ([(100, 300), (900, 300), (1, None)], 300 + 100 + 999),
        ([(100, 2000)], 900),
    ],
    ids=["never known", "the mean of the steps where it is known", "no more than was left"],
)
def test_what_could_have_been_used(found, lines, tokens, recorded_words):
    [finding] = found(
        CODE, *(refused(n, got=got, waiting_tokens=more) for n, (got, more) in enumerate(lines))
    )
    assert finding.tokens == tokens
    recorded_words(finding.message)


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        (None, "other"),
        (Exit("waiting", "break", "disk_blocks", "next"), "disk_blocks"),
        (Exit("waiting", "break", "tenant_quota", "next"), "tenant_quota"),
    ],
    ids=["no exit", "a newer version's", "registered by another package"],
)
def test_a_cause_that_is_not_known(found, ended, cause, recorded_words):
    quota = {"tenant_quota": "the tenant's quota of tokens is spent"}
    line = step(0, got={"x": 100}, waiting=2, ended=ended)
    [finding] = found(CODE, line, registered_causes=quota)
    assert (finding.cause, finding.severity) == (cause, "warning")
    recorded_words(finding.message)


def test_one_inferred_exit_makes_the_whole_finding_inferred(found, recorded_words):
    exact = kv_exit(via="source", location="scheduler.py:7")
    [mixed] = found(CODE, refused(0, exact), refused(1, kv_exit()))
    [pure] = found(CODE, refused(0, exact), refused(1, exact))
    assert (mixed.via, pure.via) == ("inferred", "source")
    assert (mixed.location, pure.location) == (None, "scheduler.py:7")
    recorded_words(mixed.example, pure.example)  # the place, where it is not said of all of them


def test_limits_that_share_a_cause_are_findings_of_their_own(found, recorded_words):
    findings = found(CODE, refused(0, kv_exit("watermark")), *(refused(n, kv_exit("free")) for n in (1, 2)))
    assert [finding.steps for finding in findings] == [[1, 2], [0]]
    assert {finding.cause for finding in findings} == {"kv_blocks"}
    recorded_words(finding.message for finding in findings)


@pytest.mark.parametrize("config", [{}, {"max_num_active_seqs": 5}], ids=str)
def test_the_limit_on_seats_is_the_one_that_counts(found, config, recorded_words):
    [finding] = found(CODE, refused(0, Cause.MAX_NUM_SEQS), scheduler_config=config)
    recorded_words(finding.message)


def test_the_list_of_steps_ends_where_the_count_goes_on(found):
    [finding] = found(CODE, *(refused(number) for number in range(MAX_STEPS + 5)))
    assert (finding.steps, finding.count) == (list(range(MAX_STEPS)), MAX_STEPS + 5)


def test_trials_that_show_it_are_counted_against_all(found, recorded_words):
    [finding] = found(CODE, refused(0, trial=1), step(1, trial=2), refused(2, trial=3))
    assert finding.trials == [1, 3]
    recorded_words(finding.message)


THREAD = Path(__file__).parents[3] / "examples" / "forum-thread"
UNDERUSED = "budget-underused"


@pytest.fixture
def missed(view_of):
    """What the rule finds in a record that tells of requests only."""
    return lambda *lines: RULES[UNDERUSED](replace(view_of(*lines), facts=frozenset({Fact.REQUESTS})))


def test_the_threads_first_round_left_room_for_fourteen_requests_of_the_second(recorded_words):
    report = analyze_run(read_run(THREAD / "profile_1025_bs16_in1024_out64.log"))
    [finding] = report.findings
    assert (finding.code, finding.severity, finding.cause) == (UNDERUSED, "info", None)
    assert (finding.steps, finding.tokens, finding.evidence.missed_requests) == ([0], 14336, 14)
    recorded_words(finding.message, finding.example)


def test_a_single_round_says_nothing_about_what_it_missed():
    report = analyze_run(read_run(THREAD / "profile_1031_bs16_in1024_out64.log"))
    assert (report.findings, report.trials[0].first_step_tokens) == ([], 5086)


def test_a_record_with_queue_lengths_is_left_to_the_rules_that_know_why(view_of):
    lines = [step(0, got={"a": 10}, new="a"), step(1, got={"b": 10}, new="b")]
    assert RULES[UNDERUSED](view_of(*lines)) == []


@pytest.mark.parametrize(
    ("first", "second", "fitted", "tokens"),
    [
        ({"a": 700}, {"b": 200, "c": 90, "d": 11}, 2, 290),
        (dict.fromkeys("abcdefg", 1), {"h": 1, "i": 1}, 1, 1),
    ],
    ids=["into the budget", "into the seats"],
)
def test_only_what_fits_counts(missed, first, second, fitted, tokens):
    [finding] = missed(step(0, got=first, new=first), step(1, got=second, new=second))
    assert (finding.evidence.missed_requests, finding.tokens) == (fitted, tokens)


@pytest.mark.parametrize(
    "lines",
    [
        [step(0, got={"a": 1000}, new="a"), step(1, got={"b": 10}, new="b")],
        [step(0, got={"a": 995}, new="a"), step(1, got={"b": 10}, new="b")],
        [step(0, got={"a": 10}, new="a"), step(1, got={"a": 10})],
        [step(0, got={"a": 10}, new="a"), step(1, got={"a": 1}), step(2, got={"a": 1000, "b": 10})],
        [step(0, got={"a": 10}, new="a"), step(1, got={"b": 10}, resumed="b")],
        [step(0), step(1, got={"b": 10}, new="b")],
        [],
    ],
    ids=[
        "budget spent",
        "does not fit",
        "nobody new",
        "not new then",
        "came back",
        "nobody in the first",
        "no steps",
    ],
)
def test_it_is_silent_where_nobody_new_would_have_fitted(missed, lines):
    assert missed(*lines) == []


def test_calls_that_scheduled_nothing_between_do_not_matter(missed, recorded_words):
    [finding] = missed(step(0, got={"a": 10}, new="a"), step(1), step(2, got={"b": 10}, new="b"))
    recorded_words(finding.example)
