import pytest

from schedtrace.model.trace import ScheduledRequest
from tests.makers import arrival, finish, step

CODE = "slow-steps"
GRAPHS = {
    "compilation_config.cudagraph_capture_sizes": [1, 2, 4],
    "compilation_config.max_cudagraph_capture_size": 4,
}


def decodes(sizes, slow=lambda *_: 1, noise=0.05):
    """One decode step of every size, with requests a, b, ...: 1,000 us and 100 us a request, plus noise."""
    names = "abcdefghijkl"
    came = [arrival(name, 0) for name in names]
    lines = []
    for number, size in enumerate(sizes):
        jitter = 1 + noise * ((number * 7 % 11) / 5 - 1)
        lines.append(
            step(
                number,
                start=20_000 * number,
                took=0,
                back=round((1000 + 100 * size) * jitter * slow(size, number)),
                got=dict.fromkeys(names[:size], 1),
                decode_tokens=size,
                arrived=came if number == 0 else [],
            )
        )
    return lines


SIZES = [1 + number % 8 for number in range(160)]


def test_a_batch_size_cliff(found, recorded_words):
    """Steps above 4 requests take 5 times as long: half of all steps, so the fit on all would be spoilt."""
    [finding] = found(CODE, *decodes(SIZES, lambda size, _: 5 if size > 4 else 1))
    evidence = finding.evidence
    assert (evidence.kind, evidence.batch_size, finding.count) == ("batch_size", 4, 80)
    assert evidence.factor == pytest.approx(5, rel=0.05)
    assert evidence.expected_ms == pytest.approx(80 * 1.65, rel=0.05)
    assert finding.cost_ms == pytest.approx(4 * evidence.expected_ms, rel=0.05)
    assert [(advice.setting, advice.value) for advice in finding.advice] == [("max_num_seqs", 4)]
    recorded_words(finding.title, finding.advice)


def test_its_share_is_excess_time_times_requests(found):
    """Steps of 5 take 7.5 ms instead of 1.5, 40 of them; 12 requests live for the 80 steps of 20 ms."""
    sizes = [3, 4] * 20 + [5] * 40
    [finding] = found(CODE, *decodes(sizes, lambda size, _: 5 if size > 4 else 1, noise=0))
    lived_us = 12 * (79 * 20_000 + 7500)
    assert finding.share_frac == pytest.approx(40 * 6000 * 5 / lived_us, rel=0.01)
    assert finding.severity == "warning"


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
    assert (finding.evidence.kind, finding.evidence.request_ids) == ("request", ["r"])
    assert finding.count == 70
    recorded_words(finding.title, finding.advice)


@pytest.mark.parametrize(
    ("slow_from", "slow_until", "found_it"),
    [(60, 100, True), (20, 100, False), (60, 140, False), (20, 140, False)],
    ids=["while it runs", "before it comes", "after it went", "longer than it runs"],
)
def test_a_machine_that_is_slow_for_a_while_is_no_request(found, slow_from, slow_until, found_it):
    """r runs in steps 60 to 99."""
    lines = decodes(SIZES, lambda _, number: 3 if slow_from <= number < slow_until else 1)
    for line in lines[60:100]:
        line.requests.append(ScheduledRequest("r", 0, 1))
    lines[0].arrived.append(arrival("r", 0))
    assert bool(found(CODE, *lines)) == found_it


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
    evidence = finding.evidence
    assert (evidence.kind, evidence.trait, evidence.request_ids) == ("trait", trait, ["r"])
    assert evidence.also == []
    recorded_words(finding.holder)


def test_near_ties_are_named_beside_it(found, recorded_words):
    [finding] = found(CODE, *present({"logprobs": 5, "structured": True}))
    assert (finding.evidence.trait, finding.evidence.also) == ("logprobs", ["trait"])
    recorded_words(finding.holder)


def test_a_crowd_that_comes_and_goes_together_is_no_other_explanation(found):
    """e to h run exactly when there are more than 4 requests."""
    [finding] = found(CODE, *decodes([4, 8] * 80, lambda size, _: 5 if size > 4 else 1))
    assert (finding.evidence.batch_size, finding.evidence.also) == (4, [])


def test_the_first_steps(found):
    """They are an interruption, told once."""
    slow = decodes(SIZES, lambda _, number: 20 if number < 10 else 1)
    assert found(CODE, *slow) == []
    [finding] = found("interruption", *slow)
    assert (finding.cause, finding.steps) == ("first_steps", list(range(10)))


def test_a_device_that_got_slower_is_told_and_no_request_that_was_there(found):
    """From step 90 on everything takes twice as long; request h is there in each of the last 60 steps."""
    sizes = SIZES[:100] + [8] * 60
    slow = decodes(sizes, lambda _, number: 2 if number >= 90 else 1)
    assert found(CODE, *slow) == []
    [finding] = found("interruption", *slow)
    assert (finding.cause, finding.evidence.first_step, finding.evidence.last_step) == ("slower", 90, 159)
    assert finding.evidence.factor == pytest.approx(2, rel=0.1)


def test_the_first_use_of_a_batch_size(found):
    sizes = [1 + number // 20 for number in range(160)]
    [finding] = found(CODE, *decodes(sizes, lambda _, number: 10 if number % 20 == 0 else 1))
    assert (finding.evidence.kind, finding.count) == ("first_use", 8)


@pytest.mark.parametrize(
    "lines",
    [
        decodes(SIZES),
        decodes(SIZES, noise=0.4),
        decodes(SIZES, lambda size, _: 1.3 if size > 4 else 1),
        decodes(SIZES, lambda size, _: size),
        decodes(SIZES, lambda _, number: 10 if number % 13 == 0 else 1),
        present(factor=1.3),
        decodes(SIZES[:30], lambda size, _: 5 if size > 4 else 1),
        [finish("a")] and decodes([4] * 160, lambda _, number: 3 if number % 2 else 1),
    ],
    ids=["none", "noise", "a small cliff", "proportional", "now and then", "little", "few", "nothing shared"],
)
def test_it_is_silent_about(found, lines):
    assert found(CODE, *lines) == []
