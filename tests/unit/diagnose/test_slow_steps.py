import numpy as np
import polars as pl
import pytest

from schedtrace.diagnose import excess
from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.excess import search, step_excesses
from schedtrace.diagnose.excess_features import Feature, StepPhase, features, returning_phases, slow_phases
from schedtrace.diagnose.excess_work import fit_work, judged_steps
from schedtrace.diagnose.rules.slow_steps import UnmarkedSteps
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Events, Exit, ScheduledRequest
from schedtrace.model.trace_facts import Admission, Control, Grammar
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, step
from tests.samples import FINDINGS

CODE = "slow-steps"
GRAPHS = {
    "compilation_config.cudagraph_capture_sizes": [1, 2, 4],
    "compilation_config.max_cudagraph_capture_size": 4,
}


def decodes(sizes, slow=lambda *_: 1, noise=0.05, *, base_us=1000, every_us=20_000, names="abcdefghijkl"):
    """One decode step of every size, with requests a, b, ...: 1,000 us and 100 us a request, plus noise.

    Without ``every_us``, each step comes right after the one before.
    """
    lines, at = [], 0
    for number, size in enumerate(sizes):
        jitter = 1 + noise * ((number * 7 % 11) / 5 - 1)
        took = round((base_us + 100 * size) * jitter * slow(size, number))
        lines.append(
            step(
                number,
                start=at,
                took=0,
                back=took,
                got=dict.fromkeys(names[:size], 1),
                decode_tokens=size,
                arrived=[arrival(name, 0) for name in names] if number == 0 else [],
            )
        )
        at += every_us or took + 20
    return lines


SIZES = [1 + number % 8 for number in range(160)]


def conditions(finding):
    return [(one.feature, one.detail, one.more_than, one.at_most) for one in finding.evidence.conditions]


def test_a_batch_size_cliff(found, recorded_words):
    """Steps above 4 requests take 5 times as long: half of all steps, so the fit on all would be spoilt."""
    [finding] = found(CODE, *decodes(SIZES, lambda size, _: 5 if size > 4 else 1))
    evidence = finding.evidence
    assert (finding.cause, evidence.part, evidence.batch_size, finding.count) == ("execution",) * 2 + (4, 80)
    assert conditions(finding) == [("batch", "", 4, None)]
    assert (evidence.inside, evidence.longer, evidence.outside, evidence.longer_outside) == (80, 80, 80, 0)
    assert evidence.factor == pytest.approx(
        5, rel=0.3
    )  # 5 to 8 requests: how much is the cliff's is not sure
    assert finding.cost_ms == pytest.approx(80 * 4 * 1.65, rel=0.15)
    assert [(advice.setting, advice.value) for advice in finding.advice] == [("max_num_seqs", 4)]
    recorded_words(finding.title, finding.advice)


def test_a_cliff_that_grows_beyond_its_size(found, recorded_words):
    """Above 6 requests, steps take 1,500 us longer, and 400 us more for each request beyond 7.

    These steps are the first half, so that a window of the clock covers them, too; the model of the work does
    not bend at 6.
    """
    sizes = [7 + number % 6 for number in range(120)] + [6 - number % 6 for number in range(120)]
    slow = [1 + (1100 + 400 * (size - 6)) / (1000 + 100 * size) if size > 6 else 1 for size in range(13)]
    [finding] = found(CODE, *decodes(sizes, lambda size, _: slow[size], noise=0.02))
    assert conditions(finding) == [("batch", "", 6, None)]
    assert finding.cost_ms == pytest.approx(
        20 * sum(1100 + 400 * beyond for beyond in range(1, 7)) / 1e3, rel=0.15
    )
    recorded_words(finding.title, finding.advice)


def test_its_share_is_excess_time_times_requests(found):
    """5 to 8 requests take 6 to 7.2 ms longer; 12 requests live for the 160 steps of 20 ms."""
    [finding] = found(CODE, *decodes(SIZES, lambda size, _: 5 if size > 4 else 1, noise=0))
    lived_us = 12 * (159 * 20_000 + 9000)
    excess_us = 20 * sum(size * 4 * (1000 + 100 * size) for size in (5, 6, 7, 8))
    assert finding.share_frac == pytest.approx(excess_us / lived_us, rel=0.15)
    assert finding.severity == "warning"


