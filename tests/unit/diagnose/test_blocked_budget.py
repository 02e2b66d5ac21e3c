import re

import msgspec
import pytest

from schedtrace.model.causes import NOT_A_REFUSAL, Cause
from schedtrace.model.report import MAX_STEPS
from schedtrace.model.trace import Exit
from schedtrace.present.phrases import plain
from tests.makers import step

CODE = "blocked-budget"
REFUSALS = [cause for cause in Cause if cause not in {*NOT_A_REFUSAL, Cause.TOKEN_BUDGET}]


def refused(number, cause=Cause.KV_BLOCKS, got=100, waiting=2, waiting_tokens=300, **fields):
    ended = cause if isinstance(cause, Exit) else Exit("waiting", "break", cause, "next")
    tokens = {"waiting": waiting, "waiting_tokens_after": waiting_tokens, "ended": ended}
    return step(number, got={"x": got} if got else {}, **tokens, **fields)


def test_budget_left_while_requests_waited_is_found_with_exact_figures(found):
    [finding] = found(
        CODE,
        refused(0, got=100, waiting=2, waiting_tokens=300, kv_blocks_free_after=7),
        refused(1, got=500, waiting=4, waiting_tokens=800, kv_blocks_free_after=3),
        step(2, got={"x": 1}),
    )
    assert (finding.severity, finding.cause, finding.via) == ("warning", "kv_blocks", "inferred")
    assert (finding.count, finding.steps, finding.trials) == (2, [0, 1], [])
    assert finding.tokens == 300 + 500
    assert finding.evidence.mean_budget_left_frac == pytest.approx(0.7)
    assert finding.evidence.mean_waiting == 3
    assert msgspec.to_builtins(finding.evidence.examples[0]) == {
        "step": 1,
        "trial": None,
        "request_id": "next",
        "budget_left": 500,
        "num_waiting_after": 4,
        "num_running_after": 1,
        "kv_blocks_free_after": 3,
        "location": None,
    }
    assert "2 steps of 3 " in plain(finding.message)
    assert "70 %" in plain(finding.message)


@pytest.mark.parametrize("cause", REFUSALS)
def test_every_refusal_is_a_finding_of_its_own_cause(found, cause):
    [finding] = found(CODE, refused(0, cause))
    assert (finding.cause, finding.count) == (cause, 1)
    assert finding.severity == ("info" if cause is Cause.PAUSED else "warning")
    assert "{" not in plain(finding.message)


@pytest.mark.parametrize("cause", sorted({*Cause} - set(REFUSALS)))
def test_no_budget_and_nobody_eligible_are_no_refusals(found, cause):
    assert found(CODE, refused(0, cause)) == []


def test_several_causes_are_several_findings_most_tokens_first(found):
    findings = found(
        CODE,
        refused(0, Cause.MAX_NUM_SEQS, waiting_tokens=10),
        refused(1, Cause.KV_BLOCKS, waiting_tokens=50),
        refused(2, Cause.MAX_NUM_SEQS, waiting_tokens=20),
    )
    told = [(one.cause, one.steps, one.tokens) for one in findings]
    assert told == [("kv_blocks", [1], 50), ("max_num_seqs", [0, 2], 30)]


@pytest.mark.parametrize("near_miss", [{"got": 1000}, {"waiting": 0}, {"got": 1000, "waiting": 0}])
def test_without_budget_left_or_without_anybody_waiting_nothing_is_blocked(found, near_miss):
    assert found(CODE, refused(0, **near_miss)) == []


def test_a_step_that_scheduled_nothing_can_be_blocked(found):
    [finding] = found(CODE, refused(0, Cause.PAUSED, got=0), step(1))
    assert (finding.count, finding.evidence.mean_budget_left_frac) == (1, 1.0)
    assert "1 step of 1 " in plain(finding.message)


def test_unknown_waiting_tokens_do_not_hide_the_finding(found):
    [finding] = found(CODE, refused(0, waiting_tokens=None), refused(1, waiting_tokens=None))
    assert (finding.count, finding.steps, finding.tokens) == (2, [0, 1], 1800)
    assert plain(finding.message).endswith("The trace does not record how many tokens they wanted.")


def test_what_could_have_been_used_is_the_mean_over_the_steps_where_it_is_known(found):
    lines = [
        refused(0, got=100, waiting_tokens=300),
        refused(1, got=900, waiting_tokens=300),
        refused(2, got=1, waiting_tokens=None),
    ]
    [finding] = found(CODE, *lines)
    assert finding.tokens == 300 + 100 + 999
    assert plain(finding.message).endswith(
        "Otherwise each step could have scheduled 200 tokens more on average."
    )


