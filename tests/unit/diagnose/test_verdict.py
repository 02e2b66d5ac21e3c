import pytest

from schedtrace.diagnose.metrics import METRICS
from schedtrace.diagnose.verdict import percent, verdict
from schedtrace.model.comparison import FindingChange, MetricChange, Sample

SAME = "no difference found"
KINDS = {metric.name: metric for metric in METRICS}


def sample(*values):
    return Sample(count=len(values), mean=sum(values) / len(values), min=min(values), max=max(values))


def metric(name, base, new):
    """A metric with these values in the trials of either side."""
    before, after = sample(*base), sample(*new)
    apart = after.min > before.max or after.max < before.min
    return MetricChange(
        name=name,
        unit=KINDS[name].unit,
        higher_is_better=KINDS[name].higher_is_better,
        base=before,
        new=after,
        change_frac=after.mean / before.mean - 1 if before.mean else None,
        beyond_spread=apart if min(before.count, after.count) > 1 else None,
    )


def finding(state, code="blocked-budget", cause="kv_blocks", *, base=(0, []), new=(0, [])):
    """A finding with its counts and trials on either side."""
    counts = {"base_count": base[0], "new_count": new[0], "base_trials": base[1], "new_trials": new[1]}
    return FindingChange(code=code, cause=cause, state=state, message="", **counts)


def said(*changes, same_work=True):
    metrics = [change for change in changes if isinstance(change, MetricChange)]
    findings = [change for change in changes if isinstance(change, FindingChange)]
    return verdict(metrics, findings, same_work=same_work)


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


def test_changes_within_the_spread_are_no_news_beside_others():
    within, beyond = metric("output", (10, 20), (15, 30)), metric("TTFT p50", (10, 20), (30, 40))
    assert said(within, beyond) == "TTFT p50 +133.3 %"


def test_if_nothing_is_beyond_the_spread_throughput_is_told_with_that():
    within = [metric("output", (10, 20), (15, 30)), metric("TTFT p50", (10, 20), (20, 30))]
    assert said(*within) == "output +50.0 %, within the spread of the trials"


@pytest.mark.parametrize(("base", "new"), [((10,), (20,)), ((10,), (20, 30)), ((9, 11), (20,))])
def test_one_trial_on_a_side_may_be_noise(base, new):
    assert said(metric("output", base, new)).endswith(", one trial on a side: may be noise")


def test_without_any_difference_that_is_what_is_said():
    same = [metric("output", (10, 20), (10, 20)), metric("steps", (3, 3), (3, 3))]
    assert said(*same, finding("stayed", base=(1, [1]), new=(1, [1]))) == SAME
    assert said() == SAME


def test_without_a_difference_in_figures_findings_are_still_told():
    gone = finding("went", base=(2, []))
    assert said(metric("output", (10, 20), (10, 20)), gone) == "gone: blocked-budget kv_blocks (2 steps)"


def test_different_workloads_come_before_everything_else():
    changes = [metric("output", (10, 10), (20, 20)), finding("went", base=(1, []))]
    assert said(*changes, same_work=False) == (
        "different workloads, so the figures say little; gone: blocked-budget kv_blocks (1 step); "
        "output +100.0 %"
    )


def test_findings_that_went_come_before_those_that_appeared_with_counts_of_their_own_side():
    assert said(
        finding("appeared", "preemption", new=(1, [2])),
        finding("went", cause="lora_cap", base=(1234, [1, 2])),
        finding("went", "arrival-limited", "queue_empty", base=(1, [])),
        finding("stayed", "budget-saturated", "token_budget", base=(1, []), new=(9, [])),
    ) == (
        "gone: blocked-budget lora_cap (1,234 steps in 2 trials), arrival-limited (1 step); "
        "new: preemption (1 time in 1 trial)"
    )


@pytest.mark.parametrize(
    ("base", "new", "says"),
    [
        ((1, 4), (4, 4), "first-step requests now 4 in every trial (were 1 to 4)"),
        ((4, 4), (1, 4), "first-step requests now vary from 1 to 4 (were 4)"),
    ],
)
def test_first_steps_that_became_steady_or_no_longer_are_so_are_told_of_several_trials(base, new, says):
    assert said(metric("first-step requests", base, new)) == says


@pytest.mark.parametrize(
    ("name", "base", "new"),
    [
        ("first-step requests", (1, 4), (2, 4)),
        ("first-step requests", (4, 4), (5, 5)),
        ("first-step requests", (1, 4), (4,)),
        ("first-step requests", (4,), (1, 4)),
        ("steps", (1, 4), (4, 4)),
        ("steps", (4, 4), (1, 4)),
    ],
)
def test_of_anything_else_nobody_says_that_it_became_steady_or_no_longer_is(name, base, new):
    assert " now " not in said(metric(name, base, new))


@pytest.mark.parametrize(("change", "text"), [(0.1234, "+12.3 %"), (-0.5, "-50.0 %"), (None, "from 0")])
def test_changes_carry_their_sign(change, text):
    assert percent(change) == text
