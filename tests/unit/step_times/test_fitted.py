"""Known costs are fitted back, what cannot be told apart is said, and recorded times come back in order."""

import math
import random
from types import SimpleNamespace

import msgspec
import polars as pl
import pytest

from schedtrace.errors import InputError, UsageError
from schedtrace.model.trace import Preemption, ScheduledRequest
from schedtrace.model.trace_facts import RankSync
from schedtrace.step_times import fitted as fitted_module
from schedtrace.step_times.batch import Batch, graph_sizes, graph_use
from schedtrace.step_times.cost_sums import Larger, Linear, fit_larger, fit_linear
from schedtrace.step_times.fitted import Counted, Fitted, Leaned, RecordedTimes, fit, load_fit
from schedtrace.step_times.fitting import (
    COMPUTE,
    DEVICE,
    MEMORY,
    OF_BATCH,
    USUAL_DOUBLINGS,
    USUAL_PER_DOUBLING,
    Extrapolation,
    extrapolation_errors,
    fit_device,
    gathering_us,
    observed,
    with_device_us,
    with_engine_columns,
)
from tests.makers import arrival, step

COLUMNS = ("prefill", "decode", "context")


def rows(count=400, **columns):
    draw = random.Random(1)  # noqa: S311  # made-up steps
    made = pl.DataFrame(
        {
            "prefill": [draw.choice([0, 0, draw.randrange(512)]) for _ in range(count)],
            "decode": [draw.randrange(64) for _ in range(count)],
            "context": [draw.randrange(20_000) for _ in range(count)],
        }
    ).with_columns(**columns)
    return made.with_columns(
        us=1000 + 2.0 * pl.col("prefill") + 3 * pl.col("decode") + 0.01 * pl.col("context")
    )


def costs(linear):
    return [linear.base_us, *linear.factors.values()]


@pytest.mark.parametrize("count", [20, 400])
def test_known_costs_are_fitted_back(count):
    linear = fit_linear(rows(count), "us", COLUMNS)
    assert costs(linear) == pytest.approx([1000, 2, 3, 0.01], rel=1e-6)
    assert linear.us({"prefill": 100, "decode": 10, "context": 1000}) == pytest.approx(1240)
    assert linear.steps == count


def test_one_step_of_twenty_that_hiccups_changes_little():
    slow = rows().with_columns(
        us=pl.when(pl.int_range(pl.len()) % 20 == 7).then(pl.col("us") * 10).otherwise("us")
    )
    assert costs(fit_linear(slow, "us", COLUMNS)) == pytest.approx([1000, 2, 3, 0.01], rel=0.01)


def test_the_mean_of_noisy_steps_is_kept():
    draw = random.Random(2)  # noqa: S311  # made-up noise
    noise = pl.Series([draw.choice([0.75, 1.25]) for _ in range(4000)])
    noisy = rows(4000).with_columns(us=pl.col("us") * noise)
    linear = fit_linear(noisy, "us", COLUMNS)
    assert sum(map(linear.us, noisy.iter_rows(named=True))) == pytest.approx(noisy["us"].sum(), rel=0.01)


def test_no_cost_is_negative():
    faster = rows().with_columns(us=2000 - pl.col("decode"))
    assert fit_linear(faster, "us", ("decode",)).factors == {"decode": 0.0}


@pytest.mark.parametrize("constant", [0, 8])
def test_a_column_that_never_changes_has_no_cost(constant):
    linear = fit_linear(rows(decode=pl.lit(constant)), "us", COLUMNS)
    assert linear.factors == pytest.approx({"prefill": 2, "context": 0.01})
    assert linear.base_us == pytest.approx(1000 + 3 * constant)
    assert [hidden.column for hidden in linear.unresolved] == ["decode"]
    usual = {"prefill": 10, "decode": constant, "context": 100}
    assert not linear.doublings_outside(usual)
    assert linear.doublings_outside({**usual, "decode": constant + 1})


def test_a_column_that_follows_another_has_no_cost_and_may_not_part_from_it():
    linear = fit_linear(rows(decode=pl.col("prefill") * 4 + 5), "us", COLUMNS)
    (hidden,) = linear.unresolved
    assert (hidden.column, hidden.constant) == ("decode", pytest.approx(5))
    assert hidden.factors == pytest.approx({"prefill": 4})
    assert linear.factors == pytest.approx({"prefill": 2 + 3 * 4, "context": 0.01})
    assert not linear.doublings_outside({"prefill": 100, "decode": 405, "context": 100})
    assert linear.doublings_outside({"prefill": 100, "decode": 900, "context": 100})


