"""A scheduler that works with less than its token budget, and a smaller budget that shortens latencies."""

from types import SimpleNamespace

import polars as pl
import pytest

from schedtrace.diagnose.gains import FixedShare
from schedtrace.diagnose.offered_load import OfferedLoad
from schedtrace.diagnose.rules import token_budget_bound
from schedtrace.diagnose.rules.token_budget_bound import shown_budget, smaller_budget, smaller_chunks
from schedtrace.explain.step import explain_step
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from schedtrace.present.pages.story import step_page
from schedtrace.present.renderers.text import render
from tests.makers import arrival, step


def spent(left=0, via="source"):
    return Exit("waiting", "condition", Cause.TOKEN_BUDGET, "w", budget_left=left, via=via)


def steps(*, ended, many=30, **fields):
    """One request is decoded; then nothing is scheduled while two wait."""
    came = [arrival("a", 0, 0), arrival("w", 0, 0), arrival("v", 0, 0)]
    first = step(0, got={"a": 1}, new="a", waiting=2, ended=ended, arrived=came)
    return [first, *(step(number, waiting=2, ended=ended, **fields) for number in range(1, many))]


def test_a_budget_of_nothing_is_not_too_small(found, recorded_words):
    [finding] = found("token-budget-bound", *steps(ended=spent()))
    assert [advice.setting for advice in finding.advice] == [None]
    assert finding.leads
    recorded_words(finding.title, finding.verdict)
    [stall] = found("stall", *steps(ended=spent()))
    assert stall.severity == "critical"


@pytest.mark.parametrize(
    "ended",
    [spent(via="inferred"), Exit("waiting", "break", Cause.KV_BLOCKS, "w", budget_left=0, via="source")],
)
def test_where_the_source_does_not_say_so_the_budget_is_the_recorded_one(view_of, ended):
    assert view_of(*steps(ended=ended)).steps["token_budget"].unique().to_list() == [1000]


def test_a_stall_without_a_root_cause_keeps_its_severity(run_of):
    from schedtrace.diagnose.analyze import analyze

    report = analyze([run_of("run", *steps(ended=None))])
    [stall] = [one for one in report.runs[0].findings if one.code == "stall"] or [
        one for root in report.runs[0].findings for one in root.symptoms if one.code == "stall"
    ]
    assert stall.severity == "critical"


def test_a_step_has_one_budget(run_of):
    text = render(step_page(explain_step(run_of("run", *steps(ended=spent())), 7)), width=110)
    assert "0 of 0 tokens of budget (1,000 are set), 0 left" in text
    assert "0 tokens of budget left" in text
    assert "With max_num_batched_tokens" not in text


SIZES = [220, 420, 820] * 10
DECODING = 20


def hides_small_prefills(tokens):
    """Return the time of a step on a device that computes up to 200 tokens as fast as fewer."""
    return 50 * max(tokens, 200)


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


@pytest.fixture
def _open_load(monkeypatch):
    monkeypatch.setattr(token_budget_bound, "throughput_counts", lambda _: False)
    monkeypatch.setattr(token_budget_bound, "offered_load", lambda _: OfferedLoad("clock", 1.0))
    monkeypatch.setattr(token_budget_bound, "smallest_batched_tokens", lambda _: 32)


@pytest.mark.usefixtures("_open_load")
def test_a_device_that_hides_small_prefills_gets_the_smallest_recorded_size():
    budget = smaller_budget(engine(hides_small_prefills))
    assert (budget.tokens, budget.size, budget.step_us) == (220, 220, 11_000)
    # Twenty larger steps of 600 prefill tokens on average become three each, of 200: 40 more. Each costs
    # 21 requests 1,000 us, the decodes' share of a step, and gives 20 decodes a token of 10,000 us.
    assert budget.larger_us == 31_000
    assert budget.saved_frac == pytest.approx(40 * (20 * 10_000 - 21 * 1000) / 100_000_000)


