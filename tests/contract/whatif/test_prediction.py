"""Predictions of replays, and advice that is tested by them."""

from dataclasses import replace
from statistics import fmean

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.errors import InputError, NeverEndsError, UsageError
from schedtrace.model.message import plain
from schedtrace.model.report import Gain
from schedtrace.model.what_if import Objective
from schedtrace.whatif.advice import judged
from schedtrace.whatif.part import require_baseline
from schedtrace.whatif.prediction import Predictor, predict, recorded_load
from schedtrace.whatif.replays import replay_work
from tests.contract.whatif.conftest import LOADS, drive, seats_and_a_budget
from tests.simulated import TIMES

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def base(seats):
    return seats


def slower(folder, factor):
    """What is recorded of the same load where a step takes longer."""
    times = replace(TIMES, base_us=factor * TIMES.base_us)
    return recorded_load(drive(folder, requests=20, times=times, **LOADS["seats"]))


@pytest.fixture(scope="module")
def predicted():
    """What was predicted of the load, by its changes."""
    return {}


@pytest.fixture(scope="module")
def unchanged(base):
    """Return the replay of the unchanged load."""
    with Predictor(base) as predictor:
        assert predictor.replayed.replayed_trials
        return predictor.replayed


@pytest.fixture
def each_once(predicted, unchanged, monkeypatch):
    """Replay the load, and each change of that menu, once for all tests.

    ``test_random_loads.py`` tries whole menus, and judges intervals.
    """
    predict = Predictor.predict

    def once(predictor, changes, **options):
        key = (tuple(sorted(changes.items())), *sorted(options.items()))
        if key not in predicted:
            predicted[key] = predict(predictor, changes, **options)
        return predicted[key]

    monkeypatch.setattr(Predictor, "predict", once)
    monkeypatch.setattr(Predictor, "replayed", unchanged)
    monkeypatch.setattr("schedtrace.whatif.advice.RESAMPLES", 1)
    monkeypatch.setattr("schedtrace.whatif.advice.menu", seats_and_a_budget)


def figures(replays):
    """Return the figures of the last configuration."""
    return {figure.name: figure for figure in replays.configurations[-1].figures}


def test_without_changes_the_decisions_are_checked(base):
    replays = predict(base, {})
    baseline = replays.baseline
    assert baseline.same_steps == baseline.compared_steps == base.timelines[0].steps.height
    found = figures(replays)
    assert found["steps"].before == found["steps"].value
    assert found["output"].value == pytest.approx(found["output"].before, rel=0.02)
    [row] = replays.configurations
    assert (row.recorded, row.changes, row.folder, replays.load.trials) == (True, {}, None, 2)
    assert (row.finished, row.too_long, replays.load.requests) == (40, 0, 40)


def test_more_seats_make_fewer_steps_and_an_earlier_first_token(base, tmp_path):
    replays = predict(base, {"max_num_seqs": 16}, output=tmp_path / "kept", resamples=2)
    before, after = replays.configurations
    assert (replays.settings, after.changes) == ({"max_num_seqs": 4}, {"max_num_seqs": 16})
    found = figures(replays)
    assert found["steps"].value < 0.6 * found["steps"].before
    assert found["steps"].before == before.figure("steps").value
    assert found["waiting requests"].value < 0.5 * found["waiting requests"].before
    first = found["TTFT p50"]
    assert -1 < first.low_frac < first.change_frac < first.high_frac < -0.5
    assert after.extrapolated_frac > 0.3
    assert replays.load.by_arrival
    folders = [row.folder.rsplit("/", 1)[1] for row in replays.configurations]
    assert folders == ["base-replayed", "base-changed"]


def test_fewer_seats_are_worse(base):
    found = figures(predict(base, {"max_num_seqs": 2}, resamples=0))
    assert found["TTFT p50"].change_frac > 0.5
    assert (found["TTFT p50"].low_frac, found["TTFT p50"].high_frac) == (None, None)


@pytest.mark.usefixtures("each_once")
def test_the_best_change_is_given_with_what_a_replay_of_it_did(base):
    [first, *_], replays = judged(analyze_run(base.run).findings, base)
    assert (first.code, first.gain.method, first.gain.metric) == (
        "max-num-seqs-bound",
        "replay",
        "output_tokens_per_s",
    )
    [advice] = first.advice
    assert (advice.setting, advice.value) == ("max_num_seqs", 16)  # nearly as good as a seat for each
    assert first.gain.change_frac == pytest.approx(0.73, abs=0.05)
    assert plain(advice.tested).startswith("Replayed on this load: TTFT p50 -")  # the gain says the output
    assert ", steps " in plain(advice.tested)
    assert plain(advice.costs).startswith("TPOT p50 +")
    [advised] = [row for row in replays.configurations if row.place == 1]
    assert advised.changes == {"max_num_seqs": 16}
    makespan = advised.figure("makespan")
    assert first.gain.change_frac == pytest.approx(1 / (1 + makespan.change_frac) - 1)
    assert (replays.objective, replays.baseline.judged_by) == ("makespan", "makespan")
    assert {"max_num_seqs": 2} in [row.changes for row in replays.configurations if row.figures]