def test_outside_the_recorded_range_but_for_a_twentieth_of_it():
    linear = fit_linear(rows(), "us", COLUMNS)
    least, most = linear.ranges["decode"]
    assert (least, most) == (0, 63)
    inside, outside = 63 + 0.05 * 63 - 0.01, 63 + 0.05 * 63 + 0.01
    assert not linear.doublings_outside({"prefill": 100, "decode": inside, "context": 100})
    assert linear.doublings_outside({"prefill": 100, "decode": outside, "context": 100})


def test_counts_that_cannot_be_are_fitted_without_failing():
    """As in a broken trace: none above 0."""
    broken = rows(prefill=pl.int_range(pl.len()) % 2 - 1)
    assert fit_linear(broken, "us", COLUMNS).steps == 400


def test_too_few_steps():
    assert fit_linear(rows(19), "us", COLUMNS) is None


def got(*requests):
    return {
        "requests": [ScheduledRequest(*request) for request in requests],
        "total_requests": len(requests),
        "remaining_budget": 1000 - sum(request[2] for request in requests),
    }


def test_what_each_step_computed(view_of):
    made = view_of(
        step(
            0,
            arrived=[arrival("a", 0, prompt_tokens=7), arrival("b", 0, prompt_tokens=4)],
            **got(("a", 0, 5, "new")),
        ),
        step(1, **got(("a", 5, 2), ("b", 0, 4, "new"))),
        step(2, **got(("a", 7, 1), ("b", 4, 3, "running", 2))),
        step(3, **got(("a", 8, 1)), preempted=[Preemption("b", 6)]),
        step(4, **got(("b", 0, 7, "resumed"))),
        step(5, **got(("b", 7, 1))),
        step(6, **got(("stranger", 7, 1))),
    )
    assert observed(made).select(OF_BATCH).rows() == [
        (5, 1, 12.5, 0, 0, 0),
        (6, 2, 2 * 6 + 4 * 2.0, 0, 0, 0),
        (0, 0, 0, 4, 2, 11),
        (0, 0, 0, 1, 1, 8),
        (7, 1, 24.5, 0, 0, 0),  # recomputed
        (0, 0, 0, 1, 1, 7),
        (None,) * 6,  # its prompt is not known
    ]


def test_a_prompt_that_ends_in_a_chunk_of_one_token(view_of):
    steps = [step(n, **got(("a", n, 1))) for n in range(1, 4)]
    made = view_of(step(0, arrived=[arrival("a", 0, prompt_tokens=3)], **got(("a", 0, 1, "new"))), *steps)
    assert observed(made)["prefill_tokens"].to_list() == [1, 1, 1, 0]
    assert observed(made)["decode_context_tokens"].to_list() == [0, 0, 0, 3]


def test_gaps_and_the_arrivals_in_them(view_of):
    one = got(("a", 0, 1, "new"))
    made = view_of(
        step(0, start=0, took=100, back=1000, update_us=50, arrived=[arrival("a", 0, 0)], **one),
        step(1, start=1080, took=100, back=1000, update_us=50, **got(("a", 1, 1))),
        step(
            2, start=2200, update_us=50, arrived=[arrival("b", 2140, 2150), arrival("c", 2140, 2190)], **one
        ),
        step(3, start=2350, update_us=50, **one),  # another batch in flight: no output since the step before
    )
    assert observed(made).select("gap_us", "arrivals").rows() == [
        (None, None),
        (30, 0),
        (70, 2),
        (None, None),
    ]


def test_the_worker_clock_decides_with_batches_in_flight():
    frame = pl.DataFrame(
        {
            "total_requests": [1, 1, 0],
            "start_us": [0, 500, 900],
            "schedule_us": [100, 100, 100],
            "execute_after_us": [150, 400, None],
            "execute_us": [850, 1200, None],  # the second begins at 900, before the first ends at 1000
            "execution_us": [850, 1100, None],
            "busy_us": [950, 1500, 0],
        }
    )
    assert with_device_us(frame, overlapped=True)["device_us"].to_list() == [900, 1100, None]
    assert with_device_us(frame, overlapped=False)["device_us"].to_list() == [950, 1500, None]
    unknown = frame.with_columns(execute_us=pl.lit(None, pl.Int64))
    assert with_device_us(unknown, overlapped=True)["device_us"].to_list() == [950, 1500, None]


@pytest.fixture
def run(view_of):
    """Two trials; each step 100 us of ``schedule()``, 20 of update, 1 ms and 5 us a token on the device."""
    lines = []
    at = 0
    for number in range(60):
        trial, prompt = 1 + number // 30, 40 + number % 7
        name = f"t{trial}-{number}"
        for place, tokens in enumerate((prompt, *[1] * (number % 3))):
            back = 100 + 1000 + 5 * tokens + (500 if number % 30 == 0 and place == 0 else 0)
            first = place == 0
            lines.append(
                step(
                    len(lines),
                    trial=trial,
                    start=at,
                    took=100,
                    back=back,
                    update_us=19 + len(lines) % 3,
                    arrived=[arrival(name, at, at, prompt_tokens=prompt)] if first else [],
                    **got((name, 0 if first else prompt + place - 1, tokens, "new" if first else "running")),
                )
            )
            at += back + 20 + 30  # a gap of 29 to 31
    return view_of(*lines)


