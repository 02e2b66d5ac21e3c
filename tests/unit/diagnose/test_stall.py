import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from tests.makers import STEP_EVERY_US, step

CODE = "stall"


def empty(number, cause=Cause.KV_BLOCKS, **fields):
    """A step that scheduled nothing: one request ran, two waited."""
    given = {"running": 1, "waiting": 2, "ended": Exit("waiting", "break", cause, "w")}
    return step(number, **{**given, **fields})


def spell(first, many, **fields):
    return [empty(number, **fields) for number in range(first, first + many)]


def test_ten_empty_steps_in_a_row_are_a_stall(found, recorded_words):
    [finding] = found(CODE, step(0, got={"a": 1}), *spell(1, 10), step(11, got={"a": 1}))
    assert (finding.cause, finding.via, finding.count) == ("kv_blocks", "inferred", 10)
    assert finding.steps == list(range(1, 11))
    assert finding.cost_ms == 100.0
    assert finding.cost_frac == pytest.approx(100_000 / 111_000)
    assert finding.severity == "critical"
    evidence = finding.evidence
    assert (evidence.stalls, evidence.unended, finding.steps[0]) == (1, 0, 1)
    assert (evidence.stalled_ms, evidence.longest_ms) == (100.0, 100.0)
    recorded_words(finding.message, finding.example)


@pytest.mark.parametrize(
    ("many", "every_us", "stalled"), [(9, 11_111, False), (9, 11_112, True), (10, 1, True)]
)
def test_fewer_are_one_only_if_they_last_a_tenth_of_a_second(found, many, every_us, stalled):
    steps = [empty(n, start=n * every_us, took=0, back=0) for n in range(1, many + 1)]
    after = step(many + 1, start=(many + 1) * every_us, got={"a": 1})
    assert bool(found(CODE, step(0, back=0, got={"a": 1}), *steps, after)) is stalled


@pytest.mark.parametrize(
    "lines",
    [
        [*spell(0, 5), step(5, got={"a": 1}), *spell(6, 5), step(11, got={"a": 1})],
        [step(n) for n in range(30)],
        [*spell(0, 6, trial=1), *spell(6, 6, trial=2)],
    ],
    ids=["ended by a step with tokens", "nobody there", "ended by the end of a trial"],
)
def test_it_is_silent_about(found, lines):
    assert found(CODE, *lines) == []


def test_it_begins_when_the_device_is_idle(found):
    """The output of step 0 comes back while step 6 has begun: until then there was work."""
    lines = [step(0, back=65_000, got={"a": 1}), *spell(1, 10), step(11, got={"a": 1})]
    [finding] = found(CODE, *lines)
    assert finding.cost_ms == (11 * STEP_EVERY_US - 65_000) / 1e3


def test_one_that_has_not_ended_is_critical(found, recorded_words):
    steps = [step(n, got={"a": 1}) for n in range(10_000, 10_002)]
    lines = [step(0, got={"a": 1}), *steps, *spell(10_002, 10)]
    [finding] = found(CODE, *lines)
    assert (finding.severity, finding.evidence.unended) == ("critical", 1)
    assert finding.cost_frac < 0.01
    assert finding.cost_ms == 91.0  # to the last output
    recorded_words(finding.message)


@pytest.mark.parametrize(
    ("after", "severity"), [(90, "critical"), (100, "warning"), (990, "warning"), (1000, "info")]
)
def test_severity_is_by_its_share_of_the_run(found, after, severity):
    """A stall of 100 ms in a run of 10 ms a step."""
    lines = [*spell(0, 10), step(10, got={"a": 1}), step(after, got={"a": 1})]
    [finding] = found(CODE, *lines)
    assert finding.severity == severity


@pytest.mark.parametrize("cause", [Cause.PAUSED, Cause.STREAMING_INPUT_PENDING])
def test_what_somebody_asked_for_is_information(found, cause):
    [finding] = found(CODE, *spell(0, 10, cause=cause))
    assert (finding.cause, finding.severity) == (cause, "info")


def test_the_cause_is_the_most_frequent_one(found):
    causes = [Cause.PREEMPTED_THIS_STEP] + 9 * [Cause.GRAMMAR_PENDING]
    [finding] = found(CODE, *[empty(n, cause=cause) for n, cause in enumerate(causes)])
    assert (finding.cause, finding.count) == ("grammar_pending", 10)


def test_where_nobody_waits_the_running_loop_tells_the_cause(found):
    skipped = Exit("running", "continue", Cause.PP_STAGGER, "r", location="vllm/s.py:1", via="source")
    [finding] = found(CODE, *spell(0, 10, waiting=0, ended=skipped))
    assert (finding.cause, finding.via, finding.location) == ("pp_stagger", "source", "vllm/s.py:1")


def test_where_no_exit_was_recorded_the_cause_is_not_known(found):
    [finding] = found(CODE, *spell(0, 10, waiting=0, ended=None))
    assert (finding.cause, finding.via) == ("other", "inferred")


def test_one_finding_per_cause(found):
    lines = [*spell(0, 10), step(10, got={"a": 1}), *spell(11, 20, cause=Cause.GRAMMAR_PENDING)]
    assert [(one.cause, one.count) for one in found(CODE, *lines)] == [
        ("grammar_pending", 20),
        ("kv_blocks", 10),
    ]


def test_trials_are_told_apart(found):
    [finding] = found(CODE, *spell(0, 10, trial=1), *spell(10, 10, trial=2))
    assert (finding.trials, finding.evidence.stalls, finding.evidence.unended) == ([1, 2], 2, 2)
