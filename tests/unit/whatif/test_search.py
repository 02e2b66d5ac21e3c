"""Changes that are worth a trial on a recorded load."""

from types import SimpleNamespace

import pytest

from schedtrace.errors import NeverEndsError, UsageError
from schedtrace.model.trace import Exit, Preemption
from schedtrace.model.what_if import Configuration, Figure
from schedtrace.whatif.search import Search, menu
from tests.makers import arrival, step

NOW = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 512, "num_blocks": None}
GRAPHS = {
    "compilation_config.cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32],
    "compilation_config.cudagraph_mode": "FULL",
}


@pytest.fixture
def load_of(view_of):
    """``load_of(*lines, prefixes=(), **header)``: a load of prompts with these prefix hashes."""

    def made(*lines, prefixes=(), has_draft_cost=False, **header):
        requests = [SimpleNamespace(prefix=prefix) for prefix in prefixes]
        view = view_of(*lines, device="cpu", **header)
        return SimpleNamespace(
            timelines=[view], loads=[requests], times=SimpleNamespace(has_draft_cost=has_draft_cost)
        )

    return made


BUSY = step(0, num_running_after=25)


def values(changes, setting):
    return [value for name, value in changes if name == setting]


def seats(changes):
    return values(changes, "max_num_seqs")


def test_fewer_seats_are_full_batches_of_parts_of_those_taken_and_the_captured_sizes_below(load_of):
    assert seats(menu(load_of(BUSY), NOW)) == [6, 8, 16]
    assert seats(menu(load_of(BUSY, settings=GRAPHS), NOW)) == [6, 8, 16, 24]


def test_with_drafts_each_request_fills_several_tokens_of_a_graph(load_of):
    """Three tokens each: 32 hold ten requests, 24 hold eight."""
    assert seats(menu(load_of(BUSY, settings=GRAPHS), NOW | {"drafts": 2})) == [6, 8, 10, 16]


@pytest.mark.parametrize(
    ("drafts", "has_cost", "offered"), [(2, True, True), (2, False, False), (None, True, False)]
)
def test_drafts_off_is_tried_where_the_record_shows_what_they_cost(load_of, drafts, has_cost, offered):
    changes = menu(load_of(BUSY, has_draft_cost=has_cost), NOW | {"drafts": drafts, "speculative_config": {}})
    assert (("speculative_config", None) in changes) is offered


@pytest.mark.parametrize(
    ("prefixes", "now", "offered"),
    [
        ([("a", "b"), ("a", "c"), ()], False, [True]),
        ([("a", "b"), ("c", "b"), (), ()], False, []),
        ([("a",), ("a",)], True, []),
    ],
)
def test_prefix_caching_is_tried_where_two_prompts_begin_alike(load_of, prefixes, now, offered):
    changes = menu(load_of(step(0), prefixes=prefixes), NOW | {"enable_prefix_caching": now})
    assert values(changes, "enable_prefix_caching") == offered


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        ({"max_num_seqs": 4}, [25, 50, 100, 512, 1024]),
        ({"max_num_seqs": 64}, [64, 100, 512, 1024]),
        ({"max_num_seqs": 4, "enable_chunked_prefill": False}, [512, 1024]),
    ],
    ids=["parts of what was used", "a token a seat", "a whole prompt"],
)
def test_budgets_are_parts_of_what_was_used_and_up_to_twice_what_was_wanted(load_of, options, offered):
    """200 tokens were used, and 600 more waited."""
    load = load_of(step(0, budget=256, got={"a": 200}, waiting=2, waiting_tokens_after=600))
    changes = menu(load, NOW | {"max_num_batched_tokens": 256} | options)
    assert values(changes, "max_num_batched_tokens") == offered


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        ({}, [64, 32]),
        ({"long_prefill_token_threshold": 32}, [64, 0]),
        ({"enable_chunked_prefill": False}, []),
        ({"max_num_batched_tokens": 128}, [64, 32, 16]),
        ({"max_num_batched_tokens": 120}, [60, 30]),
    ],
)
def test_thresholds_are_parts_of_the_budget_below_the_longest_prompt(load_of, options, offered):
    load = load_of(
        step(0, arrived=[arrival("a", 0, prompt_tokens=90), arrival("b", 0)], got={"a": 8}, new="a")
    )
    changes = menu(load, NOW | {"max_num_batched_tokens": 256} | options)
    assert values(changes, "long_prefill_token_threshold") == offered


@pytest.mark.parametrize(
    ("options", "priorities", "setting", "offered"),
    [
        ({}, (0, 0), "scheduling_policy", []),
        ({}, (0, 1), "scheduling_policy", ["priority"]),
        ({"scheduling_policy": "priority"}, (0, 0), "scheduling_policy", ["fcfs"]),
        ({"enable_chunked_prefill": False}, (0, 0), "enable_chunked_prefill", [True]),
        ({"enable_chunked_prefill": True}, (0, 0), "enable_chunked_prefill", []),
    ],
)
def test_switches_that_could_alter_a_step(load_of, options, priorities, setting, offered):
    arrived = [arrival(name, 0, priority=number) for name, number in zip("ab", priorities, strict=True)]
    assert values(menu(load_of(step(0, arrived=arrived)), NOW | options), setting) == offered


@pytest.mark.parametrize(
    ("preempted", "header", "offered"),
    [
        ("a", {"watermark": 0.0, "scheduler_reserve_full_isl": True}, ([0.05], [True])),
        ("a", {}, ([], [])),
        ("", {"watermark": 0.0, "scheduler_reserve_full_isl": True}, ([], [])),
    ],
)
def test_after_preemptions_what_admits_later_is_tried_where_vllm_has_it(load_of, preempted, header, offered):
    load = load_of(
        step(0, got={"a": 8}, new="a", arrived=[arrival("a", 0)]),
        step(1, preempted=[Preemption(name, 8) for name in preempted]),
        scheduler_config=header,
    )
    changes = menu(load, NOW)
    assert (values(changes, "watermark"), values(changes, "scheduler_reserve_full_isl")) == offered


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
def test_more_blocks_are_tried_where_they_were_short(load_of, fields, offered):
    load = load_of(step(0, kv_blocks_total=100, **fields))
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
    """The best gain is 0.4, so 0.388 is enough; full batches midway to its neighbours are tried."""
    predictor = Predictor({seat(128): 0.387, seat(176): 0.389, seat(256): 0.4, seat(512): 0.39})
    assert best(predictor, *seat(128), *seat(256), *seat(512)) == [seat(176)]
    assert [changes["max_num_seqs"] for changes in predictor.replayed] == [128, 256, 512, 176, 360]


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


def test_a_sure_gain_precedes_one_that_is_larger_only_at_best():
    switch = ("async_scheduling", True)
    predictor = Predictor({seat(128): (-0.1, 0.07, 0.3), (switch,): (0.11, 0.13, 0.15)})
    assert best(predictor, *seat(128), switch)[:2] == [(switch,), seat(128)]
