"""Slow steps that nothing in the trace marks: phases, phases that return, and single steps."""

import numpy as np
import polars as pl
import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.excess import StepPhase, returning_phases, slow_phases
from schedtrace.diagnose.rules.slow_steps import UnmarkedSteps
from tests.makers import arrival, step

CODE = "slow-steps"
PHASES = [(60, 95), (190, 235), (300, 330), (480, 530), (560, 590)]
"""Phases of slow steps, first and last, at irregular distances."""


def decodes(steps, factor, sizes=8):
    """Decode steps, each right after the one before: 4 ms and 0.1 ms a request, and 2 % of noise.

    Their batches have so many sizes, up to 8. ``factor(number)`` is how many times as long a step takes.
    """
    names = "abcdefgh"
    lines, at = [], 0
    for number in range(steps):
        size = 9 - sizes + number % sizes
        noise = 1 + 0.02 * ((number * 7 % 11) / 5 - 1)
        took = round((4000 + 100 * size) * noise * factor(number))
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
        at += took + 20
    return lines


def in_phases(factor, phases=PHASES):
    return lambda number: factor if any(first <= number <= last for first, last in phases) else 1


def test_phases_that_nothing_marks(found, recorded_words):
    [finding] = found(CODE, *decodes(640, in_phases(1.7)))
    evidence = finding.evidence
    assert isinstance(evidence, UnmarkedSteps)
    assert [(phase.first_step, phase.last_step) for phase in evidence.phases] == PHASES
    slow = sum(last - first + 1 for first, last in PHASES)
    assert (evidence.slow, evidence.looked_at, evidence.part) == (slow, 640, "execution")
    assert evidence.excess_ms == pytest.approx(0.7 * 4.45 * slow, rel=0.05)
    assert finding.share_frac == pytest.approx(0.2 * 4.5 / 8, rel=0.3)  # 4.5 of 8 requests run in a step
    assert {"batch", "prefill", "clock"} & {*evidence.compared} == {"batch", "clock"}  # no step has a prefill
    recorded_words(finding)


def test_the_verdict_is_not_that_nothing_limits(run_of, recorded_words):
    """Every step has all eight requests."""
    run = analyze_run(run_of("slow", *decodes(640, in_phases(1.7), sizes=1)))
    assert run.findings[0].code == CODE
    recorded_words(run.verdict)


def test_phases_are_stated_together(found):
    """The search explains each of two long phases by a range of steps, which tells when and not why."""
    [finding] = found(CODE, *decodes(640, in_phases(1.7, [(100, 200), (400, 520)])))
    assert [(phase.first_step, phase.last_step) for phase in finding.evidence.phases] == [
        (100, 200),
        (400, 520),
    ]


def test_phases_that_return_at_a_period(found, recorded_words):
    """30 of every 100 steps are slow."""
    [finding] = found(CODE, *decodes(800, lambda number: 1.7 if number % 100 >= 70 else 1))
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
    [finding] = found(CODE, *decodes(640, lambda number: 1.9 if number % 7 == 3 else 1))
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
    findings = found(CODE, *decodes(640, factor))
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
