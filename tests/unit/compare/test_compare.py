"""Comparisons of two runs: the document, its findings, and the verdict."""

import textwrap
from itertools import permutations

import pytest

from schedtrace.compare.comparability import fairness_notes, taken_in_turn
from schedtrace.compare.compare import compare, comparison_verdict, finding_changes, refusal_changes
from schedtrace.compare.metric_changes import METRICS
from schedtrace.diagnose.analyze import analyze_run
from schedtrace.errors import InputError
from schedtrace.model.causes import Cause
from schedtrace.model.comparison import FindingChange, MetricChange, Outcome, Sample
from schedtrace.model.message import Count, plain
from schedtrace.model.trace import Exit
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests import makers
from tests.makers import STEP_EVERY_US, arrival, finish, manifest, result, run_folder, step, workload
from tests.unit.compare.reports import metrics_of, report
from tests.unit.recorded_words import texts


def trials(*first_steps, **fields):
    """One trial each: its first step schedules so many requests of 10 tokens."""
    return [
        step(
            at,
            trial=at + 1,
            got=dict.fromkeys((names := [f"t{at + 1}-{n}" for n in range(count)]), 10),
            new=names,
            arrived=[arrival(name, 0, queued=0) for name in names],
            **fields,
        )
        for at, count in enumerate(first_steps)
    ]


def results(*seconds):
    """Front-end figures of one trial each: 40 output tokens in so many seconds."""
    return manifest(trials=[result(at, elapsed) for at, elapsed in enumerate(seconds, start=1)])


def test_a_comparison_names_both_runs_and_has_their_settings_metrics_and_findings(run_of, recorded_words):
    base = run_of("a", *trials(1, 1), about=results(2.0, 4.0))
    new = run_of("b", *trials(1, 1, waiting=1, ended=Cause.KV_BLOCKS), about=results(1.0, 1.5), model="new")
    comparison = compare(base=base, new=new)
    assert (comparison.base_label, comparison.new_label) == ("a", "b")
    assert (comparison.base_path, comparison.new_path) == (str(base.path), str(new.path))
    assert [change.name for change in comparison.config] == ["model"]
    assert metrics_of(comparison)["output"].change_frac == pytest.approx((40 + 40 / 1.5) / 30 - 1)
    assert ("blocked-budget", "kv_blocks") in {
        (finding.code, finding.cause) for finding in comparison.findings
    }
    recorded_words(comparison.verdict)


def test_a_run_does_not_differ_from_itself(run_of, recorded_words):
    run = run_of("a", *trials(1, 1), about=results(1.0, 2.0))
    comparison = compare(base=run, new=run)
    assert (comparison.notes, comparison.config) == ([], [])
    recorded_words(comparison.verdict)


def test_one_trial_on_a_side_is_noted_and_so_are_different_numbers_of_them(run_of, recorded_words):
    one, two = run_of("one", *trials(1)), run_of("two", *trials(1, 1))
    recorded_words(compare(base=one, new=two).notes)
    assert compare(base=two, new=two).notes == []


def test_problems_are_noted_with_the_side_that_has_them(run_of, recorded_words):
    base, new = run_of("a", step(0), step(2)), run_of("b", step(0), about=manifest(status="interrupted"))
    notes = texts(compare(base=base, new=new).notes[:2])
    recorded_words(note.replace(str(base.path), "BASE") for note in notes)


def test_throughput_of_different_sources_is_noted(run_of, recorded_words):
    done = finish("t1-0", arrived_us=0, first_token_us=1, last_token_us=900)
    lines = trials(1, finished=[done])
    front_end, trace = run_of("a", *lines, about=results(2.0)), run_of("b", *lines)
    unknown = run_of("c", *trials(1))
    for base, new in permutations((front_end, trace, unknown), 2):
        recorded_words(compare(base=base, new=new).notes)


@pytest.mark.parametrize(
    "load",
    [
        {"num_prompts": 9},
        {"num_prompts": 1},
        {"input_tokens": 4000},
        {"output_tokens": 50},
        {"dataset": "x.json", "input_tokens": None},
        {"request_rate": 2.0},
    ],
    ids=str,
)
def test_different_workloads_are_noted_and_come_first_in_the_verdict(run_of, load, recorded_words):
    base = run_of("a", step(0), about=manifest(workload=workload()))
    new = run_of("b", step(0), about=manifest(workload=workload(**load)))
    comparison = compare(base=base, new=new)
    recorded_words(comparison.notes[0], comparison.verdict)


@pytest.mark.parametrize(
    "load", [{"prequeue": True}, {"warmup_requests": 3}, {"keep_prefix_cache": True}, None]
)
def test_the_same_requests_or_unknown_ones_are_the_same_work_however_handed_over(
    run_of, load, recorded_words
):
    base = run_of("a", step(0), about=manifest(workload=workload()))
    new = run_of("b", step(0), about=None if load is None else manifest(workload=workload(**load)))
    recorded_words(compare(base=base, new=new).notes)


