"""Root causes by weight, each with what it also caused."""

from types import SimpleNamespace

import polars as pl
import pytest

from schedtrace.diagnose.root_causes import Judged, ordered_findings, ranked, reranked
from schedtrace.model.message import NOTHING, Share
from schedtrace.model.report import Advice, Gain
from schedtrace.model.say import say
from tests import makers


def finding(code, share=None, **fields):
    return makers.finding(code, **{"share_frac": share, "severity": "critical", **fields})


def root(code, share, **fields):
    advised = [Advice(message=say("do it"))]
    return finding(code, share, title=say("A limit"), cause=code, advice=advised, **fields)


def saving(frac):
    return Gain(metric="output_tokens_per_s", change_frac=1.0, saved_frac=frac, method="step_time")


def timeline(**charges):
    """Of whose charges only these are known: a request's microseconds by what they are charged to."""
    rows = [(name, cause, us) for cause, times in charges.items() for name, us in times.items()]
    schema = {"request_id": pl.String, "charge": pl.String, "time_us": pl.Int64}
    return SimpleNamespace(requests_us=100, charges=pl.DataFrame(rows, schema=schema, orient="row"))


def codes(findings):
    return {found.code: [symptom.code for symptom in found.symptoms] for found in findings}


def test_what_leads_is_first_then_what_weighs_most():
    found = [
        root("kv-bound", 0.3),
        root("max-num-seqs-bound", 0.9, gain=saving(0.1)),
        root("token-budget-bound", 0.1, gain=saving(0.5)),
        root("other-limit", 0.01, leads=True),
    ]
    order = [one.code for one in ranked([ordered_findings(timeline(), found)])]
    assert order == ["other-limit", "token-budget-bound", "kv-bound", "max-num-seqs-bound"]


@pytest.mark.parametrize(("share", "first"), [(0.40, "long-prompt"), (0.39, "kv-bound")])
def test_a_cause_that_names_the_holder_precedes_a_shortage_of_nearly_the_same_share(share, first):
    """Nearly: at least 80 % of what the shortage explains."""
    roots = [root("kv-bound", 0.5), root("long-prompt", share)]
    in_order = ranked([ordered_findings(timeline(), roots)])
    assert in_order[0].code == first
    assert reranked(in_order) == in_order


@pytest.mark.parametrize(("share", "first"), [(0.25, "priority-inversion"), (0.24, "max-num-seqs-bound")])
def test_a_holder_of_the_same_resource_precedes_its_shortage_from_half_of_its_share(share, first):
    seats = [root("max-num-seqs-bound", 0.5), root("priority-inversion", share)]
    for finding_ in seats:
        finding_.cause = "max_num_seqs"
    [found] = ranked([ordered_findings(timeline(), seats)])
    assert (found.code, len(found.symptoms)) == (first, 1)


def test_a_symptom_stands_beneath_the_largest_of_its_root_causes():
    found = [finding("blocked-budget"), root("kv-bound", 0.3), root("max-num-seqs-bound", 0.4)]
    assert codes(ranked([ordered_findings(timeline(), found)])) == {
        "max-num-seqs-bound": ["blocked-budget"],
        "kv-bound": [],
    }


def test_a_symptom_of_no_root_cause_held_nobody_up():
    [alone] = ranked([ordered_findings(timeline(), [finding("preemption")])])
    assert (alone.code, alone.severity) == ("preemption", "info")


@pytest.mark.parametrize(
    ("share", "waits_longer", "folded"),
    [(0.3, "ab", True), (0.31, "ab", False), (0.3, "a", True), (0.3, "", False)],
)
def test_a_smaller_wait_of_the_same_requests_is_a_symptom(share, waits_longer, folded):
    """a and b wait 10 us for a seat, each; these as long for KV blocks, c all the rest."""
    waits = {"c": 100, **dict.fromkeys(waits_longer, 10)}
    view = timeline(kv_blocks=waits, max_num_seqs={"a": 10, "b": 10})
    found = ranked([ordered_findings(view, [root("kv-bound", 0.6), root("max-num-seqs-bound", share)])])
    assert [one.code for one in found] == ["kv-bound", *([] if folded else ["max-num-seqs-bound"])]
    if folded:
        [symptom] = found[0].symptoms
        assert (symptom.code, symptom.advice, symptom.title) == ("max-num-seqs-bound", [], say("A limit"))