def test_a_fit_states_its_costs_error_and_source(run):
    model = fit([run], ["base"])
    one = Batch({"a": 45}, 45, 0, 0, prefill_requests=1, prefill_attention=45 * 22.5)
    assert model.device_us(one) == pytest.approx(1225, rel=1e-3)
    assert model.device_us(Batch({}, 0, 0, 0)) == 0
    assert (model.schedule_us(one), model.update_us(one)) == pytest.approx((100, 20), rel=0.02)
    assert model.fit.first_step_us == pytest.approx(500, abs=5)
    assert model.fit.error.median_abs_log < 1e-3
    assert model.fit.error.total_frac == pytest.approx(0, abs=1e-3)
    assert model.fit.trial_levels == pytest.approx([0, 0], abs=1e-3)
    assert [len(trial) for trial in model.fit.residuals] == [59, 59]
    assert [len(block) for block in model.residual_blocks()] == [25, 25, 9, 25, 25, 9]
    assert model.fit.source.runs == ["base"]
    assert model.fit.source.recorded_at == "2023-11-14T22:13:20+00:00"
    assert model.description.startswith(
        "Fitted to 118 steps of base (tiny on cpu, vLLM 0.32.0): half of them within 0%"
    )
    assert not model.extrapolates(one)
    assert model.extrapolates(Batch(dict.fromkeys("ab", 1), 0, 2, 90, 0, 2, 90))


def test_more_tokens_than_any_step_had_may_gain_nothing_by_being_together(run, tmp_path):
    model = fit([run], ["base"])
    assert model.most_tokens == 46
    two = Batch({"a": 46, "b": 46}, 92, 0, 0, prefill_requests=2, prefill_attention=2 * 46 * 23.0)
    one = Batch({"a": 46}, 46, 0, 0, prefill_requests=1, prefill_attention=46 * 23.0)
    assert model.without_economies_us(one) == model.device_us(one)
    assert model.without_economies_us(two) == pytest.approx(2 * model.device_us(one))
    assert model.without_economies_us(two) > model.device_us(two) + 900  # a step costs 1 ms
    assert model.deviated_us(two, 100) == model.without_economies_us(two)
    assert model.deviated_us(two, -100) == pytest.approx(model.device_us(one))
    model.save(tmp_path / "times.json")
    assert load_fit(tmp_path / "times.json").without_economies_us(two) == pytest.approx(model.device_us(two))


def test_a_larger_step_has_the_cost_of_any_prefill_as_often_as_recorded_steps_hold_its_tokens(run):
    """47 tokens are one more than any step had: they may take as long as two steps of 23.5."""
    model = fit([run], ["base"])
    device = Larger([Linear(1000.0, {"prefill_steps": 500.0, "prefill_tokens": 1.0}, [], {}, 50)])
    of_steps = Fitted(msgspec.structs.replace(model.fit, device=device), model.rows)
    batch = Batch({"a": 47}, 47, 0, 0, prefill_requests=1, prefill_attention=47 * 23.5)
    assert of_steps.device_us(batch) == 1000 + 2 * 500 + 47
    assert of_steps.without_economies_us(batch) == 2 * 1523.5


FIRST, LATER = True, False


@pytest.mark.parametrize(
    ("without_decodes", "lack_us"),
    [
        ([(LATER, 2000), (LATER, 2600)], 9700),
        ([(FIRST, 2000)], 10_000),
        ([(FIRST, 90_000)], 0),  # it started something
        ([(FIRST, 90_000), (LATER, 2000)], 10_000),
        ([(FIRST, 12_000), (LATER, 12_000)], 0),
        ([], 0),
    ],
)
def test_what_steps_without_decodes_lack_may_be_paid_once_more_for_as_many_decodes(
    run, without_decodes, lack_us
):
    """Batches seem to be padded to eight decodes: steps of 1 to 8 take 12 ms, and at most 8 were recorded."""
    firsts, times = zip(*[*without_decodes, *[(LATER, 12_000)] * 8], strict=True)
    decodes = [0] * len(without_decodes) + [*range(1, 9)]
    rows = sized(decodes, pl.Series(times)).with_columns(first=pl.Series(firsts), prefill_tokens=100)
    model = fit([run], ["base"])
    device = Larger([Linear(12_000.0, {}, [], {}, 50)])
    padded = Fitted(msgspec.structs.replace(model.fit, device=device), rows)
    assert padded.first_decode_us == lack_us
    batches = [Batch(dict.fromkeys(range(count), 1), 0, count, 0, 0, count) for count in (8, 9, 16, 17)]
    extra_us = [padded.without_economies_us(batch) - 12_000 for batch in batches]
    assert extra_us == [0, lack_us, lack_us, 2 * lack_us]
    assert [padded.exceeds_recorded(batch) for batch in batches] == [False, *[lack_us > 0] * 3]
    shown = Larger([Linear(12_000.0, {"decode_requests": 2000.0}, [], {}, 50)])  # 2 ms for each decode
    costly = Fitted(msgspec.structs.replace(padded.fit, device=shown), rows)
    fitted_us = [12_000 + 2000 * count for count in (8, 9, 16, 17)]
    edge_us = [fitted_us[0] + further * lack_us for further in (0, 1, 1, 2)]
    assert [costly.without_economies_us(batch) for batch in batches] == [*map(max, fitted_us, edge_us)]