def test_different_models_on_different_workloads_have_nothing_in_common(run_of):
    base = run_of("a", step(0), about=manifest(workload=workload(num_prompts=4)), model="small")
    new = run_of("b", step(0), about=manifest(workload=workload(num_prompts=9)), model="large")
    with pytest.raises(InputError) as refused:
        compare(base=base, new=new)
    assert str(refused.value) == (
        f"nothing in common to compare: {base.path} ran small, {new.path} ran large, on different workloads"
    )


def test_different_models_on_the_same_workload_can_be_compared(run_of):
    about = manifest(workload=workload())
    base, new = (run_of(name, step(0), about=about, model=name) for name in ("small", "large"))
    assert [change.name for change in compare(base=base, new=new).config] == ["model"]


@pytest.mark.parametrize("empty", ["base", "new"])
def test_a_run_without_a_step_cannot_be_compared(run_of, empty):
    runs = {"base": run_of("a", step(0)), "new": run_of("b", step(0))} | {empty: run_of("none")}
    with pytest.raises(InputError, match=r"none: no step in it to compare$"):
        compare(**runs)


def test_an_engine_without_a_step_leaves_it_to_the_others(tmp_path):
    run_folder(tmp_path, step(0, got={"a": 1}))
    run = read_run(run_folder(tmp_path, engine_rank=1))
    assert metrics_of(compare(base=run, new=run))["steps"].base.mean == 1


def served(count, prompt=100, output=10):
    """A server's trace: so many requests that came and finished."""
    names = [f"r{n}" for n in range(count)]
    arrivals = [arrival(name, 0, prompt_tokens=prompt) for name in names]
    got = dict.fromkeys(names, prompt)
    done = [finish(n, arrived_us=0, first_token_us=1, last_token_us=900, output_tokens=output) for n in names]
    return [step(0, got=got, new=names, arrived=arrivals, budget=100_000), step(1, finished=done)]


@pytest.mark.parametrize(
    "load",
    [
        {"count": 30},
        {"count": 20, "prompt": 106},
        {"count": 20, "output": 20},
        {"count": 21, "prompt": 105},
    ],
    ids=str,
)
def test_loads_of_servers_that_differ_by_more_than_a_twentieth_are_noted(run_of, load, recorded_words):
    recorded_words(compare(base=run_of("a", *served(20)), new=run_of("b", *served(**load))).notes)


def test_where_both_workloads_are_recorded_these_are_compared(run_of, recorded_words):
    about = manifest(workload=workload())
    base, new = run_of("a", *served(20), about=about), run_of("b", *served(30), about=about)
    recorded_words(compare(base=base, new=new).notes)


class Changed:
    """One metric of which only the samples matter."""

    name = "output"

    def __init__(self, base, new):
        self.base, self.new = (
            Sample(values=[], count=20, effective_count=worth, mean=1, min=1, max=1) for worth in (base, new)
        )


@pytest.fixture
def views(run_of):
    """Views of two runs of two steps each, the second made so much later."""

    def made(later_us, **new):
        anchors = {"base": 10**15, "new": 10**15 + later_us}
        runs = {name: run_of(name, step(0), step(1), wall_anchor_us=at) for name, at in anchors.items()}
        if new:
            runs["new"] = run_of("new", step(0), wall_anchor_us=anchors["new"], **new)
        return {name: make_timeline(run.traces[0]) for name, run in runs.items()}

    return made


@pytest.mark.parametrize(
    ("later_us", "in_turn"), [(0, True), (STEP_EVERY_US, True), (STEP_EVERY_US + 1, False), (-20_000, False)]
)
def test_runs_whose_steps_overlap_in_time_were_made_in_turn(views, later_us, in_turn):
    assert taken_in_turn(**views(later_us)) is in_turn


def notes(sides, *metrics):
    return fairness_notes(**sides, metrics=list(metrics))


def test_one_run_after_the_other_and_another_machine_are_noted(views, recorded_words):
    recorded_words(notes(views(10**9)), notes(views(10**9, host="far")))
    assert notes(views(0)) == []


def test_trials_that_hang_together_are_noted_for_their_side(views, recorded_words):
    recorded_words(notes(views(0), Changed(20.0, 5.5)))


def blocked_budget(comparison):
    """What became of this kind of finding: other rules may have more to say about so few steps."""
    return [change for change in comparison.findings if change.code == "blocked-budget"]


def blocked(number, cause, **fields):
    return step(number, got={"x": 1}, waiting=1, waiting_tokens_after=5, ended=cause, **fields)


def test_findings_went_appeared_or_stayed_by_code_and_cause(run_of, recorded_words):
    base = run_of("a", blocked(0, Cause.KV_BLOCKS), blocked(1, Cause.LORA_CAP), blocked(2, Cause.LORA_CAP))
    new = run_of("b", blocked(0, Cause.LORA_CAP), blocked(1, Cause.MAX_NUM_SEQS))
    comparison = compare(base=base, new=new)
    told = {
        (one.code, one.cause): (one.state, one.base_count, one.new_count)
        for one in blocked_budget(comparison)
    }
    assert told == {
        ("blocked-budget", "kv_blocks"): ("went", 1, 0),
        ("blocked-budget", "lora_cap"): ("stayed", 2, 1),
        ("blocked-budget", "max_num_seqs"): ("appeared", 0, 1),
    }
    recorded_words(comparison.verdict)