@pytest.mark.parametrize(("noise", "differs"), [(0.005, False), (0.05, True)])
def test_a_part_is_searched_only_if_a_step_differs_from_its_work(view_of, monkeypatch, noise, differs):
    searched = []
    monkeypatch.setattr(excess, "search", lambda fit, _: searched.append(fit.times_us) or [])
    parts = excess.part_excesses(view_of(*decodes(SIZES, noise=noise)))
    execution = next(part for part in parts if part.part == "execution")
    assert any(times is execution.times_us for times in searched) == differs
    assert bool(execution.compared) == differs


def test_outside_the_captured_graphs(found, recorded_words):
    [finding] = found(CODE, *decodes(SIZES, lambda size, _: 5 if size > 4 else 1), settings=GRAPHS)
    assert finding.evidence.captured_tokens == 4
    assert finding.advice[0].setting == "max_cudagraph_capture_size"
    recorded_words(finding.holder, finding.advice)


@pytest.mark.parametrize(
    "settings",
    [
        GRAPHS | {"compilation_config.max_cudagraph_capture_size": 2},
        GRAPHS | {"compilation_config.max_cudagraph_capture_size": 6},
        GRAPHS | {"compilation_config.cudagraph_mode": "NONE"},
    ],
    ids=["below the cliff", "above it", "not used"],
)
def test_graphs_are_not_blamed_for_a_cliff_elsewhere(found, settings):
    [finding] = found(CODE, *decodes(SIZES, lambda size, _: 5 if size > 4 else 1), settings=settings)
    assert (finding.evidence.batch_size, finding.evidence.captured_tokens) == (4, None)


def with_request(number):
    return number % 20 >= 10 and number < 150


def present(trait=None, factor=3, noise=0.05):
    """r decodes beside a changing batch in half of the steps, which take so many times as long."""
    lines = decodes(SIZES, lambda _, number: factor if with_request(number) else 1, noise)
    for number, line in enumerate(lines):
        if with_request(number):
            got = {one.request_id: 1 for one in line.requests} | {"r": 1}
            back = line.output_us - line.start_us
            lines[number] = step(
                number, start=line.start_us, took=0, back=back, got=got, decode_tokens=len(got)
            )
    lines[0].arrived.append(arrival("r", 0, **(trait or {})))
    return lines


def test_one_request_that_slows_the_steps(found, recorded_words):
    [finding] = found(CODE, *present())
    assert conditions(finding) == [("request", "r", 0, None)]
    assert finding.count == 70
    recorded_words(finding.title, finding.advice)


def test_a_time_that_grows_by_less_than_is_read_for_each_unit(found, recorded_words):
    """The host takes 0.2 us for each token of context, of which r has 1,000 more in every step."""
    lines = decodes(SIZES)
    for number, line in enumerate(lines):
        line.requests.append(ScheduledRequest("r", 1000 * number, 1000, "running"))
        line.schedule_us = 100 + 200 * number
        line.output_us += line.schedule_us
    lines[0].arrived.append(arrival("r", 0, prompt_tokens=160_000))
    findings = found(CODE, *lines)
    [host] = [finding for finding in findings if finding.evidence.part == "schedule"]
    assert host.evidence.per_unit_us
    recorded_words(host.verdict)


ADAPTERS = {"lora_config.max_loras": 2, "lora_config.max_cpu_loras": 4}


