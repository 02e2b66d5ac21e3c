import pytest

from schedtrace.diagnose.kv_cache import resumptions
from schedtrace.model.trace import Preemption
from tests.makers import finish, step

CODE = "preemption"


def test_preemptions_are_counted_with_what_they_threw_away(found, recorded_words):
    [finding] = found(
        CODE,
        step(0, got={"a": 970}),
        step(1, preempted=[Preemption("a", 40, "b", 1), Preemption("c", 60, "b", 1)]),
        step(2, got={"a": 30}, recomputed_tokens=30),
        step(3, preempted=[Preemption("a", 50, "a", 2)]),
        step(4, preempted=[Preemption("d", 5)]),
    )
    assert (finding.severity, finding.cause, finding.via) == ("warning", "kv_blocks", "recorded")
    assert (finding.count, finding.steps, finding.tokens) == (4, [1, 3, 4], 155)
    evidence = finding.evidence
    assert (evidence.victims, evidence.recomputed_tokens) == (3, 30)
    recorded_words(finding.message, finding.example)


def test_who_was_hit_more_than_once_is_named_worst_first(found, recorded_words):
    hits = ["a", "b", "c", "b", "a", "b"]
    [finding] = found(CODE, *(step(n, preempted=[Preemption(one, 1)]) for n, one in enumerate(hits)))
    recorded_words(finding.message)


@pytest.mark.parametrize(
    ("got", "recomputed", "severity"),
    [
        (1000, 99, "warning"),
        (1000, 100, "critical"),
        (1000, 0, "warning"),
        (0, 50, "critical"),  # no more than all tokens are computed again
    ],
)
def test_it_is_critical_from_a_tenth_of_all_tokens_computed_on(
    found, got, recomputed, severity, recorded_words
):
    line = step(0, got={"x": got}, recomputed_tokens=recomputed, preempted=[Preemption("a", 200)])
    [finding] = found(CODE, line)
    assert finding.severity == severity
    assert finding.evidence.recomputed_tokens == recomputed
    recorded_words(finding.message)


def test_a_reset_outside_schedule_is_no_preemption(found):
    reset = Preemption("a", 40, in_schedule=False)
    assert found(CODE, step(0, preempted=[reset])) == []
    [finding] = found(CODE, step(0, preempted=[reset, Preemption("b", 5)]))
    assert (finding.count, finding.tokens, finding.evidence.victims) == (1, 5, 1)


@pytest.mark.parametrize("wanted_by", [None, "a", "b"])
def test_the_example_says_for_whom(found, wanted_by, recorded_words):
    [finding] = found(CODE, step(7, trial=2, preempted=[Preemption("a", 40, wanted_by)]))
    recorded_words(finding.example)


def hit(number, *names, **fields):
    """A step that preempts these: ten of each one's tokens are lost."""
    lost = [Preemption(name, 10, "x", fields.pop("nth", None)) for name in names]
    return step(number, preempted=lost, got={"x": 1}, decode_tokens=1, running=4, **fields)


def again(number, *names, tokens=10):
    """Ten tokens are computed again when the requests come back."""
    got = dict.fromkeys(names, tokens)
    return step(
        number, got=got, resumed=names, recomputed_tokens=10 * len(names), prefill_tokens=10 * len(names)
    )


def prefill(number, tokens):
    return step(number, got={"y": tokens}, budget=10_000, prefill_tokens=tokens)


def test_the_third_time_is_a_storm(found, recorded_words):
    lines = [prefill(0, 9000), hit(1, "a"), again(2, "a"), hit(3, "a"), again(4, "a")]
    assert [finding.evidence.storm for finding in found(CODE, *lines)] == [None]
    [finding] = found(CODE, *lines, hit(5, "a", nth=3))
    assert (finding.cause, finding.via, finding.severity) == ("kv_blocks", "recorded", "warning")
    assert (finding.count, finding.steps, finding.tokens) == (3, [1, 3, 5], 30)
    evidence = finding.evidence
    storm = evidence.storm
    assert (evidence.victims, storm.first_step, storm.first_running) == (1, 1, 4)
    assert (evidence.recomputed_tokens, storm.prefill_again_frac) == (20, 20 / 9020)
    assert (finding.cost_ms, finding.cost_frac, finding.cost_error_frac) == (None, None, None)  # no model
    assert storm.first_used_frac is None
    recorded_words(finding.message)