@pytest.mark.usefixtures("each_once")
def test_by_another_objective_another_metric_is_gained(base):
    [first, *_], _ = judged(analyze_run(base.run).findings, base, objective=Objective.LATENCY)
    assert first.gain.metric == "e2e_mean_ms"
    assert first.gain.change_frac < -0.25
    mean_ms = fmean(trial.e2e_ms.mean for trial in analyze_run(base.run).trials)
    assert first.gain.before == mean_ms  # the report's figure, not the replay's
    assert first.gain.after == pytest.approx(mean_ms * (1 + first.gain.change_frac))


@pytest.mark.usefixtures("each_once")
def test_no_limit_needs_to_point_to_what_helps(base):
    [found], _ = judged([], base)
    assert (found.code, found.gain.method) == ("better-setting", "replay")
    assert found.advice[0].setting == "max_num_seqs"
    assert "no other finding proposes it" in plain(found.verdict)


@pytest.mark.usefixtures("each_once")
def test_each_replay_is_told(base):
    told = []
    judged([], base, progress=lambda *at: told.append(at))
    assert [number for number, _ in told] == list(range(1, len(told) + 1))
    assert all(number <= of for number, of in told)


@pytest.mark.usefixtures("each_once")
def test_fewer_seats_are_taken_back(base):
    found = analyze_run(base.run).findings
    [seats] = [finding for finding in found if finding.code == "max-num-seqs-bound"]
    seats.advice[0].value = 2
    [one, *_], _ = judged([seats], base)
    assert [advice.value for advice in one.advice] == [16]
    [told] = one.refuted
    assert plain(told).startswith("--max-num-seqs 2 was tried on a replay of this load and does not help: ")


@pytest.fixture
def never_ends(monkeypatch):
    """``never_ends(lambda changes: ...)``: replays that do not."""

    def patched(which):
        def replayed(work, changes, *args, **options):
            if which(changes):
                raise NeverEndsError
            return replay_work(work, changes, *args, **options)

        monkeypatch.setattr("schedtrace.whatif.prediction.replay_work", replayed)

    return patched


def test_what_never_ends_is_taken_back(base, never_ends):
    [seats] = [one for one in analyze_run(base.run).findings if one.code == "max-num-seqs-bound"]
    never_ends(lambda changes: changes)
    [one], _ = judged([seats], base)
    assert (one.advice, one.gain) == ([], None)
    assert plain(one.refuted[0]).endswith(
        "was tried on a replay of this load and does not help: the load never ends."
    )


def test_a_load_that_does_not_end_as_recorded_cannot_be_judged(base, never_ends):
    never_ends(lambda _: True)
    with pytest.raises(UsageError):
        judged([], base)


def test_a_replay_far_from_what_was_recorded_advises_nothing(base, tmp_path):
    off = recorded_load(base.run, slower(tmp_path / "slower", 2).times)
    with pytest.raises(InputError, match=r"as it was recorded is \+\d\d % off in makespan"):
        judged([], off)
    with pytest.raises(InputError, match="off in makespan"):
        require_baseline(off)
    baseline = require_baseline(base)
    assert (baseline.judged_by, baseline.part) == ("makespan", None)
    assert abs(baseline.misfit_frac) < 0.05


def test_where_no_change_gains_more_than_the_replay_is_off_the_list_and_the_reason_stay(
    base, tmp_path, monkeypatch
):
    """The advice stays as it was; its estimate does not, since a replay gained less."""
    off = recorded_load(base.run, slower(tmp_path / "slower", 1.2).times)
    monkeypatch.setattr("schedtrace.whatif.advice.menu", lambda *_: [])
    [seats] = [found for found in analyze_run(base.run).findings if found.code == "max-num-seqs-bound"]
    seats.advice[0].value = 2
    seats.gain = Gain(metric="output_tokens_per_s", change_frac=0.3, saved_frac=0.2, method="step_time")
    [left], replays = judged([seats], off)
    assert (left.advice, left.gain) == (seats.advice, None)
    assert "no change of a setting gains more (1 tried)" in replays.no_advice
    assert [row.changes for row in replays.configurations] == [{}, {"max_num_seqs": 2}]


@pytest.mark.usefixtures("each_once")
def test_findings_are_ranked_by_what_their_advice_gained(base):
    ranked, _ = judged(analyze_run(base.run).findings, base)
    weights = [finding.weight for finding in ranked if finding.title]
    assert weights == sorted(weights, reverse=True)