@pytest.mark.usefixtures("_open_load")
def test_decodes_fill_at_most_half_of_the_budget_and_vllm_accepts_it(monkeypatch):
    monkeypatch.setattr(token_budget_bound, "smallest_batched_tokens", lambda _: 400)
    assert smaller_budget(engine(hides_small_prefills)).tokens >= 400


@pytest.mark.usefixtures("_open_load")
@pytest.mark.parametrize(
    ("steps", "name", "value"),
    [
        ({"step_us": lambda tokens: 10_000 + 10 * tokens}, None, None),
        ({"waiting": 1000}, None, None),  # a step more costs each of a thousand requests 1,000 us
        ({}, "throughput_counts", True),
        ({}, "smallest_batched_tokens", None),
        ({}, "offered_load", OfferedLoad("clock", 1.0, grows=True)),
    ],
    ids=["fixed time", "a long queue", "throughput counts", "least budget unknown", "the backlog grows"],
)
def test_no_smaller_budget_is_shown_where_larger_steps_are_needed_or_may_be(monkeypatch, steps, name, value):
    if name:
        monkeypatch.setattr(token_budget_bound, name, lambda _: value)
    assert smaller_budget(engine(**{"step_us": hides_small_prefills, **steps})) is None


@pytest.mark.usefixtures("_open_load")
def test_steps_of_less_than_half_of_a_budget_do_not_show_it(monkeypatch):
    def least(tokens):
        monkeypatch.setattr(token_budget_bound, "smallest_batched_tokens", lambda _: tokens)
        return smaller_budget(engine(hides_small_prefills, mixed=[220, 820] * 15))

    assert (least(440).tokens, least(440).size) == (440, 220)
    assert least(441) is None


@pytest.mark.usefixtures("_open_load")
@pytest.mark.parametrize(
    ("waited_us", "throughput", "value"), [(599_999, False, None), (600_000, False, 820), (0, True, 820)]
)
def test_a_larger_budget_is_shown_only_if_waiting_costs_what_decodes_may_lose(
    monkeypatch, waited_us, throughput, value
):
    """Thirty steps of 1,000 us with twenty decodes each: steps of twice the time cost these 600 ms."""
    monkeypatch.setattr(token_budget_bound, "fixed_share", lambda *_, **__: FixedShare(0.6, 0.9, 1000))
    monkeypatch.setattr(token_budget_bound, "budget_times", lambda *_: 2.0)
    monkeypatch.setattr(token_budget_bound, "batched_tokens", lambda _: 410)
    monkeypatch.setattr(token_budget_bound, "smaller_budget", lambda _: None)
    monkeypatch.setattr(token_budget_bound, "throughput_counts", lambda _: throughput)
    waits = SimpleNamespace(time_us=waited_us, steps=engine(lambda _: 1000).steps.head(30))
    monkeypatch.setattr(token_budget_bound, "charged", lambda *_: waits)
    advice = shown_budget(None, waits)
    assert (None if advice is None else advice.value) == value


@pytest.mark.parametrize(("fixed_us", "warned"), [(1000, True), (50, False)])
def test_the_price_of_smaller_chunks_is_stated_if_a_step_costs_much_whatever_its_chunk(
    view_of, fixed_us, warned, recorded_words
):
    """30 chunks of 100 to 390 tokens; a token takes 5 us."""
    lines, at = [], 0
    for number, tokens in enumerate(range(100, 400, 10)):
        busy = fixed_us + 5 * tokens
        work = {"prefill_tokens": tokens, "decode_tokens": 0}
        came = [arrival("a", 0, 0, prompt_tokens=9000)] if not number else []
        new = "" if number else "a"
        lines.append(
            step(number, start=at, took=0, back=busy, got={"a": tokens}, new=new, arrived=came, **work)
        )
        at += busy
    timeline = view_of(*lines)
    advice = smaller_chunks(timeline, timeline.steps)
    assert ("take longer in all" in advice.message.template) is warned
    recorded_words(advice)
