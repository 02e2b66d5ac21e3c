"""Changes that are worth a trial on a recorded load."""

from types import SimpleNamespace

import pytest

from schedtrace.errors import NeverEndsError, UsageError
from schedtrace.model.trace import Exit
from schedtrace.model.what_if import Configuration, Figure
from schedtrace.whatif.search import Search, menu
from tests.makers import step

NOW = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 512, "num_blocks": None}
GRAPHS = {
    "compilation_config.cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32],
    "compilation_config.cudagraph_mode": "FULL",
}


@pytest.fixture
def base(view_of):
    """``base(**header)``: a load of 25 running requests."""

    def made(*, has_draft_cost=False, **header):
        view = view_of(step(0, num_running_after=25), device="cpu", **header)
        return SimpleNamespace(
            timelines=[view], loads=[], times=SimpleNamespace(has_draft_cost=has_draft_cost)
        )

    return made


def seats(changes):
    return [value for name, value in changes if name == "max_num_seqs"]


def test_fewer_seats_are_parts_of_those_taken_and_the_captured_sizes_below(base):
    assert seats(menu(base(), NOW)) == [6, 12, 18]
    assert seats(menu(base(settings=GRAPHS), NOW)) == [6, 12, 16, 18, 24]


def test_with_drafts_each_request_fills_several_tokens_of_a_graph(base):
    """Three tokens each: 32 hold ten requests, 24 hold eight."""
    assert seats(menu(base(settings=GRAPHS), NOW | {"drafts": 2})) == [6, 8, 10, 12, 18]


@pytest.mark.parametrize(
    ("drafts", "has_cost", "offered"), [(2, True, True), (2, False, False), (None, True, False)]
)
def test_drafts_off_is_tried_where_the_record_shows_what_they_cost(base, drafts, has_cost, offered):
    changes = menu(base(has_draft_cost=has_cost), NOW | {"drafts": drafts, "speculative_config": {}})
    assert (("speculative_config", None) in changes) is offered


def values(changes, setting):
    return [value for name, value in changes if name == setting]


@pytest.mark.parametrize(
    ("fields", "offered"),
    [
        ({"kv_blocks_free_after": 50, "exits": [Exit("waiting", "break", "kv_blocks")]}, [150, 200, 300]),
        ({"kv_blocks_free_after": 10}, [150, 200, 300]),
        ({"kv_blocks_free_after": 11}, []),
        ({"kv_blocks_free_after": 50, "exits": [Exit("waiting", "break", "max_num_seqs")]}, []),
    ],
    ids=["refused", "a tenth was free", "more was free", "refused for something else"],
)
def test_more_blocks_are_tried_where_they_were_short(view_of, fields, offered):
    view = view_of(step(0, kv_blocks_total=100, **fields), device="cpu")
    load = SimpleNamespace(timelines=[view], loads=[], times=SimpleNamespace(has_draft_cost=False))
    assert values(menu(load, NOW | {"num_blocks": 100}), "num_gpu_blocks_override") == offered
    assert values(menu(load, NOW), "num_gpu_blocks_override") == []


class Predictor:
    """Replays that save these shares of the time: one, or the least, the estimate and the most.

    A value that is not listed saves a hundredth.
    """

    def __init__(self, saves, misfit_frac=0.0):
        self.saves, self.misfit, self.replayed = saves, misfit_frac, []

    def misfit_frac(self, _):
        return self.misfit

    def now(self, name):
        return NOW.get(name)

    def predict(self, changes, *, resamples):
        assert resamples == 0
        self.replayed.append(changes)
        saved = self.saves.get(tuple(changes.items()), 0.01)
        if isinstance(saved, Exception):
            raise saved
        least, estimate, most = saved if isinstance(saved, tuple) else (None, saved, None)
        ends = {} if least is None else {"low_frac": -most, "high_frac": -least}
        figure = Figure(
            name="ttft_ms",
            unit="ms",
            higher_is_better=False,
            decided=False,
            value=1.0,
            change_frac=-estimate,
            **ends,
        )
        return Configuration(changes=changes, figures=[figure])


def seat(value, *rest):
    return (("max_num_seqs", value), *rest)


def best(predictor, *changes):
    return [trial.changes for trial in Search(predictor, "ttft_ms").best(list(changes))]


def test_of_values_that_gain_nearly_as_much_the_nearest_one_is_advised():
    """Of 0.4, 0.97 parts are 0.388; the values midway to the neighbours of the best one are tried, too."""
    predictor = Predictor({seat(128): 0.387, seat(181): 0.389, seat(256): 0.4, seat(512): 0.39})
    assert best(predictor, *seat(128), *seat(256), *seat(512)) == [seat(181)]
    assert [changes["max_num_seqs"] for changes in predictor.replayed] == [128, 256, 512, 181, 362]


def test_of_values_that_may_be_a_loss_a_smaller_gain_is_enough():
    """0.7 parts of 0.4 are 0.28, and the interval of each reaches below nothing."""
    saves = {seat(128): (-0.1, 0.1, 0.29), seat(96): (-0.1, 0.1, 0.27), seat(256): (-0.2, 0.1, 0.4)}
    assert best(Predictor(saves), *seat(96), *seat(128), *seat(256)) == [seat(128)]


def test_a_switch_has_no_smaller_change():
    switch = ("async_scheduling", True)
    assert best(Predictor({(switch,): 0.2}), switch) == [(switch,)]


@pytest.mark.parametrize(("together", "advised"), [(0.45, 3), (0.35, 2)])
def test_a_pair_is_advised_if_it_gains_more_than_its_better_half(together, advised):
    switch = ("async_scheduling", True)
    saves = {seat(128): 0.4, (switch,): 0.2, seat(128, switch): together}
    proposals = best(Predictor(saves), *seat(128), switch)
    assert proposals == [seat(128), (switch,), seat(128, switch)][:advised]


@pytest.mark.parametrize("misfit_frac", [0.1, -0.1])
def test_what_saves_no_more_than_the_replay_is_off_is_not_advised(misfit_frac):
    predictor = Predictor({seat(128): 0.1}, misfit_frac)
    assert best(predictor, *seat(128)) == []


@pytest.mark.parametrize(("error", "is_refuted"), [(UsageError("no"), False), (NeverEndsError("no"), True)])
def test_a_change_that_cannot_be_replayed_is_tried_once(error, is_refuted):
    predictor = Predictor({seat(128): error})
    search = Search(predictor, "ttft_ms")
    for _ in range(2):
        search.trial(*seat(128))
    assert len(predictor.replayed) == 1
    assert search.configurations[seat(128)].refused == "no"
    assert (search.refuted(*seat(128)) is not None) == is_refuted
    assert search.families == ({"max_num_seqs"} if is_refuted else set())
