"""Clients that wait for their answers, replayed as such: what a fixed list of arrivals gets wrong."""

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.model.message import Count, plain
from schedtrace.model.what_if import CONCURRENCY
from schedtrace.whatif.advice import judged
from schedtrace.whatif.prediction import predict, recorded_load
from schedtrace.whatif.search import menu
from tests.simulated import simulated

pytestmark = pytest.mark.vllm

SEATS = {"max_num_seqs": 4, "max_model_len": 512}


def closed(folder, clients=12, **options):
    """Clients, each with one request open, 40 in all; gives the run, and how long it took."""
    left, took = iter(range(40)), []

    def load(engine):
        def send(at_us):
            number = next(left, None)
            if number is not None:
                engine.arrive(at_us, f"r{number}", 20 + 37 * number % 200, 5 + 11 * number % 40)

        def finished(request_id):
            send(engine.clock.now_us + 5_000)
            engine.drop_request(request_id)

        engine.finished = finished
        began = engine.clock.now_us
        for _ in range(clients):
            send(began)
        engine.run()
        took.append(engine.clock.now_us - began)

    return simulated(folder, load, **options), took[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    run, _ = closed(tmp_path_factory.mktemp("closed") / "base", **SEATS)
    return recorded_load(run)


def more_or_fewer_seats(*of):
    """Return the part of the menu that is about seats."""
    return [change for change in menu(*of) if change[0] == "max_num_seqs"]


def figures(replays):
    return {figure.name: figure for figure in replays.configurations[-1].figures}


def test_it_is_found_and_the_replay_reproduces_it(base):
    [load] = base.loads
    assert load.replayed_clients.clients == 12
    assert load.replayed_clients.think_us == pytest.approx(
        [5_000] * len(load.replayed_clients.think_us), abs=200
    )
    for figure in predict(base, {}).configurations[0].figures:
        if not figure.decided:
            assert figure.value == pytest.approx(figure.before, rel=0.02), figure.name


def test_more_seats_do_to_it_what_they_do_to_the_clients(base, tmp_path):
    """With the recorded arrivals the end could not come much sooner: the last one is sent late."""
    _, before = closed(tmp_path / "before", **SEATS)
    _, after = closed(tmp_path / "after", **SEATS | {"max_num_seqs": 12})
    makespan = figures(predict(base, {"max_num_seqs": 12}, resamples=0))["makespan"]
    assert after / before < 0.7
    assert makespan.change_frac == pytest.approx(after / before - 1, abs=0.02)


def test_advice_is_judged_by_the_time_until_all_are_done(base, monkeypatch):
    monkeypatch.setattr("schedtrace.whatif.advice.RESAMPLES", 1)
    monkeypatch.setattr("schedtrace.whatif.advice.menu", more_or_fewer_seats)
    [first, *_], _ = judged([], base)
    assert first.gain.metric == "output_tokens_per_s"
    assert first.evidence.settings["max_num_seqs"] >= 9


def test_the_number_of_clients_can_be_given(base):
    [load] = recorded_load(base.run, base.times, clients=6).loads
    assert load.replayed_clients.clients == 6
    assert len(load.replayed_clients.think_us) == 34


@pytest.mark.parametrize("clients", [2, 24])
def test_another_number_of_clients_does_what_it_does_to_an_engine(base, clients, tmp_path):
    _, before = closed(tmp_path / "before", **SEATS)
    _, after = closed(tmp_path / "after", clients, **SEATS)
    makespan = figures(predict(base, {CONCURRENCY: clients}, resamples=0))["makespan"]
    assert makespan.change_frac == pytest.approx(after / before - 1, abs=0.02)


def test_where_clients_are_the_limit_more_and_fewer_of_them_are_tried(tmp_path, monkeypatch):
    monkeypatch.setattr("schedtrace.whatif.advice.RESAMPLES", 1)
    monkeypatch.setattr("schedtrace.whatif.advice.menu", lambda *_: [])
    run, _ = closed(tmp_path / "run", 2, **SEATS)
    findings = analyze_run(run).findings
    found, replays = judged(findings, recorded_load(run))
    [advice] = next(finding.advice for finding in found if finding.code == "client-limited")
    assert plain(advice.tested).startswith("With 4 clients: output +")
    tried = [row.changes[CONCURRENCY] for row in replays.configurations if CONCURRENCY in row.changes]
    assert (tried, replays.settings[CONCURRENCY]) == ([4, 1], 2)


def test_it_is_told(base):
    notes = predict(base, {}, resamples=0).notes
    assert [note.arguments["clients"] for note in notes if "clients" in note.arguments] == [
        Count(12, "client")
    ]
