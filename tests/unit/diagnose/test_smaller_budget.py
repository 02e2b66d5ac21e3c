"""Whether recorded steps show that a smaller token budget shortens latencies."""

from types import SimpleNamespace

import polars as pl
import pytest

from schedtrace.diagnose.offered_load import OfferedLoad
from schedtrace.diagnose.rules import token_budget_bound as module
from schedtrace.diagnose.rules.token_budget_bound import smaller_budget

SIZES = [220, 420, 820] * 10
DECODING = 20


class Engine(SimpleNamespace):
    """Timeline that the cached function can refer to weakly."""

    __hash__ = object.__hash__


def engine(step_us, *, waiting=0, mixed=SIZES):
    """Steps of these tokens, twenty of them decodes, and as many steps that only decode."""
    sizes = [*mixed, *[DECODING] * len(mixed)]
    steps = pl.DataFrame({"used_tokens": sizes}).with_columns(
        pl.lit(DECODING + 1).alias("total_requests"),
        pl.lit(DECODING + 1).alias("num_running_after"),
        pl.lit(waiting).alias("num_waiting_after"),
        pl.lit(DECODING).alias("decode_tokens"),
        (pl.col("used_tokens") - DECODING).alias("prefill_tokens"),
        pl.Series("busy_us", [step_us(size) for size in sizes]),
    )
    host = pl.DataFrame({"state": ["idle"], "begin_us": [0], "end_us": [0]})
    return Engine(steps=steps, engine_states=host, requests_us=100_000_000)


@pytest.fixture(autouse=True)
def _open_load(monkeypatch):
    monkeypatch.setattr(module, "throughput_counts", lambda _: False)
    monkeypatch.setattr(module, "offered_load", lambda _: OfferedLoad("clock", 1.0))
    monkeypatch.setattr(module, "smallest_batched_tokens", lambda _: 32)


def test_a_device_that_hides_small_prefills_gets_the_smallest_recorded_size():
    budget = smaller_budget(engine(lambda tokens: 50 * max(tokens, 200)))
    assert (budget.tokens, budget.size, budget.step_us) == (220, 220, 11_000)
    # Twenty larger steps of 600 prefill tokens on average become three each, of 200: 40 more. Each costs
    # 21 requests 1,000 us, the decodes' share of a step, and gives 20 decodes a token of 10,000 us.
    assert budget.larger_us == 31_000
    assert budget.saved_frac == pytest.approx(40 * (20 * 10_000 - 21 * 1000) / 100_000_000)


def test_a_step_whose_time_is_mostly_fixed_gets_no_smaller_budget():
    assert smaller_budget(engine(lambda tokens: 10_000 + 10 * tokens)) is None


def test_a_long_queue_needs_the_larger_steps():
    """A thousand requests wait: a step more costs each of them 1,000 us."""
    assert smaller_budget(engine(lambda tokens: 50 * max(tokens, 200), waiting=1000)) is None


def test_decodes_fill_at_most_half_of_the_budget_and_vllm_accepts_it(monkeypatch):
    monkeypatch.setattr(module, "smallest_batched_tokens", lambda _: 400)
    assert smaller_budget(engine(lambda tokens: 50 * max(tokens, 200))).tokens >= 400


@pytest.mark.parametrize("name", ["throughput_counts", "smallest_batched_tokens"])
def test_nothing_is_shown_where_throughput_counts_or_the_least_budget_is_unknown(monkeypatch, name):
    monkeypatch.setattr(module, name, lambda _: True if name == "throughput_counts" else None)
    assert smaller_budget(engine(lambda tokens: 50 * max(tokens, 200))) is None


def test_nothing_is_shown_where_the_backlog_grows(monkeypatch):
    monkeypatch.setattr(module, "offered_load", lambda _: OfferedLoad("clock", 1.0, grows=True))
    assert smaller_budget(engine(lambda tokens: 50 * max(tokens, 200))) is None


def test_steps_of_less_than_half_of_a_budget_do_not_show_it(monkeypatch):
    def least(tokens):
        monkeypatch.setattr(module, "smallest_batched_tokens", lambda _: tokens)
        return smaller_budget(engine(lambda tokens: 50 * max(tokens, 200), mixed=[220, 820] * 15))

    assert (least(440).tokens, least(440).size) == (440, 220)
    assert least(441) is None
