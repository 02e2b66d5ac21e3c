"""The answer of a fleet's replay: words by the interval of the judged figure."""

import pytest

from schedtrace.model.what_if import Baseline, Configuration, Figure, LoadPart, ReplayedLoad, Replays
from schedtrace.present.pages.what_if import answer, fleet_replay_page
from tests.unit.present.test_goldens import check, text_of


def e2e(change, low, high):
    return Figure(
        name="E2E mean",
        unit="ms",
        higher_is_better=False,
        decided=False,
        value=100 * (1 + change),
        before=100.0,
        change_frac=change,
        low_frac=low,
        high_frac=high,
    )


def replays(engines, figure, **fields):
    part = LoadPart(requests=900, whole_requests=4000, begin_s=0.0, end_s=61.0)
    load = ReplayedLoad(
        label="fleet",
        path="fleet",
        recorded_version="0.32.0",
        trials=1,
        requests=900,
        prompt_tokens=200_000,
        output_tokens=70_000,
        by_arrival=True,
        part=part,
    )
    return Replays(
        load=load,
        vllm_version="0.32.0",
        step_times="Fitted to 900 steps of 20 engines.",
        settings={"data_parallel_size": 20, "router": "as recorded"},
        baseline=Baseline(judged_by="E2E mean", misfit_frac=0.02),
        configurations=[
            Configuration(changes={}, recorded=True, figures=[e2e(0.02, None, None)], kv_blocks=700),
            Configuration(
                changes={"data_parallel_size": engines, "router": "least-running"},
                figures=[figure],
                kv_blocks=700,
            ),
        ],
        notes=[],
        **fields,
    )


@pytest.mark.parametrize(
    ("engines", "figure", "begins"),
    [
        (20, e2e(-0.4, -0.5, -0.3), "The router is to blame:"),
        (20, e2e(0.4, 0.3, 0.5), "The router is not to blame:"),
        (20, e2e(-0.1, -0.3, 0.2), "The router is not to blame as far as"),
        (20, e2e(-0.1, None, None), "The router is not to blame as far as"),
        (12, e2e(0.4, 0.3, 0.5), "{now} instead of {before} serve requests more slowly:"),
        (30, e2e(-0.4, -0.5, -0.3), "{now} instead of {before} serve requests faster:"),
        (12, e2e(0.1, -0.1, 0.3), "{now} instead of {before} would do as far as"),
    ],
)
def test_the_answer_needs_an_interval_that_excludes_no_change(engines, figure, begins):
    assert answer(replays(engines, figure)).template.startswith(begins)


def test_without_the_judged_figure_there_is_no_answer():
    document = replays(12, e2e(0.1, 0.0, 0.2))
    document.configurations[1].figures = []
    assert answer(document).arguments == {}


def test_the_page():
    check("fleet-replay", text_of(fleet_replay_page(replays(12, e2e(0.4, 0.3, 0.5)))))
