"""Predictions of replays, and advice that is tested by them."""

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.errors import NeverEndsError
from schedtrace.present.phrases import plain
from schedtrace.whatif.advice import judged
from schedtrace.whatif.prediction import predict, recorded
from tests.contract.whatif.conftest import LOADS, drive

pytestmark = pytest.mark.vllm


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A load that waits for seats."""
    return recorded(drive(tmp_path / "base", monkeypatch, **LOADS["seats"]))


def figures(prediction):
    return {figure.name: figure for figure in (*prediction.decided, *prediction.measured)}


def test_without_changes_the_decisions_are_checked(base):
    prediction = predict(base, {})
    assert prediction.same_steps == prediction.compared_steps == base.timelines[0].steps.height
    found = figures(prediction)
    assert found["steps"].recorded == found["steps"].changed
    assert found["output"].change_frac == 0.0
    assert found["output"].replayed == pytest.approx(found["output"].recorded, rel=0.02)
    assert (prediction.outside_frac, prediction.folders, prediction.trials) == (None, [], 2)


def test_more_seats_make_fewer_steps_and_an_earlier_first_token(base, tmp_path):
    prediction = predict(base, {"max_num_seqs": 16}, output=tmp_path / "kept", resamples=3)
    [change] = prediction.changes
    assert (change.name, change.recorded, change.value) == ("max_num_seqs", 4, 16)
    found = figures(prediction)
    assert found["steps"].changed < 0.6 * found["steps"].replayed
    assert found["waiting requests"].changed < 0.5 * found["waiting requests"].replayed
    first = found["TTFT p50"]
    assert -1 < first.low_frac < first.change_frac < first.high_frac < -0.5
    assert prediction.outside_frac > 0.3
    assert prediction.by_arrival
    assert [path.rsplit("/", 1)[1] for path in prediction.folders] == ["base-replayed", "base-changed"]


def test_fewer_seats_are_worse(base):
    found = figures(predict(base, {"max_num_seqs": 2}, resamples=0))
    assert found["TTFT p50"].change_frac > 0.5
    assert (found["TTFT p50"].low_frac, found["TTFT p50"].high_frac) == (None, None)


def test_advice_is_given_with_what_a_replay_of_it_did(base):
    [first, *_] = judged(analyze_run(base.run).findings, base)
    assert (first.code, first.gain.method) == ("max-num-seqs-bound", "replay")
    advice = first.advice[0]
    assert advice.setting == "max_num_seqs"
    assert plain(advice.tested).startswith("Replayed on this load: ")
    assert ", steps " in plain(advice.tested)
    assert "TPOT p50 +" in plain(advice.tested)  # what it costs


def test_advice_that_does_not_help_is_taken_back(base):
    found = analyze_run(base.run).findings
    [seats] = [finding for finding in found if finding.code == "max-num-seqs-bound"]
    seats.advice[0].value = 2
    del seats.advice[1:]
    [one] = [one for one in judged([seats], base) if one.code == "max-num-seqs-bound"]
    assert (one.advice, one.gain) == ([], None)
    [told] = one.refuted
    assert plain(told).startswith("--max-num-seqs 2 was tried on a replay of this load and does not help: ")


def test_advice_under_which_the_load_never_ends_is_taken_back(base, monkeypatch):
    def never(*_):
        raise NeverEndsError

    [seats] = [one for one in analyze_run(base.run).findings if one.code == "max-num-seqs-bound"]
    monkeypatch.setattr("schedtrace.whatif.prediction.Predictor._changed", never)
    [one] = judged([seats], base)
    assert (one.advice, one.gain) == ([], None)
    assert plain(one.refuted[0]).endswith(
        "was tried on a replay of this load and does not help: the load never ends."
    )


def test_a_load_that_does_not_end_as_recorded_refutes_nothing(base, monkeypatch):
    def never(*_):
        raise NeverEndsError

    [seats] = [one for one in analyze_run(base.run).findings if one.code == "max-num-seqs-bound"]
    monkeypatch.setattr("schedtrace.whatif.prediction.Predictor._replayed", never)
    assert judged([seats], base)[0].advice == seats.advice


def test_findings_are_ranked_by_what_their_advice_gained(base):
    ranked = judged(analyze_run(base.run).findings, base)
    weights = [finding.weight for finding in ranked if finding.title]
    assert weights == sorted(weights, reverse=True)