def test_decodes_that_were_not_recorded_remain_uncertain_in_steps_of_the_recorded_size(run):
    """48 decodes are little more than the 46 tokens of a prefill, but at most one decode was recorded."""
    model = fit([run], ["base"])
    decodes = Batch({str(number): 1 for number in range(48)}, 0, 48, 45, 0, 48, 45)
    doublings = model.fit.device.outside_by_column(model._device_columns(decodes))["decode_requests"]
    assert doublings == pytest.approx(math.log2(49 / 2))
    parts_us = model.deviated_us(decodes, 2)
    assert parts_us > 3 * model.device_us(decodes)
    assert parts_us > 3 * model.without_economies_us(decodes)


def test_of_many_steps_whole_blocks_are_fitted(run, monkeypatch):
    monkeypatch.setattr(fitted_module, "MOST_STEPS", 60)
    assert fit([run], ["base"]).rows["step"].to_list() == [*range(25), *range(50, 75), *range(100, 120)]


def test_a_saved_fit_is_the_same(run, tmp_path):
    model = fit([run], ["base"], gathering_us=400.0)
    model.save(tmp_path / "times.json")
    loaded = load_fit(tmp_path / "times.json")
    assert loaded.fit == model.fit
    assert loaded.gathering_us() == model.resampled(1).gathering_us() == 400.0
    with pytest.raises(UsageError, match="fit the trace again"):
        loaded.resampled(1)


def test_files_that_cannot_be_used(run, tmp_path):
    with pytest.raises(InputError, match=r"nothing\.json: cannot be read"):
        load_fit(tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match=r"other\.json: no saved step times"):
        load_fit(tmp_path / "other.json")
    with pytest.raises(UsageError, match="cannot be written"):
        fit([run], ["base"]).save(tmp_path / "no" / "times.json")


