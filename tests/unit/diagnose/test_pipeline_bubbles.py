import pytest

from tests.makers import arrival, step

CODE = "pipeline-bubbles"
PIPELINE = {"pipeline_parallel_size": 4, "batches_in_flight": 4}
EVERY_US = 10_000


def pipeline(cycles, sizes=(7, 13, 2, 10), base=100, per_request=50, **fields):
    """Cycles of four batches; a cycle takes four times what its largest batch takes in a stage.

    In every fourth cycle all batches are one request smaller.
    """
    names = [[f"{batch}{n}" for n in range(size)] for batch, size in zip("abcd", sizes, strict=True)]
    lines, back = [], 1000
    for cycle in range(cycles):
        left = [batch[cycle % 4 == 3 :] for batch in names]
        each = base + per_request * max(map(len, left))
        for number, batch in enumerate(left):
            back += each
            given = {"got": dict.fromkeys(batch, 1), "decode_tokens": len(batch)}
            lines.append(step(4 * cycle + number, start=back - 900, took=0, back=900, **given, **fields))
    lines[0].arrived.extend(arrival(name, 0) for batch in names for name in batch)
    return lines


def test_the_queues_of_the_pull_request(found, recorded_words):
    """8 requests instead of 13: 500 us a stage instead of 750. The first cycle has no output before it."""
    [finding] = found(CODE, *pipeline(41), **PIPELINE)
    evidence = finding.evidence
    assert (evidence.depth, evidence.cycles, evidence.uneven_cycles) == (4, 40, 40)
    assert evidence.unevenness_frac == pytest.approx(1 - 7.75 / 12.75)
    assert evidence.most_gain_frac == pytest.approx(12.75 / 7.75 - 1)
    recorded_words(
        finding.verdict, finding.holder, finding.message, finding.example
    )  # 34 %: 487.5 of 737.5 us


def test_its_share_is_of_all_requests_time(found):
    [finding] = found(CODE, *pipeline(40), **PIPELINE)
    felt_us = sum(4 * (750 * 32 if cycle % 4 < 3 else 700 * 28) for cycle in range(1, 40))
    lived_us = 32 * (1000 + 4 * (30 * 750 + 10 * 700))
    saved = 1 - (100 + 50 * 7.75) / (100 + 50 * 12.75)
    assert finding.share_frac == pytest.approx(felt_us * saved / lived_us, rel=0.03)


def test_a_burst_of_prompts_in_one_batch_is_spread_by_a_smaller_budget(found, recorded_words):
    lines = pipeline(40, sizes=(20, 1, 1, 1))
    lines[0].prefill_tokens = 800
    [finding] = found(CODE, *lines, **PIPELINE)
    assert [(advice.setting, advice.value) for advice in finding.advice] == [
        ("max_num_batched_tokens", 200),
        (None, None),
    ]
    recorded_words(finding.advice)


@pytest.mark.parametrize(
    ("lines", "header"),
    [
        (pipeline(40), {"pipeline_parallel_size": 1, "batches_in_flight": 2}),
        (pipeline(40), {}),
        (pipeline(40, sizes=(8, 8, 8, 8)), PIPELINE),
        (pipeline(40, sizes=(9, 8, 8, 8)), PIPELINE),
        (pipeline(40, sizes=(9, 7, 8, 8)), PIPELINE),
        (pipeline(40, prefill_tokens=5), PIPELINE),
        (pipeline(40, sizes=(2, 0, 0, 1)), PIPELINE),
    ],
    ids=[
        *("async only", "unknown", "even", "as even as can be", "nearly even", "prefill"),
        "fewer than batches",
    ],
)
def test_it_is_silent_about(found, lines, header):
    assert found(CODE, *lines, **header) == []


def executed(number, start, end, running=8, batch=2):
    """A batch of two of the requests; schedule() takes no time."""
    return step(
        number,
        start=start,
        took=0,
        back=end - start,
        got={f"r{(batch * number + n) % 8}": 1 for n in range(batch)},
        running=running,
        decode_tokens=batch,
        execute_after_us=0,
        execute_us=end - start,
    )


def one_at_a_time(batches=100):
    lines = [executed(number, 1000 * number, 1000 * number + 900) for number in range(batches)]
    lines[0].arrived.extend(arrival(f"r{n}", 0) for n in range(8))
    return lines


def test_batches_that_are_executed_one_after_the_other(found, recorded_words):
    """Each is scheduled after the execution before it has ended: one of four is in flight."""
    [finding] = found(CODE, *one_at_a_time(), **PIPELINE)
    evidence = finding.evidence
    assert (evidence.depth, evidence.mean_in_flight, evidence.alone_steps, evidence.steps) == (
        4,
        1.0,
        100,
        100,
    )
    assert (evidence.alone_ms, evidence.executed_ms) == (90.0, 90.0)
    assert evidence.most_gain_frac == pytest.approx(3)  # a quarter of the time
    assert finding.share_frac == pytest.approx(0.75 * 8 * 90 / (8 * 100), rel=0.03)
    recorded_words(finding.verdict, finding.message, finding.advice, finding.example)


def in_flight(number):
    """Four batches in flight: each takes four times as long as the time to the next."""
    return executed(number, 1000 * number, 1000 * number + 4000)


@pytest.mark.parametrize(
    "lines",
    [
        [in_flight(number) for number in range(100)],
        [executed(number, 1000 * number, 1000 * number + 900, running=2) for number in range(100)],
        [step(n, got={"a": 1, "b": 1}, running=8, decode_tokens=2) for n in range(100)],
        one_at_a_time(40),
    ],
    ids=["overlapped", "all that run are in it", "no execution is recorded", "few"],
)
def test_batches_in_flight_are_as_configured_or_not_known(found, lines):
    lines[0].arrived.extend(arrival(f"r{n}", 0) for n in range(8))
    assert [finding.title for finding in found(CODE, *lines, **PIPELINE)] == []


def test_without_cycles_that_differ_only_a_bound_is_known(found, recorded_words):
    [finding] = found(CODE, *pipeline(3), **PIPELINE)
    assert (finding.share_frac, finding.severity) == (None, "info")
    assert finding.evidence.most_gain_frac == pytest.approx(13 / 8 - 1)
    recorded_words(finding.message)