def test_adapters_that_take_a_slot(found, recorded_words):
    """Every 5 steps a request comes; two of each of 4 adapters in turn. The first of two finds no slot."""
    lines = decodes(SIZES * 2, lambda _, number: 10 if number % 10 == 0 else 1)
    for number, line in enumerate(lines):
        name, us = f"r{number // 5}", line.start_us
        line.requests.append(ScheduledRequest(name, 0, 1, "running" if number % 5 else "new"))
        if number % 5 == 0:
            line.num_new += 1
            line.arrived.append(arrival(name, us, us, lora=f"tenant-{number // 10 % 4}"))
        if number % 5 == 4:
            line.finished.append(finish(name, finished_us=us + 9000))
    [finding] = found(CODE, *lines, settings=ADAPTERS)
    assert conditions(finding) == [("adapter_slots", "", 0, None)]
    assert finding.count == 32
    assert [(advice.setting, advice.value) for advice in finding.advice] == [("max_loras", 4)]
    recorded_words(finding.title, finding.verdict, finding.advice)


@pytest.mark.parametrize(
    ("slow_from", "slow_until", "feature"),
    [(60, 100, "request"), (20, 100, "clock"), (60, 140, "clock"), (20, 140, "clock")],
    ids=["while it runs", "before it comes", "after it went", "longer than it runs"],
)
def test_a_machine_that_is_slow_for_a_while_is_no_request(found, slow_from, slow_until, feature):
    """r runs in steps 60 to 99."""
    lines = decodes(SIZES, lambda _, number: 3 if slow_from <= number < slow_until else 1)
    for line in lines[60:100]:
        line.requests.append(ScheduledRequest("r", 0, 1))
    lines[0].arrived.append(arrival("r", 0))
    [finding] = found(CODE, *lines)
    assert {one.feature for one in finding.evidence.conditions} == {feature}
    assert finding.count == slow_until - slow_from


@pytest.mark.parametrize(("member_until", "starting"), [(120, ["p"]), (125, [])])
def test_a_range_of_slow_steps_and_the_requests_at_its_ends(found, recorded_words, member_until, starting):
    """Steps 10 to 119 are slow: p is there in the first of them, then r. Batches are small before."""
    sizes = [1 + number % 3 for number in range(10)] + [4 + number % 5 for number in range(150)]
    lines = decodes(sizes, lambda _, number: 4 if 10 <= number < 120 else 1)
    for line in lines[10:70]:
        line.requests.append(ScheduledRequest("p", 0, 1))
    for line in lines[60:member_until]:
        line.requests.append(ScheduledRequest("r", 0, 1))
    [finding] = found(CODE, *lines)
    assert [feature for feature, *_ in conditions(finding)] == ["clock", "clock"]
    assert (finding.count, finding.steps[0]) == (110, 10)
    assert (finding.evidence.starting[-1:], finding.evidence.ending) == (starting, ["r"] if starting else [])
    recorded_words(finding.title, finding.verdict, finding.holder, finding.advice)


@pytest.mark.parametrize(
    ("trait", "asked"),
    [
        ("logprobs", {"logprobs": 0}),
        ("structured", {"structured": True}),
        ("logit_bias", {"logit_bias": 3}),
        ("lora", {"lora": "x"}),
    ],
)
def test_what_such_a_request_asks_for_comes_before_its_name(found, trait, asked, recorded_words):
    [finding] = found(CODE, *present(asked))
    assert conditions(finding) == [("trait", trait, 0, None)]
    recorded_words(finding.title, finding.advice)


def test_near_ties_are_named_beside_it(found, recorded_words):
    [finding] = found(CODE, *present({"logprobs": 5, "structured": True}))
    assert conditions(finding) == [("trait", "logprobs", 0, None)]
    recorded_words(finding.holder, finding.advice)


def test_the_first_steps(found):
    """They are an interruption, told once."""
    slow = decodes(SIZES, lambda _, number: 20 if number < 10 else 1)
    assert found(CODE, *slow) == []
    [finding] = found("interruption", *slow)
    assert (finding.cause, finding.steps) == ("first_steps", list(range(10)))


def test_a_device_that_got_slower_and_no_request_that_was_there(found, recorded_words):
    """From step 90 on everything takes twice as long; request h is there in each of the last 60 steps."""
    sizes = SIZES[:100] + [8] * 60
    slow = decodes(sizes, lambda _, number: 2 if number >= 90 else 1)
    [finding] = found(CODE, *slow)
    assert [one.feature for one in finding.evidence.conditions] == ["clock"]
    assert (finding.count, finding.steps[0]) == (70, 90)
    recorded_words(finding.title, finding.verdict)