def test_symptoms_of_what_was_folded_go_with_it():
    view = timeline(kv_blocks={"a": 10}, token_budget={"a": 5})
    found = [root("kv-bound", 0.6), root("token-budget-bound", 0.2), finding("prefill-starves-decode")]
    assert codes(ranked([ordered_findings(view, found)])) == {
        "kv-bound": ["token-budget-bound", "prefill-starves-decode"]
    }


def test_the_same_root_cause_on_another_engine_is_no_second_one():
    engines = [
        ordered_findings(timeline(), [root("kv-bound", share, engine_rank=rank)])
        for rank, share in enumerate((0.2, 0.4))
    ]
    [found] = ranked(engines)
    assert (found.engine_rank, found.engine_ranks, found.symptoms) == (1, [0, 1], [])


def test_shares_of_several_engines_are_of_all_requests_time():
    """Engine 0 has 3 of 4 parts of that time, and half of it waits; all of engine 1's saves nothing."""
    verdict = say("It is {share:%}{free}.", share=0.5, free=say(" and {x:%} is free", x=0.9))
    known = {"title": say("A limit"), "symptoms": [finding("preemption", 0.2)]}
    engines = [
        Judged(300, [finding("kv-bound", 0.5, verdict=verdict, gain=saving(0.4), **known)], []),
        Judged(100, [root("kv-bound", 1.0, engine_rank=1, gain=saving(0.8))], []),
    ]
    engines[1].roots[0].cause = None
    [found] = ranked(engines)
    assert found.share_frac == 0.5 * 0.75 + 0.25
    assert found.gain.saved_frac == pytest.approx(0.4 * 0.75 + 0.8 * 0.25)
    assert found.symptoms[0].share_frac == pytest.approx(0.15)
    assert found.verdict.arguments == {"share": Share(0.5 * 0.75 + 0.25), "free": NOTHING}


def test_a_verdict_without_that_share_names_its_engine(recorded_words):
    """It is half of 0.8, the share of all engines, by chance."""
    verdict = say("It is {share:%} of the busy time.", share=0.4)
    engines = [Judged(100, [root("kv-bound", 0.8, engine_rank=rank)], []) for rank in (0, 1)]
    engines[0].roots[0].verdict = engines[1].roots[0].verdict = verdict
    recorded_words(cause.verdict for cause in ranked(engines))


def test_what_one_of_two_engines_shows_is_of_all_requests_time_too():
    engines = [Judged(300, [], []), Judged(100, [root("kv-bound", 0.8, engine_rank=1)], [])]
    assert [found.share_frac for found in ranked(engines)] == [pytest.approx(0.2)]
    assert [found.share_frac for found in ranked(engines[1:])] == [0.8]


def test_causes_differ_although_the_code_is_the_same():
    found = [root("other-limit", 0.4), root("other-limit", 0.3)]
    found[1].cause = "lora_cap"
    assert len(ranked([ordered_findings(timeline(), found)])) == 2


@pytest.mark.parametrize(("waited", "beneath"), [({0, 1, 9}, True), ({0, 9}, False)])
def test_slow_steps_that_mostly_waited_for_another_ranks_prefill_are_its_symptom(waited, beneath):
    """Engine 1 has four slow steps; two are half of them."""
    slow = root("slow-steps", 0.4, engine_rank=1, steps=[0, 1, 2, 3])
    stall = root("prefill-stall", 0.1)
    found = codes(ranked([Judged(100, [slow], [])], [stall], {1: frozenset(waited)}))
    assert found == (
        {"prefill-stall": ["slow-steps"]} if beneath else {"slow-steps": [], "prefill-stall": []}
    )