def test_a_prompt_that_did_not_fit_as_a_whole_is_not_said_to_have_fitted(found):
    [finding] = found(CODE, refused(0, Cause.CHUNKED_PREFILL_OFF, got=100, waiting_tokens=2000))
    assert plain(finding.message).endswith(
        "Otherwise each step could have scheduled 900 tokens more on average."
    )


@pytest.mark.parametrize(("waiting", "causes"), [(2, ["other"]), (0, [])])
def test_without_an_exit_the_cause_is_not_known_if_something_waited(found, waiting, causes):
    line = step(0, got={"x": 100}, waiting=waiting, ended=None)
    assert [finding.cause for finding in found(CODE, line)] == causes


def test_a_cause_of_a_newer_version_is_told_by_its_word(found):
    [finding] = found(CODE, refused(0, Exit("waiting", "break", "disk_blocks", "next")))
    assert (finding.cause, finding.severity) == ("disk_blocks", "warning")
    assert "on average): cause disk_blocks. " in plain(finding.message)


def test_one_inferred_exit_makes_the_whole_finding_inferred(found):
    exact = Exit("waiting", "break", Cause.KV_BLOCKS, via="source", location="scheduler.py:7")
    guessed = Exit("waiting", "break", Cause.KV_BLOCKS)
    [mixed] = found(CODE, refused(0, exact), refused(1, guessed))
    [pure] = found(CODE, refused(0, exact), refused(1, exact))
    assert (mixed.via, pure.via) == ("inferred", "source")
    assert (mixed.location, pure.location) == (None, "scheduler.py:7")
    assert "(left at scheduler.py:7)" in plain(mixed.example)  # where it is not said of all of them
    assert "scheduler.py:7" not in plain(pure.example)


def test_details_are_listed_once(found):
    free, watermark = (
        Exit("waiting", "break", Cause.KV_BLOCKS, detail=detail) for detail in ("free", "watermark")
    )
    findings = found(CODE, refused(0, watermark), refused(1, free), refused(2, free))
    assert [finding.evidence.details for finding in findings] == [["free"], ["watermark"]]
    assert {finding.cause for finding in findings} == {"kv_blocks"}
    assert "--watermark" in plain(findings[1].message)


def test_padding_without_budget_and_padding_beyond_the_model_are_two_findings(found):
    budget, length = (
        Exit("waiting", "break", Cause.SPEC_DECODE_PADDING, detail=detail)
        for detail in (None, "max_model_len")
    )
    findings = found(CODE, refused(0, length), refused(1, budget))
    assert [("max_model_len" in plain(finding.message), finding.steps) for finding in findings] == [
        (True, [0]),
        (False, [1]),
    ]


@pytest.mark.parametrize(
    ("config", "says"), [({}, "max.num.seqs.8"), ({"max_num_active_seqs": 5}, "max.num.active.seqs.5")]
)
def test_the_limit_on_seats_is_the_one_that_counts(found, config, says):
    [finding] = found(CODE, refused(0, Cause.MAX_NUM_SEQS), scheduler_config=config)
    assert re.search(says, plain(finding.message))


def test_the_list_of_steps_ends_where_the_count_goes_on(found):
    [finding] = found(CODE, *(refused(number) for number in range(MAX_STEPS + 5)))
    assert finding.steps == list(range(MAX_STEPS))
    assert finding.count == MAX_STEPS + 5


def test_trials_that_show_it_are_counted_against_all(found):
    [finding] = found(CODE, refused(0, trial=1), step(1, trial=2), refused(2, trial=3))
    assert finding.trials == [1, 3]
    assert "2 of 3 trials" in plain(finding.message)


def test_the_finding_is_a_sentence_with_its_example_and_advises_nothing(found):
    [finding] = found(CODE, refused(3, Exit("waiting", "break", Cause.KV_BLOCKS, "next", detail="watermark")))
    assert plain(finding.message) == (
        "1 step of 1 left 90 % of the token budget unused on average although requests waited (2.0 on "
        "average): the next request would have fitted into the free KV blocks, but for the reserve of "
        "--watermark. Otherwise each step could have scheduled 300 tokens more on average."
    )
    assert plain(finding.example) == (
        "step 3: 2 requests waiting, next next in line, 1 running, 900 tokens of budget left, 100 KV "
        "blocks free."
    )
    assert finding.advice == []


def test_a_cause_that_another_package_registers_has_its_meaning(found):
    [finding] = found(
        CODE,
        refused(0, Exit("waiting", "break", "tenant_quota", "next")),
        registered_causes={"tenant_quota": "the tenant's quota of tokens is spent"},
    )
    assert "on average): the tenant's quota of tokens is spent (cause tenant_quota). " in plain(
        finding.message
    )