@pytest.mark.parametrize(("tokens", "storm"), [(270, True), (271, False)])
def test_or_a_tenth_of_all_prefill_done_twice(found, tokens, storm):
    """Three of 30 tokens lost and computed again, beside decodes, which are no prefill."""
    lines = [prefill(0, tokens), hit(1, "a", "b", "c"), again(2, "a", "b", "c")]
    [finding] = found(CODE, *lines, step(3, got={"x": 900}, decode_tokens=900))
    assert (finding.evidence.storm is not None) is storm


@pytest.mark.parametrize(
    "lines",
    [
        [hit(0, "a", "b"), again(1, "a", "b")],
        [
            step(0, preempted=[Preemption(name, 10, in_schedule=False) for name in "aaabbb"]),
            again(1, "a", "b"),
        ],
    ],
    ids=["one or two, however much they cost", "resets of the prefix cache"],
)
def test_it_is_silent_about(found, lines):
    assert not any(finding.evidence.storm for finding in found(CODE, *lines))


def test_a_cycle_is_one_that_lasted_no_longer_than_a_block(found):
    """Blocks of 10 tokens: 10 steps after it was scheduled is a cycle, 11 is none."""
    lines = [step(0, got=dict.fromkeys("abc", 1), new="abc"), hit(10, "a"), hit(11, "b", "c"), again(12, "a")]
    [finding] = found(CODE, *lines)
    assert (finding.evidence.storm.cycles, finding.evidence.storm.cycle_steps) == (1, 10)


def test_how_long_they_were_away(view_of):
    """a until it is scheduled again, b until its client goes, c until the last output."""
    gone = finish("b", "ABORTED", finished_us=35_000)
    lines = [hit(0, "a", "b", "c"), again(2, "a"), step(3, got={"x": 1}), step(4, finished=[gone])]
    away = resumptions(view_of(*lines))[["request_id", "resumed_step", "away_us"]]
    assert away.rows() == [("a", 2, 20_000), ("b", None, 35_000), ("c", None, 41_000)]


def test_the_level_at_which_it_starts(found, recorded_words):
    """9 of 99 blocks were free; the 100th is vLLM's null block."""
    first = hit(1, "a", kv_blocks_free_before=9)
    [finding] = found(CODE, first, again(2, "a"), hit(3, "a"), again(4, "a"), hit(5, "a"))
    assert finding.evidence.storm.first_used_frac == pytest.approx(90 / 99)
    recorded_words(finding.message)


def test_the_cost_is_what_the_tokens_take(found):
    """Steps of 1,000 us and 10 us a prefill token; 300 of them are computed again."""
    steps = []
    for n in range(40):
        tokens = 10 * (n % 5)
        steps.append(step(n, took=0, back=1000 + 10 * tokens, got={"y": tokens}, prefill_tokens=tokens))
    lost = [Preemption(name, 100, "x") for name in "abc"]
    steps.append(step(40, took=0, back=1000, got={"x": 0}, preempted=lost))
    got = dict.fromkeys("abc", 100)
    steps.append(
        step(41, took=0, back=4000, got=got, resumed="abc", recomputed_tokens=300, prefill_tokens=300)
    )
    [finding] = found(CODE, *steps)
    assert finding.cost_ms == pytest.approx(3.0, rel=1e-3)
    assert finding.cost_frac == pytest.approx(3000 / 414_000, rel=1e-3)
    assert finding.severity == "critical"
    assert finding.cost_error_frac < 0.01
