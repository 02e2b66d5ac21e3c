"""Configurations proposed for an objective."""

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.whatif.latency_targets import advise, candidates
from schedtrace.whatif.prediction import Predictor
from schedtrace.whatif.search import menu
from schedtrace.whatif.sweep import outcome_of
from schedtrace.whatif.sweep_rows import parse_slo
from tests.contract.whatif.conftest import Here, seats_and_a_budget

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _resampled_once(monkeypatch):
    monkeypatch.setattr(
        "schedtrace.whatif.latency_targets.RESAMPLES", 1
    )  # test_random_loads.py judges intervals


@pytest.fixture
def short_menu(monkeypatch):
    monkeypatch.setattr("schedtrace.whatif.latency_targets.menu", seats_and_a_budget)


OUTCOMES = {}
"""Of ``seats``, by the key of a configuration: both objectives are about the same ones."""


class Once(Here):
    """Each configuration is replayed once."""

    def submit_replay(self, function, *arguments):
        if function is not outcome_of:
            return super().submit_replay(function, *arguments)
        if arguments[0] not in OUTCOMES:
            OUTCOMES[arguments[0]] = super().submit_replay(function, *arguments)
        return OUTCOMES[arguments[0]]


def proposals(seats, slo):
    return advise(seats, parse_slo(slo), Once)


def test_what_findings_advise_and_the_menu_is_tried(seats):
    with Predictor(seats) as predictor:
        found = candidates(seats, analyze_run(seats.run).findings, predictor.options)
        assert all({name: value} in found for name, value in menu(seats, predictor.options))
    assert {"max_num_seqs": 2} in found
    assert {"max_num_seqs": 8} in found
    assert len(found) == len({str(one) for one in found})


@pytest.mark.usefixtures("short_menu")
def test_more_seats_are_proposed_with_what_they_cost(seats):
    answer = proposals(seats, "ttft_p99=60ms")
    base, first, *others = answer.configurations
    assert (base.recorded, base.meets_slo, base.place, first.place) == (True, False, None, 1)
    assert answer.settings["max_num_seqs"] == 4
    assert first.changes["max_num_seqs"] > 4
    assert first.goodput_requests_per_s > 1.5 * base.goodput_requests_per_s
    assert abs(answer.baseline.misfit_frac) < 0.05
    figures = {figure.name: figure.change_frac for figure in first.figures}
    assert figures["TTFT p50"] < -0.5
    assert figures["TPOT p50"] > 0
    assert "max-num-seqs-bound" in first.removed
    assert sorted(row.place for row in others if row.place) in ([], [2], [2, 3])
    assert all(bool(row.figures) is bool(row.place) for row in others)
    run = seats.run.path
    assert answer.commands[0].startswith(f"SCHEDTRACE_RUN_DIR={run}-advised vllm serve ")
    assert " --max-num-" in answer.commands[0]
    assert answer.commands[1] == f"schedtrace diff {run} {run}-advised"
    assert len(answer.configurations) > 5


@pytest.mark.usefixtures("short_menu")
def test_an_objective_that_is_met_leaves_nothing_to_change(seats):
    answer = proposals(seats, "e2e_p99=60m")
    assert answer.recorded_configuration.meets_slo
    assert ([row for row in answer.configurations if row.place], answer.commands) == ([], [])