def test_the_first_use_of_a_batch_size(found, recorded_words):
    sizes = [1 + number // 20 for number in range(160)]
    [finding] = found(CODE, *decodes(sizes, lambda _, number: 10 if number % 20 == 0 else 1))
    assert (conditions(finding), finding.count) == ([("first_use", "", 0, None)], 8)
    recorded_words(finding.title, finding.advice)


def test_steps_after_idle_time(found, recorded_words):
    """Steps with an arrival after 5 s without requests take three times as long, and no others."""
    lines = decodes([4] * 240, lambda _, number: 3 if number % 8 == 0 else 1)
    for number, line in enumerate(lines):
        shift, name = number // 8 * 5_000_000, f"r{number // 4}"
        line.start_us, line.output_us = line.start_us + shift, line.output_us + shift
        line.requests = [ScheduledRequest(name, 0, 1)]
        line.total_requests = line.num_running_before = line.num_running_after = 1
        line.arrived = [arrival(name, line.start_us)] if number % 4 == 0 else []
        line.finished = [finish(name, finished_us=line.output_us)] if number % 4 == 3 else []
    [finding] = found(CODE, *lines)
    ((feature, _, more_than, at_most),) = conditions(finding)
    assert (feature, at_most, finding.count) == ("idle", None, 29)
    assert 0.1 < more_than < 5
    recorded_words(finding.title, finding.verdict)


def skips(count=240, *, each_us=5_000, every=4):
    """Steps of 20 ms whose schedule() takes so much longer for each request that a connector defers."""
    lines = decodes([1 + number % 8 for number in range(count)])
    for number, line in enumerate(lines):
        deferred = number // every % 3
        line.schedule_us = 100 + deferred * each_us
        line.output_us += line.schedule_us
        line.exits = [
            Exit("waiting", "continue", Cause.CONNECTOR_UNDECIDED, f"w{n}") for n in range(deferred)
        ]
        line.num_waiting_before = line.num_waiting_after = deferred
    return lines


def test_what_the_host_does_for_each_of_some_requests(found, recorded_words):
    """The queue is as long in these steps: what can be a cause comes before what only goes with it."""
    settings = {"kv_transfer_config.kv_connector": "Sleepy"}
    [finding] = found(CODE, *skips(), settings=settings)
    evidence = finding.evidence
    assert (evidence.part, evidence.per_unit_us is not None) == ("schedule", True)
    assert [(one.feature, one.detail) for one in evidence.conditions] == [
        ("exits", "connector_undecided waiting")
    ]
    assert evidence.per_unit_us == pytest.approx(5_000, rel=0.01)
    recorded_words(finding.title, finding.verdict, finding.advice)


def test_a_trend(found, recorded_words):
    """schedule() takes 50 us more in each step of 20 ms: 150 ms a minute."""
    lines = decodes([1 + number % 8 for number in range(160)])
    for number, line in enumerate(lines):
        line.schedule_us = 100 + 50 * number
        line.output_us += line.schedule_us
    [finding] = found(CODE, *lines)
    assert finding.evidence.part == "schedule"
    assert [one.feature for one in finding.evidence.conditions] == ["clock"]
    assert finding.evidence.per_unit_us == pytest.approx(2_500, rel=0.02)
    recorded_words(finding.title, finding.verdict)


@pytest.mark.parametrize(("resets", "feature"), [(4, "since"), (1, "clock")])
def test_a_time_that_falls_back_at_each_reset(found, recorded_words, resets, feature):
    """Each of 320 steps takes 20 us more than the one before, until the prefix cache is reset."""
    every = 320 // resets
    lines = decodes([1 + number % 8 for number in range(320)])
    for number, line in enumerate(lines):
        line.output_us += 20 * (number % every)
    marks = [Control("reset_prefix_cache", 20_000 * every * number - 5_000) for number in range(1, resets)]
    controls = [Events(at_us=mark.at_us, controls=[mark]) for mark in marks]
    ordered = sorted(
        [*lines, *controls], key=lambda line: line.at_us if isinstance(line, Events) else line.start_us
    )
    [finding] = found(CODE, *ordered)
    assert finding.evidence.per_unit_us
    assert [one.feature for one in finding.evidence.conditions] == [feature]
    if feature == "since":
        assert finding.evidence.per_unit_us == pytest.approx(1000, rel=0.05)
        recorded_words(finding.title, finding.verdict, finding.advice)


def test_a_request_whose_cost_grows_with_its_output(found, recorded_words):
    """Each output token of z makes its step 50 us longer; z outlives all others."""
    lines = decodes([1 + number % 8 for number in range(160)])
    for number, line in enumerate(lines):
        for request in line.requests:
            request.request_id += str(number // 20)
    lines[10].arrived = [arrival("z", 200_000)]
    for number, line in enumerate(lines[10:], 10):
        outputs = number - 10
        line.requests.append(ScheduledRequest("z", 100 + outputs, 1))
        line.output_us += 50 * outputs
    [finding] = found(CODE, *lines)
    assert conditions(finding) == [("length", "z", 0, None)]
    assert finding.evidence.per_unit_us == pytest.approx(50, rel=0.05)
    recorded_words(finding.title, finding.verdict, finding.advice)


def test_two_conditions_together(found, recorded_words):
    """Steps above 4 requests are slow only if one of them asks for log-probabilities."""
    lines = decodes(SIZES * 2, lambda size, number: 4 if size > 4 and number % 20 < 10 else 1)
    for number, line in enumerate(lines):
        if number % 20 < 10:
            line.requests.append(ScheduledRequest("t", 0, 1))
    lines[0].arrived.append(arrival("t", 0, logprobs=1))
    [finding] = found(CODE, *lines)
    assert {one[0] for one in conditions(finding)} == {"trait", "batch"}
    assert finding.evidence.batch_size == 4
    recorded_words(finding.title, finding.verdict)


def test_what_nothing_explains(view_of):
    """Every thirteenth step takes ten times as long."""
    [excess] = step_excesses(view_of(*decodes(SIZES, lambda _, number: 10 if number % 13 == 0 else 1)))
    assert (excess.part, excess.slow_steps, excess.steps) == ("execution", 13, 160)
    assert excess.unexplained_frac == 1


@pytest.mark.parametrize(
    "lines",
    [
        decodes(SIZES),
        decodes(SIZES, noise=0.4),
        decodes(SIZES, lambda size, _: size),
        decodes(SIZES, lambda _, number: 10 if number % 13 == 0 else 1),
        present(factor=1.3),
        decodes(SIZES[:30], lambda size, _: 5 if size > 4 else 1),
        decodes([4] * 160, lambda _, number: 3 if number % 2 else 1),
    ],
    ids=["none", "noise", "proportional", "now and then", "little", "few", "nothing shared"],
)
def test_it_is_silent_about(found, lines):
    assert found(CODE, *lines) == []


def test_the_first_prefill_of_each_padded_size(found, recorded_words):
    """A device compiles each multiple of 256 prefill tokens at first use, in 40 ms; prompts get longer."""
    lines, sizes, at = [], set(), 0
    for number in range(400):
        tokens = number * 37 % (256 * (number // 40 + 1)) + 1 if number % 3 == 0 else 0
        size = -(-tokens // 256)
        is_first = size > 0 and size not in sizes
        sizes.add(size)
        took = 4000 + 4 * tokens + (40_000 if is_first else 0) + 10 * (number * 7 % 11)
        got = {f"r{number}": tokens, "a": 1} if tokens else {"a": 1}
        lines.append(
            step(
                number,
                start=at,
                took=0,
                back=took,
                got=got,
                new=[f"r{number}"] if tokens else [],
                prefill_tokens=tokens,
                decode_tokens=1,
                arrived=[arrival(f"r{number}", at - 10, prompt_tokens=tokens)] if tokens else [],
            )
        )
        if tokens:
            lines[-1].finished.append(finish(f"r{number}", finished_us=at + took))
        at += took + 20
    lines[0].arrived.append(arrival("a", 0))
    finding = found(CODE, *lines)[0]
    assert conditions(finding) == [("first_size", "prefill 256", 0, None)]
    assert (finding.evidence.inside, finding.evidence.longer) == (8, 8) == (len(sizes - {0}),) * 2
    recorded_words(finding.title, finding.verdict, finding.advice)


STEPS = np.arange(1000)
NOISE = 1 + 0.02 * np.sin(STEPS * 7.0)
WORK = np.ones((1000, 1))


def explanations(slow, feature):
    """The explanations of steps of 1 ms, of which some take twice as long, by a single feature."""
    times = 1000 * NOISE * np.where(slow, 2, 1)
    return search(fit_work(times, WORK), [feature])


def request(inside):
    return Feature("request", inside.astype(float), "r")


def test_a_request_that_is_in_most_slow_steps_explains_them():
    inside = (STEPS >= 120) & (STEPS < 160)
    [explanation] = explanations(inside | (STEPS % 40 == 0), request(inside))
    assert explanation.terms[0].feature.detail == "r"
    assert 0.9 <= explanation.effect <= 1.1


def test_a_request_does_not_explain_steps_of_which_most_are_slow_without_it():
    inside = (STEPS >= 120) & (STEPS < 160)
    assert explanations(inside | ((STEPS >= 600) & (STEPS < 650)), request(inside)) == []


def test_a_clear_effect_that_half_of_the_steps_lack_is_another_feature():
    """Half of the steps with more than 15 waiting requests are twice as long, and no others."""
    waiting = Feature("waiting", (STEPS % 20).astype(float))
    assert explanations((STEPS % 20 > 15) & (STEPS // 20 % 2 == 0), waiting) == []
    [explanation] = explanations(STEPS % 20 > 15, waiting)
    assert explanation.terms[0].cut == 15.5


def test_host_work_beside_the_forward_pass_costs_nothing_until_it_takes_longer():
    """Grammars of up to 19 requests take 0.2 ms each while the device computes for 2 ms."""
    structured = Feature("trait", (STEPS * 7 % 20).astype(float), "structured")
    times = NOISE * np.maximum(2000, 200 * structured.values)
    [explanation] = search(fit_work(times, WORK), [structured])
    assert (explanation.slope, explanation.terms[0].cut) == (True, 10)
    assert explanation.effect == pytest.approx(200, rel=0.1)


PHASES = [(60, 95), (190, 235), (300, 330), (480, 530), (560, 590)]
"""Phases of slow steps, first and last, at irregular distances."""


def slowed_decodes(steps, factor, sizes=8):
    """Decode steps, each right after the one before: 4 ms and 0.1 ms a request, and 2 % of noise.

    Their batches have so many sizes, up to 8. ``factor(number)`` is how many times as long a step takes.
    """
    batches = [9 - sizes + number % sizes for number in range(steps)]
    about = {"noise": 0.02, "base_us": 4000, "every_us": None, "names": "abcdefgh"}
    return decodes(batches, lambda _, number: factor(number), **about)


def in_phases(factor, phases=PHASES):
    return lambda number: factor if any(first <= number <= last for first, last in phases) else 1


def test_phases_that_nothing_marks(found, recorded_words):
    [finding] = found(CODE, *slowed_decodes(640, in_phases(1.7)))
    evidence = finding.evidence
    assert isinstance(evidence, UnmarkedSteps)
    assert [(phase.first_step, phase.last_step) for phase in evidence.phases] == PHASES
    slow = sum(last - first + 1 for first, last in PHASES)
    assert (evidence.slow, evidence.looked_at, evidence.part) == (slow, 640, "execution")
    assert evidence.excess_ms == pytest.approx(0.7 * 4.45 * slow, rel=0.05)
    assert finding.share_frac == pytest.approx(0.2 * 4.5 / 8, rel=0.3)  # 4.5 of 8 requests run in a step
    recorded_words(finding)


def test_the_verdict_is_not_that_nothing_limits(run_of, recorded_words):
    """Every step has all eight requests."""
    run = analyze_run(run_of("slow", *slowed_decodes(640, in_phases(1.7), sizes=1)))
    assert run.findings[0].code == CODE
    recorded_words(run.verdict)


def test_phases_are_stated_together(found):
    """The search explains each of two long phases by a range of steps, which tells when and not why."""
    [finding] = found(CODE, *slowed_decodes(640, in_phases(1.7, [(100, 200), (400, 520)])))
    assert [(phase.first_step, phase.last_step) for phase in finding.evidence.phases] == [
        (100, 200),
        (400, 520),
    ]


def test_phases_that_return_at_a_period(found, recorded_words):
    """30 of every 100 steps are slow."""
    [finding] = found(CODE, *slowed_decodes(800, lambda number: 1.7 if number % 100 >= 70 else 1))
    evidence = finding.evidence
    [condition] = evidence.conditions
    assert (condition.feature, condition.more_than) == ("period", None)
    assert condition.at_most == pytest.approx(30 * 4.45e-3 * 1.7, rel=0.05)
    assert float(condition.detail) == pytest.approx(4.45e-3 * (70 + 30 * 1.7), rel=0.02)
    assert [(phase.first_step, phase.last_step) for phase in evidence.phases] == [
        (first, first + 29) for first in range(70, 800, 100)
    ]
    recorded_words(finding)


def test_single_slow_steps(found, recorded_words):
    """Every seventh step takes 1.9 times as long, too little for an interruption."""
    [finding] = found(CODE, *slowed_decodes(640, lambda number: 1.9 if number % 7 == 3 else 1))
    assert (finding.evidence.phases, finding.evidence.slow) == ([], 91)
    recorded_words(finding.holder)


@pytest.mark.parametrize(
    "factor",
    [
        lambda _: 1,
        in_phases(1.15, PHASES[:2]),
        lambda number: 1.9 if number % 47 == 3 else 1,
        lambda number: 6 if number % 7 == 3 else 1,
    ],
    ids=["none", "little in phases", "few single steps", "interruptions"],
)
def test_nothing_is_unexplained(found, factor):
    findings = found(CODE, *slowed_decodes(640, factor))
    assert not [one for one in findings if isinstance(one.evidence, UnmarkedSteps)]


def starts_of(count):
    return pl.DataFrame(
        {
            "step": np.arange(count),
            "start_us": 1000 * np.arange(count),
            "end_us": 1000 * np.arange(count) + 100,
            "output_us": 1000 * np.arange(count) + 900,
        }
    )


def test_a_phase_is_dense():
    slow = np.zeros(100, bool)
    slow[20:40] = True
    slow[[25, 31, 32]] = False  # single fast steps do not end it
    slow[60:90:4] = True  # eight slow steps are too few, and too far between
    assert slow_phases(starts_of(100), slow) == [StepPhase(20, 39, 20_000, 39_900)]


@pytest.mark.parametrize(
    ("begins", "period"),
    [
        ([100, 300, 500, 700], 0.2),
        ([0, 100, 300, 500, 700], 0.2),
        ([100, 300, 500], None),
        ([100, 300, 500, 800], None),
        ([100, 300, 450, 650], None),
    ],
    ids=["regular", "begins in a phase", "too few", "a later phase is late", "irregular"],
)
def test_a_period_is_found_in_half_of_the_phases_and_holds_in_the_rest(begins, period):
    steps = starts_of(1000)
    phases = [StepPhase(at, at + 19, 1000 * at, 1000 * (at + 19) + 900) for at in begins]
    returning = returning_phases(steps, phases)
    assert (returning and returning[0]) == (period and pytest.approx(period))


def test_the_age_of_a_request_is_a_number_of_steps():
    """Slow steps make requests older in time, so that an age in time would explain what makes it."""
    timeline = make_timeline(read_run(FINDINGS / "max-num-seqs-bound" / "shows").traces[0])
    starts = timeline.steps["start_us"].to_list()
    lives = {}
    for row in timeline.request_states.to_dicts():
        if row["state"] != "front_end":
            begin, end = lives.get(row["request_id"], (row["begin_us"], row["end_us"]))
            lives[row["request_id"]] = min(begin, row["begin_us"]), max(end, row["end_us"])
    steps = judged_steps(timeline)
    [age] = [feature for feature in features(timeline, steps, []) if feature.kind == "age"]
    for at, steps_ago in zip(steps["start_us"], age.values, strict=True):
        there = [begin for begin, end in lives.values() if begin <= at < end]
        assert steps_ago == (sum(min(there) <= start < at for start in starts) if there else 0)
    assert max(age.values) > 1


def single_decodes(count, **fields):
    """Steps of one request; each field lists a value per step."""
    lines = []
    for number in range(count):
        given = {name: values[number] for name, values in fields.items()}
        came = [] if number else [arrival("a", 0)]
        lines.append(step(number, start=20_000 * number, back=1000, got={"a": 1}, arrived=came, **given))
    return lines


def values_of(timeline, kind):
    found = [feature for feature in features(timeline, judged_steps(timeline), []) if feature.kind == kind]
    return [list(feature.values) for feature in found]


def test_tokens_that_a_connector_brought_are_counted_apart_from_cached_ones(view_of):
    admitted = [[], [Admission("b", 16, 2000), Admission("c", 0, 48)], [Admission("d", 32, 0)], []]
    assert values_of(view_of(*single_decodes(4, admitted=admitted)), "external") == [[0, 2048, 0, 0]]


def test_a_connector_that_loads_inside_steps(found, recorded_words):
    """Steps of 20 ms take 5 us longer for each token that the connector brings."""
    lines = decodes([1 + number % 8 for number in range(240)])
    for number, line in enumerate(lines[::4]):
        tokens = 1000 * (1 + number % 5)
        line.admitted = [Admission(f"r{number}", 0, tokens)]
        line.output_us += 5 * tokens
    [finding] = found(CODE, *lines, settings={"kv_transfer_config.kv_connector": "Pool"})
    assert [each.feature for each in finding.evidence.conditions] == ["external"]
    assert finding.evidence.per_unit_us == pytest.approx(5, rel=0.01)
    recorded_words(finding.advice)


def test_a_step_encodes_what_it_takes_from_the_encoder_cache(view_of):
    """32 embeddings in step 1, given back before step 2; 64 in step 3."""
    free = [256, 224, 256, 192, 192]
    assert values_of(view_of(*single_decodes(5, encoder_slots_freeable=free)), "encoder") == [
        [0, 32, 0, 64, 0]
    ]


def test_without_an_encoder_nothing_is_encoded(view_of):
    assert values_of(view_of(*single_decodes(4)), "encoder") == []


COMPILING = [17, 61, 89, 140, 171, 233, 262, 307, 349, 380]
"""Steps from which a grammar is compiled for six steps, of which one or two take 12 times as long."""


def stalled_now_and_then(beside=()):
    """Steps that stall at times, also at these numbers."""
    slow = {start + offset for start in COMPILING for offset in (1, 4)[: 1 + start % 2]} | {*beside}
    lines = decodes([1 + number % 8 for number in range(400)], lambda _, number: 12 if number in slow else 1)
    for start in COMPILING:
        grammar = Grammar("a", started_us=20_000 * start, compiled_us=20_000 * (start + 6) - 1)
        lines[start + 6].grammars = [grammar]
    return lines


def test_what_all_slow_steps_have_in_common_though_not_all_such_steps_are_slow(found, recorded_words):
    findings = found("interruption", *stalled_now_and_then(), grammar_threads=86)
    [finding] = [one for one in findings if one.cause == "scattered"]
    evidence = finding.evidence
    assert (evidence.marked, evidence.marked_of_all_frac) == (17, 60 / 400)
    recorded_words(finding.verdict, *finding.advice)


def test_slow_steps_elsewhere_have_nothing_in_common(found):
    findings = found("interruption", *stalled_now_and_then(beside=(5, 205)))
    assert [one.evidence.marked for one in findings if one.cause == "scattered"] == [0]
