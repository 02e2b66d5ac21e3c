import textwrap

import pytest

from schedtrace.compare.compare import comparison_verdict
from schedtrace.compare.metric_changes import METRICS
from schedtrace.model.causes import Cause
from schedtrace.model.comparison import FindingChange, MetricChange, Outcome, Sample
from schedtrace.present.phrases import plain

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
    return comparison_verdict(metrics, findings, same_work=same_work, most_tests=11, in_turn=in_turn)


UP, ALIKE = metric("output", (10, 10), (20, 20)), metric("output", (10, 20), (10, 20))
HALF = metric("total", (20, 20), (10, 10))
CHANCE = metric("output", (10, 20), (15, 30), False)
SEEN = metric("output", (10, 20), (15, 30), False, floor=0.042)
ONE_EACH = metric("output", (100,), (144,), None)
ONE_EACH.outcome = Outcome.ONE_EACH
LARGE = metric("TTFT p50", (1, 1), (1000, 1000))
GONE, STAYED = finding("went", base=(2, [])), finding("stayed", base=(1, [1]), new=(1, [1]))
GONE_CODES = [finding("went", code, base=(1, [])) for code in ("queueing", "stall", "preemption")]


CHANGES = {
    "the largest changes come first, and no more than three": [
        metric("output", (100, 100), (99, 99)),
        metric("total", (100, 100), (150, 150)),
        metric("TTFT p50", (100, 100), (25, 25)),
        metric("TTFT p99", (100, 100), (300, 300)),
    ],
    "twice and half are alike and keep their order": [UP, HALF],
    "half and twice likewise": [HALF, UP],
    "a change from nothing is the largest": [LARGE, metric("output", (0, 0), (5, 5))],
    "a change to nothing is the largest": [LARGE, metric("output", (5, 5), (0, 0))],
    "what may be chance is no news beside others": [CHANCE, metric("TTFT p50", (10, 20), (30, 40))],
    "one figure in other units is told once": [UP, metric("total", (90, 90), (180, 180))],
    "shapes are told where nothing else is": [
        metric("steps", (3, 3), (4, 4)),
        metric("output", (1, 1), (1, 1)),
    ],
    "shapes are not told beside findings": [metric("steps", (3, 3), (4, 4)), GONE],
    "nothing is certain": [CHANCE],
    "nothing is certain, with what would have been seen": [SEEN, metric("total", (1, 1), (1, 1))],
    "nothing else is certain": [SEEN, GONE],
    "one server against one": [ONE_EACH],
    "one server against one with enough requests": [
        ONE_EACH,
        metric("TTFT p50", (5,), (6,), False, floor=0.3),
    ],
    "nothing differs": [ALIKE, metric("steps", (3, 3), (3, 3)), STAYED],
    "nothing is there": [],
    "only findings differ": [ALIKE, GONE],
    "findings that went come before those that appeared, and one of each is named": [
        finding("appeared", "preemption", new=(1, [2])),
        finding("went", cause="lora_cap", base=(1234, [1, 2])),
        finding("went", "arrival-limited", "queue_empty", base=(1, [])),
        finding("stayed", "decode-starves-prefill", "token_budget", base=(1, []), new=(9, [])),
    ],
    "of findings that only went two are named": GONE_CODES,
    "first steps that became steady": [metric("first-step requests", (1, 4), (4, 4))],
    "first steps that no longer are steady": [metric("first-step requests", (4, 4), (1, 4))],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_verdict_on_these_changes(changes, recorded_words):
    recorded_words(said(*changes))


@pytest.mark.parametrize(
    ("base", "new"),
    [((100,), (144,)), ((100, 101), (144, 145)), ((90, 110), (144, 176)), ((90, 110), (95, 115))],
)
def test_as_many_trials_are_named_as_the_change_takes_with_whatever_may_vary(base, new, recorded_words):
    recorded_words(said(metric("output", base, new, None)))


def test_of_runs_not_made_in_turn_a_difference_may_be_the_machine(recorded_words):
    recorded_words(said(UP, in_turn=in_turn) for in_turn in (False, None))
    recorded_words(said(metric("output", (1, 1), (1, 1)), in_turn=False))


def test_different_workloads_come_before_everything_else(recorded_words):
    recorded_words(said(UP, GONE, same_work=False))


@pytest.mark.parametrize("same_work", [True, False])
@pytest.mark.parametrize("steadied", [True, False])
def test_the_longest_verdict_takes_three_lines(same_work, steadied):
    causes = sorted(Cause, key=len)[-6:]
    changes = [finding(state, cause=cause) for state in ("went", "appeared") for cause in causes]
    figures = [metric(name, (100, 100), (199, 199)) for name in ("requests", "TTFT p99", "E2E p99")]
    figures += [metric("TPOT p50", (100, 100), (33, 33))]
    figures += [metric("first-step requests", (1000, 2000), (2000, 2000))] * steadied
    text = f"Verdict: {plain(said(*changes, *figures, same_work=same_work, in_turn=False))}"
    assert len(textwrap.wrap(text, 80)) <= 3, text


@pytest.mark.parametrize(
    ("name", "base", "new", "significant"),
    [
        ("first-step requests", (1, 4), (2, 4), True),
        ("first-step requests", (4, 4), (5, 5), True),
        ("steps", (1, 4), (4, 4), True),
        ("steps", (4, 4), (1, 4), True),
        ("first-step requests", (1, 4), (4, 4), False),
        ("first-step requests", (1, 4), (4, 4), None),
    ],
)
def test_of_anything_else_or_what_may_be_chance_nobody_says_that_it_became_steady(
    name, base, new, significant, recorded_words
):
    recorded_words(said(metric(name, base, new, significant)))