def test_resampling_is_by_seed_and_by_whole_blocks(run):
    model = fit([run], ["base"])
    drawn = model.resampled(3, block=5)
    assert drawn.fit == model.resampled(3, block=5).fit
    assert drawn.rows["step"].to_list() != model.resampled(4, block=5).rows["step"].to_list()
    offsets = [at % 5 for at in range(5)]
    for trial in drawn.rows.partition_by("part", maintain_order=True):
        assert [number % 60 % 5 for number in trial["step"]] == offsets * (trial.height // 5)
    assert drawn.rows.height == model.rows.height


def test_of_few_steps_as_many_are_drawn(run):
    """26 steps are two blocks, one of a single step: that one drawn twice would be too few to fit."""
    model = fit([run], ["base"])
    few = Fitted(model.fit, model.rows.head(26))
    assert {few.resampled(seed).rows.height for seed in range(20)} == {26}


def test_a_trace_without_known_requests_is_refused(view_of):
    with pytest.raises(InputError, match="old: too few steps with known requests and times"):
        fit([view_of(*(step(n, **got(("a", n, 1))) for n in range(30)))], ["old"])


def test_recorded_times_come_back_in_order_and_then_fitted_ones(run):
    times = RecordedTimes(run, fit([run], ["base"]))
    rows = observed(run)
    batch = Batch({"a": 45}, 45, 0, 0, prefill_requests=1, prefill_attention=45 * 22.5)
    for row in rows.iter_rows(named=True):
        assert times.schedule_us(batch) == row["schedule_us"]
        assert times.device_us(batch) == row["busy_us"]
        assert times.update_us(batch) == row["update_us"]
        assert times.gap_us(0) == pytest.approx(31 - row["step"] % 3 if row["step"] < 119 else 30, abs=0.5)
    assert times.extrapolated == 0
    assert times.schedule_us(batch) == pytest.approx(100)
    assert times.extrapolated == 1
    assert times.device_us(batch) == pytest.approx(1225, rel=1e-3)
    assert times.device_us(Batch({}, 0, 0, 0)) == 0
    assert times.description.startswith("The 120 recorded steps, one by one; then: Fitted to 118 steps")


def test_a_step_is_outside_by_the_doublings_of_its_farthest_column():
    linear = fit_linear(rows(), "us", COLUMNS)
    assert linear.doublings_outside({"prefill": 100, "decode": 4 * 64 - 1, "context": 100}) == 2


def test_outside_the_range_a_time_leans_by_its_error_and_never_across_its_edge():
    linear = Linear(100.0, {"decode": 1.0}, [], {"decode": (7.0, 31.0)}, 50)
    larger, smaller = {"decode": 127.0}, {"decode": 1.0}  # two doublings beyond either end
    assert linear.leaned_us({"decode": 20.0}, 2, 0.0) == 120
    assert linear.leaned_us(larger, 2, 0.1) == pytest.approx(227 * math.exp(0.2))
    assert linear.leaned_us(larger, -2, 0.1) == pytest.approx(227 * math.exp(-0.2))
    assert linear.leaned_us(larger, -2, 0.5) == 131  # not less than with the 31 that were recorded
    assert linear.leaned_us(smaller, 1, 0.1) == 107


def test_the_error_of_a_factor_counts_for_what_lies_beyond_the_recorded_range():
    """2 us of error for each of 96 decodes beyond the 31 recorded ones, on top of 100 us."""
    linear = Linear(100.0, {"decode": 0.0}, [], {"decode": (7.0, 31.0)}, 50, {"decode": {"decode": 4.0}})
    assert linear.error_us({"decode": 31.0}) == 0
    assert linear.error_us({"decode": 127.0}) == 2 * 96
    assert linear.leaned_us({"decode": 127.0}, 1, 0.0) == pytest.approx(100 + 192)
    both = math.hypot(0.3, math.log(2.92))
    assert linear.leaned_us({"decode": 127.0}, 2, 0.3) == pytest.approx(100 * math.exp(2 * both))


def test_a_column_that_hardly_varied_has_an_uncertain_cost():
    """Eight of 400 steps have 3 decodes, the others 4; all take 1 ms, give or take 50 us."""
    draw = random.Random(3)  # noqa: S311  # made-up noise
    counts = [3 if 100 <= number < 104 or number >= 396 else 4 for number in range(400)]
    us = [1000 + draw.gauss(0, 50) for _ in counts]
    few = fit_linear(pl.DataFrame({"decode": counts, "us": us}), "us", ("decode",))
    half = fit_linear(pl.DataFrame({"decode": [3, 4] * 200, "us": us}), "us", ("decode",))
    errors = [math.sqrt(linear.covariance["decode"]["decode"]) for linear in (few, half)]
    # The textbook's errors: 50 / sqrt(400 * variance of the column).
    assert errors == pytest.approx([50 / math.sqrt(400 * 0.02 * 0.98), 50 / math.sqrt(100)], rel=0.15)


def test_neighbouring_steps_that_are_alike_weigh_less():
    """Each residual occurs four times in a row: the steps weigh as much as a quarter of them."""
    draw = random.Random(4)  # noqa: S311  # made-up noise
    noise = [draw.gauss(0, 50) for _ in range(400)]
    counts = [draw.choice([3, 4]) for _ in range(400)]
    alone, repeated = (
        fit_linear(
            pl.DataFrame({"decode": counts, "us": [1000 + residual for residual in residuals]}),
            "us",
            ("decode",),
        ).covariance["decode"]["decode"]
        for residuals in (noise, [residual for residual in noise[:100] for _ in range(4)])
    )
    assert repeated / alone == pytest.approx(1 + 2 * (0.75 + 0.5 + 0.25), rel=0.3)


PREFILL_DECODE = {"alike": ("prefill", "decode")}


def prefills_and_decodes(decodes, us):
    """Return 100 steps, every fourth of which has a prefill of 50 tokens beside the decodes."""
    steps = pl.DataFrame({"decode": decodes}).with_columns(
        prefill=pl.when(pl.int_range(pl.len()) % 4 == 0).then(50).otherwise(0)
    )
    return steps.with_columns(us=us)


@pytest.mark.parametrize("decodes", [[4] * 100, [4] * 98 + [3] * 2], ids=["one number", "nearly one number"])
def test_a_decode_whose_cost_no_step_shows_costs_as_much_as_a_token_of_prefill(decodes):
    draw = random.Random(5)  # noqa: S311  # made-up noise
    noise = pl.Series([draw.gauss(0, 20) for _ in decodes])
    steps = prefills_and_decodes(decodes, 1000 + 10.0 * (pl.col("prefill") + pl.col("decode")) + noise)
    tied = fit_linear(steps, "us", ("prefill", "decode"), **PREFILL_DECODE)
    assert tied.alike == ["prefill", "decode"]
    assert [tied.factors["decode"]] * 2 == pytest.approx([tied.factors["prefill"], 10], rel=0.05)
    assert tied.base_us == pytest.approx(1000, rel=0.05)
    assert tied.covariance["decode"] == pytest.approx(tied.covariance["prefill"])
    larger = {"prefill": 0.0, "decode": 40.0}
    assert tied.us(larger) == pytest.approx(1400, rel=0.05)
    assert tied.outside_by_column(larger)["decode"] > 3
    again = fit_linear(steps, "us", ("prefill", "decode"), **PREFILL_DECODE, like=tied)
    assert again == tied


@pytest.mark.parametrize("cost", [0.0, 30.0])
def test_a_cost_of_decodes_that_steps_show_is_its_own(cost):
    """None, or three times that of a token of prefill."""
    steps = prefills_and_decodes(
        [1, 9, 5, 7, 3] * 20, 1000 + 10.0 * pl.col("prefill") + cost * pl.col("decode")
    )
    own = fit_linear(steps, "us", ("prefill", "decode"), **PREFILL_DECODE)
    assert (own.alike, own.factors) == ([], pytest.approx({"prefill": 10, "decode": cost}, abs=1e-6))


def test_without_prefills_nothing_is_known_about_a_cost_of_decodes():
    steps = prefills_and_decodes([4] * 100, 1000).with_columns(prefill=0)
    assert fit_linear(steps, "us", ("prefill", "decode"), **PREFILL_DECODE).factors == {}


def test_parts_of_the_host_lean_by_the_error_of_their_costs(run):
    """At most one request was recorded; each of seven more costs 0 us, give or take 3 us."""
    model = fit([run], ["base"])
    part = Linear(100.0, {"requests": 0.0}, [], {"requests": (0.0, 1.0)}, 50, {"requests": {"requests": 9.0}})
    model = Fitted(msgspec.structs.replace(model.fit, schedule=part, update=part), model.rows)
    batch = Batch(dict.fromkeys("abcdefgh", 1), 0, 8, 400, 0, 8, 400)
    longer, shorter = Leaned(model, 2), Leaned(model, -2)
    for name in ("schedule_us", "update_us"):
        ends = [getattr(times, name)(batch) for times in (shorter, model, longer)]
        assert ends == pytest.approx([100, 100, 100 * 1.21**2])  # never less than at the edge
    assert longer.device_us(batch) == model.deviated_us(batch, 2)
    assert longer.wake_us() == model.wake_us()
    one = Batch({"a": 45}, 45, 0, 0, prefill_requests=1, prefill_attention=45 * 22.5)
    assert longer.schedule_us(one) == 100


def test_more_tokens_than_the_larger_of_two_sums_had_are_leaned(run):
    """The compute sum counts a batch's tokens, of which no steps are held out."""
    model = fit([run], ["base"])
    compute = Linear(900.0, {"batch_tokens": 5.0}, [], {"batch_tokens": (1.0, 46.0)}, 50)
    two = Fitted(
        msgspec.structs.replace(model.fit, device=Larger([Linear(1000.0, {}, [], {}, 50), compute])),
        model.rows,
    )
    batch = Batch({"a": 93}, 93, 0, 0, prefill_requests=1, prefill_attention=93 * 46.5)  # a doubling more
    assert two.deviated_us(batch, 1) == pytest.approx((900 + 5 * 93) * math.exp(USUAL_PER_DOUBLING))


def sized(counts, us):
    """Return rows of decodes only, each of this many requests."""
    columns = {"prefill_tokens": 0, "decode_context_tokens": 0, "prefill_attention": 0, "first": False}
    counted = dict.fromkeys(("decode_requests", "decode_tokens", "batch_tokens"), counts)
    return pl.DataFrame(counted).with_columns(
        **{name: pl.lit(value) for name, value in columns.items()}, device_us=us
    )


@pytest.mark.parametrize("times", [1, 2])
def test_larger_steps_held_out_show_how_far_the_fit_is_off_for_each_doubling(times):
    """Steps with 15 decodes are one doubling from 7: they take as long as the others say, or twice that."""
    decodes = pl.col("decode_requests")
    us = (100.0 + 10 * decodes) * pl.when(decodes > 7).then(times).otherwise(1)
    steps = sized([4, 5, 6, 7] * 20 + [15] * 20, us)
    device = fit_larger(steps, "device_us", DEVICE, (MEMORY, COMPUTE))
    usual = (USUAL_PER_DOUBLING * USUAL_DOUBLINGS) ** 2
    expected = math.sqrt((usual + math.log(times) ** 2) / (USUAL_DOUBLINGS**2 + 1))
    errors = extrapolation_errors(steps, device)
    assert errors["decode_requests"] == pytest.approx((expected, 1))
    assert errors["prefill_tokens"] == (USUAL_PER_DOUBLING, 0)  # another column shows nothing about it


def test_without_larger_steps_to_hold_out_the_error_is_the_usual_one():
    alike = sized([8] * 100, 180.0 + 0 * pl.col("decode_requests"))
    device = fit_larger(alike, "device_us", DEVICE, (MEMORY, COMPUTE))
    errors = extrapolation_errors(alike, device)
    assert {*errors.values()} == {(USUAL_PER_DOUBLING, 0)}


def mixed(us, *, seed=1):
    """Return 300 steps of 1 to 60 decodes; every third also has 64, 512 or 2,000 tokens of a prompt."""
    draw = random.Random(seed)  # noqa: S311  # made-up steps
    decodes = [draw.randrange(1, 61) for _ in range(300)]
    tokens = [draw.choice([64, 512, 2000]) if number % 3 == 0 else 0 for number in range(300)]
    steps = sized(decodes, 0.0).with_columns(
        prefill_tokens=pl.Series(tokens),
        prefill_attention=pl.Series([draw.randrange(1000) * size for size in tokens]),
        decode_context_tokens=pl.Series([draw.randrange(20_000) for _ in decodes]),
    )
    steps = steps.with_columns(batch_tokens=pl.col("prefill_tokens") + pl.col("decode_tokens"))
    return steps.with_columns(device_us=us)


@pytest.mark.parametrize("fixed_us", [0, 5000])
def test_what_any_prefill_costs_is_fitted_apart_from_the_cost_of_its_tokens(fixed_us):
    """A batch without a full CUDA graph takes longer, however few its prompt's tokens."""
    us = 2000.0 + 40 * pl.col("decode_requests") + 20 * pl.col("prefill_tokens")
    steps = mixed(us + fixed_us * (pl.col("prefill_tokens") > 0))
    [part] = fit_device(steps, None).parts
    assert part.factors.get("prefill_steps", 0) == pytest.approx(fixed_us, rel=1e-3)
    assert part.factors["prefill_tokens"] == pytest.approx(20, rel=1e-3)
    batch = Batch({"a": 100}, 100, 0, 0, prefill_requests=1)
    columns = {name: getattr(batch, name) for name in part.ranges}
    assert part.us(columns) == pytest.approx(2000 + fixed_us + 100 * 20, rel=1e-3)


@pytest.mark.parametrize(
    ("per_doubling", "reach", "doublings", "expected"),
    [
        (0.03, 2, 1.5, 0.045),
        (0.03, 2, 4, 0.06 + 2 * USUAL_PER_DOUBLING),
        (0.5, 1, 3, 1.5),
        (USUAL_PER_DOUBLING, 0, 3, 3 * USUAL_PER_DOUBLING),
    ],
)
def test_evidence_of_a_small_error_counts_as_far_as_it_reaches(per_doubling, reach, doublings, expected):
    """A device may become slower beyond all recorded steps, such as a CPU whose decodes fill its cores."""
    assert Extrapolation(per_doubling, reach).log_error(doublings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "sizes", "use"),
    [
        (5, [4, 8], (3, 0)),
        (8, [4, 8], (0, 0)),
        (9, [4, 8], (0, 1)),
        (9, [], (0, 0)),
        (None, [4], (None, None)),
    ],
)
def test_a_batch_is_padded_to_the_next_captured_size_or_runs_without_a_graph(tokens, sizes, use):
    assert graph_use(tokens, sizes) == use


