"""Clients that wait for their answers, replayed as such: what a fixed list of arrivals gets wrong."""

import pytest

pytest.importorskip("vllm")

from schedtrace.present.phrases import plain
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Simulation, VirtualClock
from schedtrace.whatif.advice import judged
from schedtrace.whatif.prediction import predict, recorded
from tests.contract.whatif.conftest import TIMES

pytestmark = pytest.mark.vllm

SEATS = {"max_num_seqs": 4, "max_model_len": 512}


def closed(folder, monkeypatch, clients=12, think_us=5_000, requests=60, **options):
    """So many clients, each with one request open; gives the run, and how long it took."""
    monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
    left = iter(range(requests))
    with VirtualClock() as clock:
        engine = Simulation(clock, traced_class, times=TIMES, **options)

        def send(at_us):
            number = next(left, None)
            if number is not None:
                engine.arrive(
                    at_us, f"r{number}", 20 + 37 * number % 200, 5 + 11 * number % 40, front_end_us=0
                )

        def finished(request_id):
            send(clock.now_us + think_us)
            engine.forget(request_id)

        engine.finished = finished
        began = clock.now_us
        for _ in range(clients):
            send(began)
        engine.run()
        took = clock.now_us - began
        engine.close()
    monkeypatch.delenv("SCHEDTRACE_RUN_DIR")
    return read_run(folder), took


@pytest.fixture
def base(tmp_path, monkeypatch):
    run, _ = closed(tmp_path / "base", monkeypatch, **SEATS)
    return recorded(run)


def figures(prediction):
    return {figure.name: figure for figure in prediction.measured}


def test_it_is_found_and_the_replay_reproduces_it(base):
    [load] = base.loads
    assert load.closed.clients == 12
    assert load.closed.think_us == pytest.approx([5_000] * len(load.closed.think_us), abs=200)
    for figure in predict(base, {}).measured:
        assert figure.replayed == pytest.approx(figure.recorded, rel=0.02), figure.name


def test_more_seats_do_to_it_what_they_do_to_the_clients(base, tmp_path, monkeypatch):
    """With the recorded arrivals the end could not come much sooner: the last one is sent late."""
    _, before = closed(tmp_path / "before", monkeypatch, **SEATS)
    _, after = closed(tmp_path / "after", monkeypatch, **SEATS | {"max_num_seqs": 12})
    makespan = figures(predict(base, {"max_num_seqs": 12}, resamples=0))["makespan"]
    assert after / before < 0.7
    assert makespan.change_frac == pytest.approx(after / before - 1, abs=0.02)


def test_advice_is_judged_by_the_time_until_all_are_done(base):
    [first, *_] = judged([], base)
    assert first.gain.metric == "output_tokens_per_s"
    assert first.evidence.settings["max_num_seqs"] >= 9


def test_the_number_of_clients_can_be_given(base):
    [load] = recorded(base.run, base.times, clients=6).loads
    assert load.closed.clients == 6
    assert len(load.closed.think_us) == 54


def test_it_is_told(base):
    notes = [plain(note) for note in predict(base, {}).notes]
    assert any(
        note.startswith("The load is a closed loop: 12 clients with one request open each;") for note in notes
    )
