import textwrap

import pytest

from schedtrace.compare.comparison_verdict import verdict
from schedtrace.compare.metric_changes import METRICS
from schedtrace.model.causes import Cause
from schedtrace.model.comparison import FindingChange, MetricChange, Outcome, Sample
from schedtrace.present.phrases import plain

SAME = "no difference found"
KINDS = {metric.name: metric for metric in METRICS}


def sample(*values):
    mean = sum(values) / len(values)
    counts = {"count": len(values), "effective_count": len(values)}
    return Sample(values=list(values), **counts, mean=mean, min=min(values), max=max(values))


def metric(name, base, new, significant=True, floor=None):
    """A metric with these values in the trials of either side, judged so."""
    before, after = sample(*base), sample(*new)
    outcome = {True: Outcome.DIFFERS, False: Outcome.NONE_FOUND, None: Outcome.TOO_FEW}[significant]
    if before.same_figures(after):
        outcome, significant = Outcome.SAME, False
    untold = dict.fromkeys(MetricChange.__struct_fields__)
    told = {
        "name": name,
        "unit": KINDS[name].unit,
        "higher_is_better": KINDS[name].higher_is_better,
        "base": before,
        "new": after,
        "change_frac": after.mean / before.mean - 1 if before.mean else None,
        "significant": significant,
        "outcome": outcome,
        "noise_floor_frac": floor,
    }
    return MetricChange(**{**untold, **told})


def finding(state, code="blocked-budget", cause="kv_blocks", *, base=(0, []), new=(0, [])):
    """A finding with its counts and trials on either side."""
    counts = {"base_count": base[0], "new_count": new[0], "base_trials": base[1], "new_trials": new[1]}
    return FindingChange(code=code, cause=cause, state=state, message="", **counts)


def said(*changes, same_work=True, in_turn=True):
    metrics = [change for change in changes if isinstance(change, MetricChange)]
    findings = [change for change in changes if isinstance(change, FindingChange)]
    return plain(verdict(metrics, findings, same_work=same_work, most_tests=11, in_turn=in_turn))


def test_the_largest_changes_come_first_and_no_more_than_three():
    assert said(
        metric("output", (100, 100), (99, 99)),
        metric("total", (100, 100), (150, 150)),
        metric("TTFT p50", (100, 100), (25, 25)),
        metric("TTFT p99", (100, 100), (300, 300)),
    ) == ("TTFT p50 -75.0 %, TTFT p99 +200.0 %, total +50.0 %")


def test_twice_and_half_are_alike_and_keep_their_order():
    twice, half = metric("output", (10, 10), (20, 20)), metric("total", (20, 20), (10, 10))
    assert said(twice, half) == "output +100.0 %, total -50.0 %"
    assert said(half, twice) == "total -50.0 %, output +100.0 %"


@pytest.mark.parametrize(("base", "new", "says"), [((0, 0), (5, 5), "from 0"), ((5, 5), (0, 0), "-100.0 %")])
def test_a_change_from_or_to_nothing_is_the_largest(base, new, says):
    larger = metric("TTFT p50", (1, 1), (1000, 1000))
    assert said(larger, metric("output", base, new)).startswith(f"output {says}, TTFT p50 ")


def test_changes_that_may_be_chance_are_no_news_beside_others():
    chance, certain = metric("output", (10, 20), (15, 30), False), metric("TTFT p50", (10, 20), (30, 40))
    assert said(chance, certain) == "TTFT p50 +133.3 %"


def test_if_nothing_is_certain_that_is_said_with_what_would_have_been_seen():
    chance = [metric("output", (10, 20), (15, 30), False, floor=0.042), metric("total", (1, 1), (1, 1))]
    assert said(*chance) == ("no difference found at this number of trials (4 % in output would have shown)")
    assert said(*chance, finding("went", base=(2, []))) == (
        "gone: blocked-budget kv_blocks; "
        "no other difference found at this number of trials (4 % in output would have shown)"
    )
    assert said(metric("output", (10, 20), (15, 30), False)) == "no difference found at this number of trials"


@pytest.mark.parametrize(
    ("base", "new", "needed"),
    [
        ((100,), (144,), "1 trial a side cannot tell: at least 6 needed"),
        ((100, 101), (144, 145), "2 trials a side cannot tell: 6 needed"),
        ((90, 110), (144, 176), "2 trials a side cannot tell: 6 needed"),
        ((90, 110), (95, 115), "2 trials a side cannot tell: 217 needed"),
    ],
)
def test_as_many_trials_are_named_as_the_change_takes_with_whatever_may_vary(base, new, needed):
    assert said(metric("output", base, new, None)).endswith(f" %, but {needed}")