SETTINGS = {
    "compilation_config.cudagraph_capture_sizes": [8, 4],
    "compilation_config.cudagraph_mode": "FULL_AND_PIECEWISE",
    "num_speculative_tokens": 2,
}


def with_own_columns(steps, settings=SETTINGS):
    return with_engine_columns(steps, SimpleNamespace(settings=settings))


def test_padding_and_a_batch_beyond_all_graphs_have_costs_of_their_own():
    """A step takes 1 ms, 100 us for each token of its graph, and 700 us more where it has none."""
    counts = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] * 10
    steps = with_own_columns(sized(counts, pl.lit(0.0))).with_columns(
        device_us=1000.0
        + 100 * (pl.col("batch_tokens") + pl.col("padding_tokens"))
        + 700 * pl.col("eager_steps")
    )
    assert steps["padding_tokens"].to_list()[:12] == [3, 2, 1, 0, 3, 2, 1, 0, 0, 0, 0, 0]
    [part] = fit_device(steps, None).parts
    expected = {"decode_requests": 100, "padding_tokens": 100, "eager_steps": 700}
    assert part.factors == pytest.approx(expected, abs=1e-6)


def test_a_token_of_padding_never_takes_far_longer_than_a_token():
    """The few batches of three are slow because the host is late: that is no cost of their padding."""
    counts = [4] * 50 + [3] * 2 + [8] * 50
    steps = with_own_columns(sized(counts, pl.lit(0.0))).with_columns(
        device_us=1000.0 + 100 * pl.col("batch_tokens") + 20_000 * pl.col("padding_tokens")
    )
    for fitted in (fit_device(steps, None), fit_device(steps, fit_device(steps, None))):
        [part] = fitted.parts
        assert "padding_tokens" not in part.factors
        assert part.factors["decode_requests"] == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(("without", "resolved"), [(0, False), (40, True)])
