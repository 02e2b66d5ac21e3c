"""Two data-parallel ranks in lock-step, with long prompts on one of them: real, and on simulated GPUs."""

import json

import polars as pl
import pytest

from schedtrace.read.run import read_run
from schedtrace.timeline.frames import offset
from tests.e2e.conftest import REPO, recorded, write_plugin

LONG, SHORT = 1500, 32
LOAD = [
    *[{"input_len": LONG, "output_len": 4, "data_parallel_rank": 0}] * 3,
    *[{"input_len": SHORT, "output_len": 40, "data_parallel_rank": 1}] * 5,
]
INTERVAL, SYNC_EVERY = 2, 4
OPTIONS = {
    "model": REPO / "examples" / "tiny-qwen3-lockstep", "data-parallel-size": 2, "max-model-len": 2048,
    "prefill-schedule-interval": INTERVAL, "dp-sync-interval": SYNC_EVERY, "request-rate": 50,
}  # fmt: skip
PASS = ("wave", "step_counter")


@pytest.fixture(scope="module")
def ranks(workplace):
    """The traces of both ranks, and what was counted in their engine cores: lines of a kind and a pass."""
    home = workplace / "ranks"
    home.mkdir()
    write_plugin(home, "rank_counter")
    load = home / "load.jsonl"
    load.write_text("".join(json.dumps(row) + "\n" for row in LOAD))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{home}:{REPO}")
        patch.setenv("COUNTED", str(home / "counted"))
        traces = read_run(recorded(workplace, "ranks", {"dataset": load, **OPTIONS})).traces
    counted = [(home / f"counted.{rank}").read_text().split("\n")[:-1] for rank in range(2)]
    return traces, [[line.split() for line in lines] for lines in counted]


def passes(frame):
    """Wave and counter of each row."""
    return frame.select(PASS).rows()


def test_every_schedule_and_every_dummy_batch_is_recorded_in_its_pass(ranks):
    for trace, counted in zip(*ranks, strict=True):
        seen = {"schedule": [], "dummy": []}
        for kind, wave, counter in counted:
            seen[kind].append((int(wave), int(counter)))
        assert passes(trace.steps) == seen["schedule"]
        assert passes(trace.dummies) == seen["dummy"]
        assert len(seen["dummy"]) > 0


def test_each_pass_of_each_wave_stands_once_in_every_trace(ranks):
    together = []
    for trace in ranks[0]:
        own = passes(trace.steps.filter(pl.col("total_requests") > 0))
        every = sorted([*own, *passes(trace.dummies)])
        assert len(set(every)) == len(every)
        together.append(every)
    assert together[0] == together[1]
    for wave in {wave for wave, _ in together[0]}:
        counters = [counter for one, counter in together[0] if one == wave]
        assert counters == list(range(len(counters)))


def test_ranks_wait_for_each_other_and_end_their_waves_together(ranks):
    one, other = ranks[0]
    keys = [*PASS, "wave_ended"]
    assert one.syncs.select(keys).rows() == other.syncs.select(keys).rows()
    waves = one.steps["wave"].n_unique()
    assert one.syncs["wave_ended"].sum() >= waves - 1
    counters = one.syncs["step_counter"]
    assert all(counter == 0 or (counter + 1) % SYNC_EVERY == 0 for counter in counters)


def test_the_ranks_clocks_are_one(ranks):
    """None is through with an all-reduce before the other has come to it."""
    one, other = ranks[0]
    apart = offset(other.header, one.header)
    assert apart.uncertainty_us == 0
    joint = one.syncs.join(other.syncs.with_columns(pl.col("began_us") + apart.us), on=PASS)
    ended = pl.col("began_us") + pl.col("took_us")
    other_ended = pl.col("began_us_right") + pl.col("took_us_right")
    rounding_us = 2
    assert joint.height > 2
    assert joint.select((ended + rounding_us >= pl.col("began_us_right")).all()).item()
    assert joint.select((other_ended + rounding_us >= pl.col("began_us")).all()).item()


def test_dummy_batches_stand_where_the_rank_did_nothing_else(ranks):
    for trace in ranks[0]:
        steps = trace.steps.filter(pl.col("total_requests") > 0)
        work = pl.concat(
            [
                steps.select(*PASS, begin="start_us", end=pl.col("output_us")),
                trace.dummies.select(*PASS, begin="began_us", end=pl.col("began_us") + pl.col("took_us")),
            ]
        ).sort(PASS)
        assert work.select((pl.col("begin").shift(-1) >= pl.col("end")).all()).item()
        told = [json.loads(line) for line in trace.path.read_text().splitlines()]
        assert sum(line.get("dummy_batches", 0) for line in told) == trace.dummies.height


def test_requests_go_to_the_rank_that_their_row_names(ranks):
    for rank, (trace, length) in enumerate(zip(ranks[0], (LONG, SHORT), strict=True)):
        assert trace.header.engine_rank == rank
        assert set(trace.arrivals["prompt_tokens"]) == {length}
        assert set(trace.arrivals["pinned_rank"]) == {rank}


def test_the_argument_that_throttles_prefills_follows_the_common_counter(ranks):
    for trace in ranks[0]:
        told = trace.steps.select(throttled="throttle_prefills", due=pl.col("step_counter") % INTERVAL != 0)
        assert told["throttled"].to_list() == told["due"].to_list()
        assert trace.header.settings["parallel_config.dp_sync_interval"] == SYNC_EVERY
        assert trace.header.data_parallel_size == 2


LARGE = {"hidden_size": 4096, "num_hidden_layers": 36, "num_experts": 8, "moe_intermediate_size": 3072}
"""A pass takes milliseconds on the GPU."""


def test_a_simulated_decode_waits_for_the_prefill_of_another_rank(workplace):
    folder = workplace / "experts"
    folder.mkdir()
    # Rank 1 decodes for seconds: the prompts of rank 0 come meanwhile, however late they are.
    decoding = {"input_len": SHORT, "output_len": 300, "data_parallel_rank": 1}
    load = folder / "load.jsonl"
    load.write_text("".join(json.dumps(row) + "\n" for row in [decoding, decoding, *LOAD[:3]]))
    small = json.loads((OPTIONS["model"] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(small | LARGE))
    options = {"executor": "simulated", "gpu": "h100", "dataset": load}
    options |= {"model": folder, "data-parallel-size": 2, "max-model-len": 2048, "request-rate": 50}
    one, other = read_run(recorded(workplace, "simulated-ranks", options)).traces
    apart = offset(other.header, one.header)
    mine, theirs = executed(one, 0), executed(other, apart.us)
    joint = mine.join(theirs, on=PASS)
    assert joint.height > 0
    assert (joint["began"] - joint["began_right"]).abs().max() <= 2  # rounded twice
    assert (joint["execute_us"] - joint["execute_us_right"]).abs().max() <= 1
    prefills = mine.filter(pl.col("prefill_tokens") >= LONG).join(theirs, on=PASS)
    decodes = theirs.filter(pl.col("prefill_tokens") == 0).join(mine, on=PASS, how="anti")
    assert prefills["execute_us_right"].min() > 1.5 * decodes["execute_us"].max()


def executed(trace, apart_us):
    """The steps that computed something, and when, on the common clock."""
    steps = trace.steps.filter(pl.col("total_requests") > 0)
    began = pl.col("start_us") + pl.col("execute_after_us") + apart_us
    return steps.select(*PASS, "prefill_tokens", "execute_us", began=began)