def test_one_server_against_one_is_said_with_how_large_the_change_is():
    change = metric("output", (100,), (144,), None)
    change.outcome = Outcome.ONE_EACH
    assert said(change) == (
        "output +44.0 %, one server against one: how much it would vary by itself is unknown"
    )
    tested = metric("TTFT p50", (5,), (6,), False, floor=0.3)
    assert said(change, tested) == (
        "no difference found at this number of requests (30 % in TTFT p50 would have shown)"
    )


def test_of_runs_not_made_in_turn_a_difference_may_be_the_machine():
    certain = metric("output", (10, 10), (20, 20))
    assert said(certain, in_turn=False) == ("output +100.0 %; not made in turn: may be the machine")
    assert said(certain, in_turn=None) == "output +100.0 %"
    assert said(metric("output", (1, 1), (1, 1)), in_turn=False) == SAME


def test_without_any_difference_that_is_what_is_said():
    same = [metric("output", (10, 20), (10, 20)), metric("steps", (3, 3), (3, 3))]
    assert said(*same, finding("stayed", base=(1, [1]), new=(1, [1]))) == SAME
    assert said() == SAME


def test_without_a_difference_in_figures_findings_are_still_told():
    gone = finding("went", base=(2, []))
    assert said(metric("output", (10, 20), (10, 20)), gone) == "gone: blocked-budget kv_blocks"


def test_different_workloads_come_before_everything_else():
    changes = [metric("output", (10, 10), (20, 20)), finding("went", base=(1, []))]
    assert said(*changes, same_work=False) == (
        "different workloads: the figures say little; gone: blocked-budget kv_blocks; output +100.0 %"
    )


def test_findings_that_went_come_before_those_that_appeared_and_one_of_each_is_named():
    assert said(
        finding("appeared", "preemption", new=(1, [2])),
        finding("went", cause="lora_cap", base=(1234, [1, 2])),
        finding("went", "arrival-limited", "queue_empty", base=(1, [])),
        finding("stayed", "budget-saturated", "token_budget", base=(1, []), new=(9, [])),
    ) == ("gone: blocked-budget lora_cap and 1 more; new: preemption")


def test_of_findings_that_only_went_two_are_named():
    codes = ("queueing", "stall", "preemption")
    assert (
        said(*(finding("went", code, base=(1, [])) for code in codes)) == "gone: queueing, stall and 1 more"
    )


@pytest.mark.parametrize("same_work", [True, False])
@pytest.mark.parametrize("steadied", [True, False])
def test_the_longest_verdict_takes_three_lines(same_work, steadied):
    causes = sorted(Cause, key=len)[-6:]
    changes = [finding(state, cause=cause) for state in ("went", "appeared") for cause in causes]
    figures = [metric(name, (100, 100), (199, 199)) for name in ("requests", "TTFT p99", "E2E p99")]
    figures += [metric("TPOT p50", (100, 100), (33, 33))]
    figures += [metric("first-step requests", (1000, 2000), (2000, 2000))] * steadied
    text = f"Verdict: {said(*changes, *figures, same_work=same_work, in_turn=False)}"
    assert len(textwrap.wrap(text, 80)) <= 3, text


@pytest.mark.parametrize(
    ("base", "new", "says"),
    [
        ((1, 4), (4, 4), "first-step requests now always 4 (were 1 to 4)"),
        ((4, 4), (1, 4), "first-step requests now 1 to 4 (were always 4)"),
    ],
)
def test_first_steps_that_became_steady_or_no_longer_are_so_are_told_of_several_trials(base, new, says):
    assert said(metric("first-step requests", base, new)) == says


@pytest.mark.parametrize(
    ("name", "base", "new"),
    [
        ("first-step requests", (1, 4), (2, 4)),
        ("first-step requests", (4, 4), (5, 5)),
        ("steps", (1, 4), (4, 4)),
        ("steps", (4, 4), (1, 4)),
    ],
)
def test_of_anything_else_nobody_says_that_it_became_steady_or_no_longer_is(name, base, new):
    assert " now " not in said(metric(name, base, new))


@pytest.mark.parametrize("significant", [False, None])
def test_that_first_steps_became_steady_is_not_said_where_it_may_be_chance(significant):
    assert " now " not in said(metric("first-step requests", (1, 4), (4, 4), significant))


def test_one_figure_in_other_units_is_told_once():
    both = [metric("output", (10, 10), (20, 20)), metric("total", (90, 90), (180, 180))]
    assert said(*both) == "output +100.0 %"