def test_what_drafts_cost_is_known_if_some_steps_have_none(without, resolved):
    counts = [1, 2, 3, 4, 5, 6, 7, 8] * 10
    steps = pl.concat([sized(counts, pl.lit(0.0)), sized(counts[:without], pl.lit(0.0))]).with_row_index()
    drafted = pl.when(pl.col("index") < len(counts)).then(3).otherwise(1)
    steps = steps.with_columns(decode_tokens=drafted * pl.col("decode_requests"))
    steps = with_own_columns(steps, {"num_speculative_tokens": 2}).with_columns(
        device_us=1000.0 + 10 * pl.col("decode_requests") + 30 * pl.col("draft_tokens")
    )
    [part] = fit_device(steps, None).parts
    assert ("draft_tokens" in part.factors) is resolved
    assert not resolved or part.factors["draft_tokens"] == pytest.approx(30)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (SETTINGS, [4, 8]),
        ({}, []),
        (SETTINGS | {"compilation_config.cudagraph_mode": "NONE"}, []),
    ],
)
def test_captured_sizes_are_those_that_are_used(settings, sizes):
    assert graph_sizes(SimpleNamespace(settings=settings)) == sizes


def fitted(outside, total_frac=0.0):
    return SimpleNamespace(
        fit=SimpleNamespace(error=SimpleNamespace(total_frac=total_frac)),
        device_us=lambda batch: 100.0 * batch.prefill_tokens,
        exceeds_recorded=lambda batch: batch.batch_tokens > 2,
        extrapolates=lambda batch: batch.prefill_tokens in outside,
        gap_us=lambda arrivals: 7.0 * arrivals,
    )