def test_its_message_is_of_the_new_run_or_of_the_base_where_that_has_none(run_of):
    base = run_of("a", blocked(0, Cause.LORA_CAP))
    gone, stayed = run_of("b", step(0, got={"x": 1})), [blocked(at, Cause.LORA_CAP) for at in range(2)]
    for new, state, steps in ((gone, "went", 1), (run_of("c", *stayed), "stayed", 2)):
        [change] = blocked_budget(compare(base=base, new=new))
        assert (change.state, change.message.arguments["steps"]) == (state, Count(steps, "step"))


def test_trials_that_show_a_finding_are_told_for_both_sides(run_of):
    base = run_of("a", blocked(0, Cause.KV_BLOCKS, trial=2), blocked(1, Cause.KV_BLOCKS, trial=1))
    new = run_of("b", blocked(0, Cause.KV_BLOCKS, trial=3))
    [change] = blocked_budget(compare(base=base, new=new))
    assert (change.base_trials, change.new_trials) == ([1, 2], [3])


def exact(cause, request_id, detail=None):
    return Exit("waiting", "break", cause, request_id, 0, detail, via="source")


def changed_refusals(run_of, base, new):
    reports = [analyze_run(run_of(name, *lines)) for name, lines in (("a", base), ("b", new))]
    return refusal_changes(base=reports[0], new=reports[1])


def test_the_causes_of_two_runs_are_compared_by_their_share_of_the_steps(run_of):
    refused, served = (
        [step(n, waiting=1, ended=exact(Cause.MAX_NUM_SEQS, "a")) for n in range(4)],
        [step(n) for n in range(4)],
    )
    [change] = changed_refusals(run_of, refused, [*refused[:1], *served[1:]])
    assert (change.cause, change.base_exits, change.new_exits) == ("max_num_seqs", 4, 1)
    assert (change.base_steps_frac, change.new_steps_frac) == (1.0, 0.25)


def test_who_is_refused_on_one_side_only_is_told_too(run_of):
    base, new = (
        [step(0, waiting=1, ended=exact(Cause.KV_BLOCKS, "a", detail=detail))]
        for detail in ("free", "watermark")
    )
    changes = changed_refusals(run_of, base, new)
    rows = [(change.detail, change.base_exits, change.new_exits) for change in changes]
    assert rows == [("free", 1, 0), ("watermark", 0, 1)]


def found(code, *, cause=None, symptoms=(), **shares):
    return makers.finding(code, cause=cause, count=3, symptoms=list(symptoms), **shares)


def bound(share):
    """A side of which this share of the requests' time was for KV blocks; found from a hundredth on."""
    return report(findings=[found("kv-bound", share_frac=share)] if share >= 0.01 else [])


@pytest.mark.parametrize(
    ("base", "new", "state"),
    [
        (0.015, 0.009, "stayed"),
        (0.009, 0.015, "stayed"),
        (0.02, 0.009, "went"),
        (0.9, 0.0, "went"),
        (0.0, 0.9, "appeared"),
        (0.9, 0.1, "stayed"),
    ],
)
def test_a_share_that_crossed_its_threshold_went_only_if_it_halved(base, new, state):
    [change] = finding_changes(base=bound(base), new=bound(new))
    assert change.state == state
    known = [share if share >= 0.01 else None for share in (base, new)]
    assert [change.base_frac, change.new_frac] == known
    assert change.threshold_frac == 0.01


@pytest.mark.parametrize(
    ("cost_frac", "state"), [(0.012, "stayed"), (0.0199, "stayed"), (0.02, "went"), (0.5, "went")]
)
def test_a_share_that_the_other_side_does_not_have_is_at_most_the_threshold(cost_frac, state):
    base = report(findings=[found("scheduler-overhead", cost_frac=cost_frac)])
    [change] = finding_changes(base=base, new=report())
    assert (change.state, change.base_frac, change.new_frac) == (state, cost_frac, None)


def test_what_counts_events_went_when_there_are_none():
    [change] = finding_changes(base=report(findings=[found("preemption")]), new=report())
    assert (change.state, change.threshold_frac, change.base_frac) == ("went", None, None)


def test_a_root_cause_that_became_a_symptom_of_another_stayed():
    alone = report(findings=[found("max-num-seqs-bound", cause="max_num_seqs", share_frac=0.3)])
    beneath = found("max-num-seqs-bound", cause="max_num_seqs", share_frac=0.2)
    under = report(findings=[found("kv-bound", cause="kv_blocks", share_frac=0.6, symptoms=[beneath])])
    states = {change.code: change.state for change in finding_changes(base=alone, new=under)}
    assert states == {"kv-bound": "appeared", "max-num-seqs-bound": "stayed"}


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
        finding("stayed", "stall", "token_budget", base=(1, []), new=(9, [])),
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