def batch(tokens):
    return Batch({"a": tokens}, tokens, 0, 0)


def test_steps_outside_are_counted():
    counted = Counted(fitted({3}))
    assert counted.outside_frac == 0.0
    assert [counted.device_us(batch(tokens)) for tokens in (1, 2, 3, 3)] == [100.0, 200.0, 300.0, 300.0]
    assert (counted.steps, counted.outside, counted.outside_frac, counted.larger) == (4, 2, 0.5, 2)
    assert counted.gap_us(2) == 14.0  # all else is the fit's


@pytest.mark.parametrize(
    ("total_frac", "options", "times"),
    [
        (0.0, {}, [100.0, 100.0, 100.0]),
        (0.0, {"device_us": lambda batch: 1000.0 * batch.prefill_tokens}, [1000.0, 1000.0, 1000.0]),
        (0.0, {"noise": [2.0, 0.5]}, [200.0, 50.0, 200.0]),
        (0.25, {}, [125.0, 125.0, 125.0]),  # what outliers add to all steps together
        (0.25, {"noise": [2.0]}, [200.0, 200.0, 200.0]),
    ],
)
def test_noise_multiplies_one_step_after_the_other_and_begins_anew(total_frac, options, times):
    counted = Counted(fitted((), total_frac), **options)
    assert [counted.device_us(batch(1)) for _ in times] == times


TOOK = [[900, 300, 5000], [400, 800, 700]]
"""All-reduces of each rank: the last to come took 400, 300 and 700 us."""


def ranks(run_of, took, **fields):
    for rank, of_rank in enumerate(took):
        syncs = [RankSync(100 * at, us, 0, at) for at, us in enumerate(of_rank)]
        run = run_of("ranks", step(0, syncs=syncs), engine_rank=rank, **fields)
    return run.traces


def test_a_gathering_takes_what_the_median_all_reduce_took_the_rank_that_came_last(run_of):
    assert gathering_us(ranks(run_of, TOOK)) == 400.0


def test_an_all_reduce_that_a_rank_did_not_record_says_nothing(run_of):
    assert gathering_us(ranks(run_of, [TOOK[0], TOOK[1][:2]])) == 350.0


@pytest.mark.parametrize("took", [[[], []], [[500]]])
def test_without_all_reduces_of_several_ranks_it_is_not_known(run_of, took):
    assert gathering_us(ranks(run_of, took)) is None


def test_what_the_recorded_ranks_gathered_is_in_their_gaps(run_of):
    balanced = "schedtrace.balance.scheduler.BalanceScheduler"
    assert gathering_us(ranks(run_of, TOOK, scheduler_class=balanced)) == 0.0
